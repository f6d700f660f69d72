"""Before anything imports torch or Triton: one thread a process, since pytest-xdist runs one process a core, and
Triton's interpreter where there is no GPU."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
