"""Before anything imports torch or Triton: one thread a process, since pytest-xdist runs one process a core, and
Triton's interpreter where there is no GPU. And signals are heard: a shell that starts something in the background, and
nohup, have them ignored in it, which every process of a test would inherit."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)
