"""Curves for a page: smoothed, thinned without losing an extreme, and axes with round numbers.

Shapes: N points, B buckets.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

BUCKETS = 400
"""A curve with more than twice as many points is thinned to the smallest and the largest of each bucket."""


def finite(x_N: Floats, y_N: Floats) -> tuple[Floats, Floats]:
    """The points of a curve that have a value."""
    kept = np.isfinite(x_N) & np.isfinite(y_N)
    return x_N[kept], y_N[kept]


def half_life(n_points: int) -> float:
    """Points, to either side, after which a smoothed curve gives half the weight: a two-hundredth of the run."""
    return max(n_points / 200, 1.0)


def smooth(y_N: Floats) -> Floats:
    """Mean of finite values with weights that fall off exponentially to both sides, so that the curve does not lag."""
    decay = 0.5 ** (1 / half_life(len(y_N)))
    ones_N = np.ones_like(y_N)
    sums_N, weights_N = (_faded(v_N, decay) + _faded(v_N[::-1], decay)[::-1] - v_N for v_N in (y_N, ones_N))
    return sums_N / weights_N


def _faded(y_N: Floats, decay: float) -> Floats:
    """Each value plus what is left of those before it."""
    return np.array(list(itertools.accumulate(y_N.tolist(), lambda left, value: left * decay + value)))


def thin(x_N: Floats, y_N: Floats, buckets: int = BUCKETS) -> tuple[Floats, Floats]:
    """Keep of each of B equal spans of x the points with the smallest and the largest y, and the curve's two ends.

    Every point kept is one of the curve's, and no spike is lost. x must not decrease.
    """
    if len(x_N) <= 2 * buckets:
        return x_N, y_N
    edges = np.searchsorted(x_N, np.linspace(x_N[0], x_N[-1], buckets + 1)[1:-1])
    kept = {0, len(x_N) - 1}
    for start, stop in zip([0, *edges], [*edges, len(x_N)], strict=True):
        if start < stop:
            kept |= {int(start + y_N[start:stop].argmin()), int(start + y_N[start:stop].argmax())}
    order = sorted(kept)
    return x_N[order], y_N[order]


def bucket_means(values: Floats, n_buckets: int) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Means of spans of rows of an array (N, ...), NaN left out, with each span's first row, and N at the end."""
    edges = np.unique(np.linspace(0, len(values), n_buckets + 1).round().astype(np.int64))
    sums = np.add.reduceat(np.nan_to_num(values), edges[:-1], axis=0)
    counts = np.add.reduceat(np.isfinite(values).astype(np.float64), edges[:-1], axis=0)
    with np.errstate(invalid="ignore"):
        return sums / counts, edges


@dataclass(frozen=True)
class Axis:
    """A range of values, linear or logarithmic."""

    low: float
    high: float
    log: bool = False

    def place(self, value: Floats | float) -> Floats:
        """Where values lie, 0 at the low end and 1 at the high one; what lies outside stays at the end."""
        low, high, at = (np.log(v) if self.log else np.asarray(v) for v in (self.low, self.high, value))
        return np.clip((at - low) / (high - low), 0.0, 1.0)

    def ticks(self, count: int = 5) -> list[float]:
        """Round numbers inside the range."""
        ratio = self.high / self.low if self.log else 1.0
        if ratio >= 2:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            digits = (
                (1, 1.5, 2, 3, 4, 5, 7)
                if ratio < 8
                else (1, 2, 3, 5)
                if ratio < 30
                else (1, 2, 5)
                if ratio < 1e4
                else (1,)
            )
            marks = [digit * 10.0**decade for decade in decades for digit in digits]
            return [mark for mark in marks if self.low <= mark <= self.high]
        span = self.high - self.low
        step = 10.0 ** math.floor(math.log10(span / count))
        step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= count)
        first = math.ceil(self.low / step - 1e-9)
        return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]


def axis_over(values: list[Floats], log: bool = False, from_zero: bool = False) -> Axis:
    """The range of some values with a little room; logarithmic only if all are positive."""
    merged = np.concatenate([*values, np.empty(0)])
    merged = merged[np.isfinite(merged)]
    if not len(merged):
        return Axis(0.0, 1.0)
    low, high = float(merged.min()), float(merged.max())
    if log and low > 0:
        room = max((high / low) ** 0.04, 1.02)
        return Axis(low / room, high * room, log=True)
    low = min(low, 0.0) if from_zero else low
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return Axis(low if from_zero and low == 0 else low - room, high + room)
