"""The NaN guard: counts non-finite micro-batches without stopping the device, and says when to go back.

Each micro-batch of a step has one flag, made on the device. A step with a flag set is skipped whole there (see
`optimizer.update_unless`); the host reads the flags a few steps later, when they have long arrived. A non-finite
gradient norm with finite losses flags all of its step's micro-batches.

After `max_consecutive` flags in a row the run goes back to its newest good checkpoint, and passes over the windows up
to the last flagged micro-batch of the step that made the count full. What is decided depends on the flags alone, never
on when they are read: a resumed run decides as the unbroken one did.

Shapes: A micro-batches of a step.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt_oss_lite.training.late import LAG_STEPS, HostCopy


@dataclass(frozen=True)
class SkippedStep:
    """A step whose update was skipped."""

    step: int
    position: int
    """Stream position of the step's first window."""
    micro_batches: list[int]
    """Flagged micro-batches, from 0."""


@dataclass(frozen=True)
class Verdict:
    """What the flags read so far say."""

    skipped: list[SkippedStep]
    """Steps newly read that were skipped."""
    resume_position: int | None
    """Stream position after the last non-finite micro-batch, when the run must go back; None otherwise."""


@dataclass(frozen=True)
class _Pending:
    step: int
    position: int
    flags_A: HostCopy


def micro_batch_flags(losses_A: Tensor, norm: Tensor) -> Tensor:
    """Flags of a step's micro-batches, (A,) bool on the losses' device.

    Args:
        losses_A: loss of each micro-batch.
        norm: global gradient norm, scalar.
    """
    bad_A = ~torch.isfinite(losses_A)
    return bad_A | (~torch.isfinite(norm) & ~bad_A.any())


class NanGuard:
    """Reads flags late and counts them in a row.

    Args:
        max_consecutive: flags in a row that send the run back.
        micro_batch_size: windows of a micro-batch.
    """

    def __init__(self, max_consecutive: int, micro_batch_size: int) -> None:
        self._max_consecutive = max_consecutive
        self._micro_batch_size = micro_batch_size
        self.streak = 0
        self._pending: deque[_Pending] = deque()

    def record(self, step: int, position: int, flags_A: Tensor) -> None:
        """Take a step's flags: its number, the stream position of its first window, and the flags on any device."""
        self._pending.append(_Pending(step, position, HostCopy(flags_A)))

    def read(self, everything: bool = False) -> Verdict:
        """Read the flags that are LAG_STEPS old, or all of them (before a save, so that its count is whole)."""
        skipped: list[SkippedStep] = []
        keep = 0 if everything else LAG_STEPS
        while len(self._pending) > keep:
            end = self._count(self._pending.popleft(), skipped)
            if end is not None:
                return Verdict(skipped, end)
        return Verdict(skipped, None)

    def reset(self, streak: int) -> None:
        """Start over with a count, for a run that went to a checkpoint."""
        self.streak = streak
        self._pending.clear()

    def _count(self, pending: _Pending, skipped: list[SkippedStep]) -> int | None:
        """Count one step; the position after the last flag when a streak is too long."""
        flags = pending.flags_A.tolist()
        flagged = [index for index, flag in enumerate(flags) if flag]
        if flagged:
            skipped.append(SkippedStep(pending.step, pending.position, flagged))
        end = None
        for index, flag in enumerate(flags):
            if flag:
                self.streak += 1
                if self.streak >= self._max_consecutive:
                    end = pending.position + (index + 1) * self._micro_batch_size
            elif end is not None:
                break
            else:
                self.streak = 0
        return end
