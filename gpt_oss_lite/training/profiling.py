"""`pretrain --profile N`: where the time of N steps goes, once the first ones have warmed everything up.

Writes trace.json.gz (for ui.perfetto.dev or chrome://tracing) and kernels.txt, the longest
kernels first. A profiled step is slower than others, so the run's logged speed is not a measurement then.
"""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from shared_data.console import say
from shared_data.files import write_atomic

WARMUP_STEPS = 3
TABLE_ROWS = 60


class StepProfiler:
    """Counts the loop's steps and records some of them."""

    def __init__(self, folder: Path, n_steps: int) -> None:
        """Args: folder: where the files go; n_steps: steps to record, after WARMUP_STEPS that are not."""
        self._folder = folder
        self._left = WARMUP_STEPS + n_steps
        self._on_cuda = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_cuda else [])]
        phases = schedule(wait=WARMUP_STEPS - 1, warmup=1, active=n_steps, repeat=1)
        self._profiler = profile(activities=activities, schedule=phases, on_trace_ready=self._write)
        self._profiler.start()

    def step(self) -> None:
        """To be called after each step of the loop."""
        if self._left:
            self._left -= 1
            self._profiler.step()
            if not self._left:
                self._profiler.stop()

    def _write(self, recorded: profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        order = "self_device_time_total" if self._on_cuda else "self_cpu_time_total"
        write_atomic(self._folder / "kernels.txt", recorded.key_averages().table(sort_by=order, row_limit=TABLE_ROWS))
        recorded.export_chrome_trace(str(self._folder / "trace.json.gz"))
        say(f"[profile] {self._folder / 'kernels.txt'} and trace.json.gz")
