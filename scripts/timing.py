"""How the benchmarks time a training step on a GPU."""

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch


def time_steps(step: Callable[[], Any], warmup: int, steps: int) -> tuple[float, float]:
    """Median seconds of a step and the peak of allocated memory in bytes, after `warmup` steps.

    The device's own clock marks each step's end and the host never waits between them, as in a run.
    """
    for _ in range(warmup):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    seconds = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) / 1e3
    return seconds, torch.cuda.max_memory_allocated()
