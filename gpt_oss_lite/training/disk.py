"""Room on the disk: what checkpoints need, and what is free, known before a write can fail half-way.

A checkpoint holds weights and two moments, one of a matrix that Muon updates, all fp32. While one is written the ones
to be kept are still there, so a run needs room for one more than it keeps.
"""

import errno
import shutil
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from gpt_oss_lite.config import TrainingConfig
from gpt_oss_lite.training.optimizer import muon_matrices
from shared_data.errors import UserError

FP32 = 4
# Headers, random state, meta; and what the log grows by meanwhile.
OVERHEAD_BYTES = 256 * 2**10


def checkpoint_bytes(model: nn.Module, optimizer: str) -> int:
    """Bytes of one checkpoint on disk.

    Args:
        model: on any device; the meta device will do.
        optimizer: as training.optimizer.
    """
    tensors = 3 * sum(parameter.numel() for parameter in model.parameters())
    if optimizer == "muon":
        tensors -= sum(matrix.numel() for matrix in muon_matrices(model).values())
    return FP32 * tensors + OVERHEAD_BYTES


def free_bytes(folder: Path) -> int:
    """Bytes that may still be written to a folder's file system; the folder itself need not be there yet."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def kept_steps(steps: Iterable[int], keep: int, keep_every: int) -> set[int]:
    """Which of some complete steps stay: the `keep` newest, and every multiple of `keep_every` (0: none)."""
    ascending = sorted(steps)
    for_ever = {step for step in ascending if keep_every and step % keep_every == 0}
    return set(ascending[-keep:]) | for_ever


def most_checkpoints(training: TrainingConfig, stop_step: int) -> int:
    """Checkpoints that lie on the disk at once, at most, in a run to `stop_step`: those kept, and the one being
    written."""
    every = training.resolved_keep_every
    saves = -(-stop_step // training.save_interval)
    for_ever = stop_step // every if every else 0
    return min(saves, for_ever + training.keep_last_n + 1)


def assert_room_to_write(folder: Path, n_bytes: int) -> None:
    """Refuse a write that cannot fit, before the first byte.

    Raises:
        OSError: ENOSPC, with both figures.
    """
    free = free_bytes(folder)
    if free < n_bytes:
        raise OSError(
            errno.ENOSPC, f"a checkpoint takes {n_bytes / 1e9:.3g} GB, {free / 1e9:.3g} GB are free", str(folder)
        )


def check_room_for_run(folder: Path, size: int, training: TrainingConfig, stop_step: int, there: int = 0) -> str | None:
    """Foresee a full disk before the run.

    Args:
        folder: where checkpoints will lie.
        size: of a checkpoint, in bytes.
        there: complete checkpoints that lie in the folder already.

    Returns:
        A warning when not all of the checkpoints that will lie there at once have room; None when they have.

    Raises:
        UserError: not even the next one has.
    """
    free = free_bytes(folder)
    if free < size:
        raise UserError(
            f"{folder}: a checkpoint takes {size / 1e9:.3g} GB, but {free / 1e9:.3g} GB are free; make room, or choose "
            "another --out"
        )
    more = max(1, most_checkpoints(training, stop_step) - there)
    if free >= more * size:
        return None
    return (
        f"{folder}: {more} more checkpoints of {size / 1e9:.3g} GB will lie there at once, but {free / 1e9:.3g} GB are "
        "free: the run will not be able to save its later ones; make room, or set training.keep_last_n or "
        "training.keep_every lower"
    )
