"""Saving a run while it trains: the step waits for a copy of its state, a thread writes it.

A save is due while an earlier one is still being written only when writing is slower than training; it then waits. A
write that failed for good leaves the older checkpoints whole, and the run tries again with its next checkpoint; the
last save of a process must succeed, or the process says that it failed.
"""

import errno
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gpt_oss_lite.training.background import PAUSES_S, BackgroundWriter, Outcome
from gpt_oss_lite.training.checkpoint import CheckpointManager
from gpt_oss_lite.training.distributed import MainRankFailed, Ranks
from gpt_oss_lite.training.mirror import Mirror
from gpt_oss_lite.training.snapshot import HostBuffers, Snapshot, take_snapshot
from shared_data.console import describe, say


@dataclass(frozen=True)
class Waited:
    """Seconds that training stood still for a save."""

    for_earlier_write: float
    for_copy: float


class Saver:
    """Takes a run's checkpoints.

    Args:
        manager: where they go.
        mirror: their second home; a copy that fails is a warning, and made good with the next checkpoint.
        pauses_s: see BackgroundWriter.
    """

    def __init__(
        self, manager: CheckpointManager, mirror: Mirror | None = None, pauses_s: tuple[float, ...] = PAUSES_S
    ) -> None:
        self._manager, self._mirror = manager, mirror
        self._writer = BackgroundWriter(pauses_s)
        self._buffers = HostBuffers()

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writer.busy

    def reserve(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Take the memory of the copies before training."""
        self._buffers.reserve(model, optimizer)

    def save(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        step: int,
        scheduler: LambdaLR,
        extra_meta: Mapping[str, Any],
    ) -> Waited:
        """Copy the state between two steps, and start writing it."""
        started = time.perf_counter()
        self._writer.wait()
        free = time.perf_counter()
        snapshot = take_snapshot(model, optimizer, step, scheduler, extra_meta, self._buffers)
        self._writer.submit(step, lambda: self._write(snapshot))
        return Waited(free - started, time.perf_counter() - free)

    def save_in_shards(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        step: int,
        scheduler: LambdaLR,
        extra_meta: Mapping[str, Any],
        ranks: Ranks,
    ) -> Waited:
        """Write the checkpoint of a sharded model, all ranks together; training stands still meanwhile."""
        from gpt_oss_lite.training.sharded import save_shards

        started = time.perf_counter()
        self._writer.wait()
        free = time.perf_counter()
        error: OSError | None = None
        try:
            save_shards(self._manager, model, optimizer, step, scheduler, extra_meta, ranks)
        except OSError as failure:
            error = failure
            say(f"WARNING: CHECKPOINT OF STEP {step} NOT WRITTEN: {describe(failure)}")
        except MainRankFailed:  # training goes on with all ranks or with none
            error = OSError(errno.EIO, "the first rank could not write it")
        waited = Waited(free - started, time.perf_counter() - free)
        if error is None and ranks.is_main and self._mirror is not None:
            self._writer.submit(step, lambda: self._copy(step))
        else:
            self._writer.record(Outcome(step, waited.for_copy, 1, error))
        return waited

    def outcomes(self) -> list[Outcome]:
        """Writes that ended since the last call."""
        return self._writer.outcomes()

    def drain(self) -> list[Outcome]:
        """Wait for the write that is going on; writes that ended since the last call."""
        self._writer.wait()
        return self._writer.outcomes()

    def _write(self, snapshot: Snapshot) -> None:
        self._manager.write(snapshot)
        self._manager.prune(newest=snapshot.step)
        if self._mirror is not None:
            self._copy(snapshot.step)

    def _copy(self, step: int) -> None:
        assert self._mirror is not None
        try:
            self._mirror.push(self._manager)
        except Exception as error:  # each store has errors of its own; none of them may stop the run
            say(
                f"WARNING: CHECKPOINT OF STEP {step} NOT COPIED to {self._mirror.url} "
                f"({type(error).__name__}: {error}); it will be with the next one"
            )
