"""Spikes: steps whose loss or gradient norm lies far above what it has been of late.

A running mean and variance of each signal stay on the device, so that a spike is known before the update without the
host waiting; a recipe may have such updates skipped (the idea is OLMo-core's SkipStepOptimizer). For the
first `window` steps the mean is the plain one, after that an exponential one over about as many steps. A spike enters
it at the threshold, not at its height: one outlier does not hide the next, and a lasting change is taken up.

Shapes: S signals, in the order of SIGNALS.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt_oss_lite.training.late import LAG_STEPS, HostCopy

SIGNALS = ("ce", "grad_norm")
# A deviation below this share of the mean is rounding, not noise of training.
LEAST_DEVIATION = 1e-3


@dataclass(frozen=True)
class Spike:
    """One signal of one step."""

    step: int
    position: int
    """Stream position of the step's first window."""
    signal: str
    value: float
    zscore: float
    """Standard deviations above the running mean."""


@dataclass(frozen=True)
class _Pending:
    step: int
    position: int
    figures_3S: HostCopy


class SpikeWatch:
    """Watches a run's loss and gradient norm.

    Args:
        zscore: deviations above the mean that make a spike; 0: nothing is one.
        window: steps that the mean looks back over.
        device: where the signals are made.
    """

    def __init__(self, zscore: float, window: int, device: torch.device) -> None:
        self._zscore, self._window, self._device = zscore, window, device
        self._pending: deque[_Pending] = deque()
        self._statistics_3S = self._as_statistics(None)

    def observe(self, step: int, position: int, values_S: Tensor) -> Tensor:
        """Take the signals of a step.

        Args:
            step: its number.
            position: stream position of its first window.
            values_S: cross-entropy and gradient norm, on the device. Non-finite ones are the NaN guard's, not spikes.

        Returns:
            Whether any is a spike, a bool scalar on the device.
        """
        values_S = values_S.detach().double()
        count_S, mean_S, variance_S = self._statistics_3S
        deviation_S = torch.maximum(variance_S.sqrt(), LEAST_DEVIATION * mean_S.abs()).clamp_min(1e-30)
        zscore_S = (values_S - mean_S) / deviation_S
        finite_S, settled_S = torch.isfinite(values_S), count_S >= self._window
        spike_S = finite_S & settled_S & (zscore_S > self._zscore) if self._zscore else torch.zeros_like(finite_S)

        taken_S = torch.where(spike_S, mean_S + self._zscore * deviation_S, values_S)
        weight_S = 1.0 / (count_S + 1).clamp_max(self._window)
        change_S = taken_S - mean_S
        updated_3S = torch.stack(
            [count_S + 1, mean_S + weight_S * change_S, (1 - weight_S) * (variance_S + weight_S * change_S**2)]
        )
        self._statistics_3S = torch.where(finite_S, updated_3S, self._statistics_3S)
        figures_3S = torch.stack([spike_S.double(), values_S, zscore_S])
        self._pending.append(_Pending(step, position, HostCopy(figures_3S)))
        return spike_S.any()

    def read(self, everything: bool = False) -> list[Spike]:
        """Spikes of the steps that are LAG_STEPS old, or of all."""
        spikes = []
        while len(self._pending) > (0 if everything else LAG_STEPS):
            pending = self._pending.popleft()
            for signal, is_spike, value, zscore in zip(SIGNALS, *pending.figures_3S.tolist(), strict=True):
                if is_spike:
                    spikes.append(Spike(pending.step, pending.position, signal, value, zscore))
        return spikes

    def state(self) -> list[list[float]]:
        """Count, mean and variance of each signal, for a checkpoint; exact, as fp64."""
        return self._statistics_3S.tolist()

    def load(self, state: list[list[float]] | None) -> None:
        """Go on from a state of `state`; None: from the start."""
        self._pending.clear()
        self._statistics_3S = self._as_statistics(state)

    def _as_statistics(self, state: list[list[float]] | None) -> Tensor:
        empty = [[0.0] * len(SIGNALS)] * 3
        return torch.tensor(state or empty, dtype=torch.float64, device=self._device)
