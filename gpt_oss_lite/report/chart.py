"""A chart as HTML: an SVG that stretches with the page, and labels beside it that do not.

Curves lie in a square of 10,000 units that the page pulls to any width; strokes keep theirs. So one drawing serves wide
and narrow screens, text stays readable, and the page's script reads the values back from the paths for its tooltips.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

from gpt_oss_lite.report.curves import Axis, Floats, finite, thin

UNITS = 10_000


@dataclass(frozen=True)
class Curve:
    """A line, or dots, of one run."""

    run: int
    """Number of the run, which gives the colour."""
    name: str
    x: Floats
    y: Floats
    style: str = "line"
    """line, faint (behind the lines, without tooltip) or dots."""


@dataclass(frozen=True)
class Flag:
    """Something that happened at a place on the x axis."""

    run: int
    x: float
    kind: str
    text: str


@dataclass(frozen=True)
class Chart:
    """What a chart shows."""

    title: str
    note: str
    curves: Sequence[Curve]
    x: Axis
    y: Axis
    unit: str = ""
    large: bool = False
    flags: Sequence[Flag] = field(default_factory=list)


def number(value: float) -> str:
    """A figure in at most four digits: `0.00025`, `3.142`, `1.5 M`, `7.99 B`."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "n/a"
    for size, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= size * 0.9995:
            scale = 1e3 if unit == " k" else size
            return f"{value / scale:.4g}{unit}"
    if abs(value) < 1e-4:
        return f"{value:.2e}".replace("e-0", "e-")
    return f"{value:.4g}"


def draw(chart: Chart) -> str:
    """The chart as a <figure>."""
    drawn = [curve for curve in chart.curves if len(finite(curve.x, curve.y)[0])]
    note = f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""
    head = f"<figcaption><h3>{escape(chart.title)}</h3>{note}</figcaption>"
    if not drawn:
        return f'<figure class="chart">{head}<p class="empty">Nothing logged.</p></figure>'
    svg = "".join([_grid(chart), *(_mark(flag, chart.x) for flag in chart.flags), *(_path(c, chart) for c in drawn)])
    label = escape(f"{chart.title}: " + "; ".join(_in_words(curve) for curve in drawn if curve.style != "faint"))
    size = " large" if chart.large else ""
    axes = f'data-x="{chart.x.low!r} {chart.x.high!r}" data-y="{chart.y.low!r} {chart.y.high!r} {chart.y.log:d}"'
    return (
        f'<figure class="chart{size}">{head}<div class="frame">{_y_labels(chart)}'
        f'<div class="plot" tabindex="0" {axes} data-unit="{escape(chart.unit)}">'
        f'<svg viewBox="0 0 {UNITS} {UNITS}" preserveAspectRatio="none" role="img" aria-label="{label}">{svg}</svg>'
        f"{''.join(_flag(flag, chart.x) for flag in chart.flags)}</div>{_x_labels(chart)}</div></figure>"
    )


def _in_words(curve: Curve) -> str:
    """What a reader who does not see the chart gets: first, smallest, largest and last value."""
    _, y = finite(curve.x, curve.y)
    return f"{curve.name}: first {number(y[0])}, least {number(y.min())}, most {number(y.max())}, last {number(y[-1])}"


def _grid(chart: Chart) -> str:
    y = "".join(f"M0 {_down(chart.y, tick)}H{UNITS}" for tick in chart.y.ticks())
    x = "".join(f"M{_right(chart.x, tick)} 0V{UNITS}" for tick in chart.x.ticks())
    return f'<path class="grid" d="{y}{x}"/>'


def _path(curve: Curve, chart: Chart) -> str:
    x, y = thin(*finite(curve.x, curve.y))
    points = list(zip(_right(chart.x, x).tolist(), _down(chart.y, y).tolist(), strict=True))
    if curve.style == "dots":
        # A line of no length with a round cap is a dot that keeps its shape however the square is pulled.
        d = "".join(f"M{right} {down}h0" for right, down in points)
    else:
        d = "M" + "L".join(f"{right} {down}" for right, down in points)
        d += "h0" if len(points) == 1 else ""
    return f'<path class="{curve.style} run{curve.run}" data-name="{escape(curve.name)}" d="{d}"/>'


def _mark(flag: Flag, x: Axis) -> str:
    reach = f"V{UNITS}" if flag.kind != "save" else f"M{_right(x, flag.x)} {UNITS - 250}V{UNITS}"
    return f'<path class="mark {flag.kind} run{flag.run}" d="M{_right(x, flag.x)} 0{reach}"/>'


SYMBOLS = {"skip": "×", "rollback": "◀", "resume": "▶", "stop": "■", "give_up": "✖"}


def _flag(flag: Flag, x: Axis) -> str:
    if flag.kind not in SYMBOLS:
        return ""
    place = f'style="left:{100 * float(x.place(flag.x)):.2f}%" title="{escape(flag.text)}"'
    return f'<span class="flag {flag.kind} run{flag.run}" {place}>{SYMBOLS[flag.kind]}</span>'


def _y_labels(chart: Chart) -> str:
    ticks = chart.y.ticks()
    spans = [
        f'<span style="top:{100 - 100 * float(chart.y.place(tick)):.2f}%">{escape(number(tick))}</span>'
        for tick in ticks
    ]
    return f'<div class="y-labels" aria-hidden="true">{"".join(spans)}</div>'


def _x_labels(chart: Chart) -> str:
    spans = [
        f'<span style="left:{100 * float(chart.x.place(tick)):.2f}%">{escape(number(tick))}</span>'
        for tick in chart.x.ticks()
    ]
    return f'<div class="x-labels" aria-hidden="true">{"".join(spans)}</div>'


def _right(axis: Axis, value: Floats | float) -> np.ndarray:
    return np.rint(axis.place(value) * UNITS).astype(np.int64)


def _down(axis: Axis, value: Floats | float) -> np.ndarray:
    return np.rint((1 - axis.place(value)) * UNITS).astype(np.int64)
