"""What to say, and to leave behind, when a step does not fit in the GPU's memory."""

from pathlib import Path

import torch

from gpt_oss_lite.config import Recipe
from gpt_oss_lite.training.layout import ONE_GPU, Layout
from gpt_oss_lite.training.memory import fastest_that_fits
from shared_data.console import say

SNAPSHOT = "memory_snapshot.pickle"


def advice(recipe: Recipe, total_bytes: int, layout: Layout = ONE_GPU) -> str:
    """One line that names the setting that would fit in a memory of `total_bytes` on each GPU, by the estimate."""
    found = fastest_that_fits(recipe, total_bytes, layout)
    if found is None:
        return (
            f"no setting of this recipe fits in {total_bytes / 1e9:.1f} GB by the estimate; a smaller "
            "model.max_seq_len or model needs less"
        )
    setting, estimate = found
    words = " ".join(f"--set {word}" for word in setting.overrides())
    return f"by the estimate this fits, with {estimate.total_gb:.1f} of {total_bytes / 1e9:.1f} GB: {words}"


def report_out_of_memory(recipe: Recipe, run_folder: Path, layout: Layout) -> None:
    """Write the allocator's state for pytorch.org/memory_viz and say what would fit."""
    path = run_folder / SNAPSHOT
    torch.cuda.memory._dump_snapshot(str(path))
    _, total_bytes = torch.cuda.mem_get_info()
    say(f"error: the GPU is out of memory; its state is in {path}")
    say(advice(recipe, total_bytes, layout))
