"""Which charts a page has, drawn from the rows and events of its runs."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpt_oss_lite.report.chart import Chart, Curve, Flag
from gpt_oss_lite.report.curves import Axis, Floats, axis_over, finite, half_life, smooth
from gpt_oss_lite.report.run_log import START_EVENTS, RunLog

MIN_ROWS_FOR_DETAIL = 40
FLAG_KINDS = ("skip", "rollback", "resume", "stop", "give_up", "save")
FLAG_PLACES = 200
"""Flags of one kind nearer to each other than this share of the axis are drawn once."""


def charts(runs: Sequence[RunLog], names: Sequence[str]) -> list[Chart]:
    """The charts of a page, in order; all share the x axis, tokens trained on."""
    x = token_axis(runs)
    result = [_loss(runs, names, x)]
    if max((len(run.rows) for run in runs), default=0) >= MIN_ROWS_FOR_DETAIL:
        result.append(_late_loss(runs, names, x))

    def chart(title: str, note: str, figures: Callable[[RunLog], Floats], unit: str = "", **axis: bool) -> None:
        curves = _pairs(runs, names, figures)
        result.append(Chart(title, note, curves, x, axis_over([c.y for c in curves], **axis), unit))

    chart("Gradient norm", "Global, before clipping; logarithmic.", lambda run: run.column("grad_norm"), log=True)
    result.append(_learning_rate(runs, names, x))
    chart(
        "Throughput",
        "Tokens per second since the row before, without saving and evaluation.",
        lambda run: run.column("tokens_per_s"),
        "tok/s",
        from_zero=True,
    )
    chart("Waiting for data", "Seconds a step.", lambda run: run.column("data_wait_s"), "s", from_zero=True)
    chart("Balancing loss", "Mean over the layers; 1.0 is balanced.", lambda run: run.column("aux"))
    chart(
        "Expert imbalance", "The busiest expert's load over the mean, in the worst layer; 1.0 is balanced.", _imbalance
    )
    chart(
        "Router entropy", f"Nats, mean over the layers.{_uniform(runs)}", lambda run: _layer_mean(run, "router_entropy")
    )
    chart("Sink logits", "Mean over heads and layers.", lambda run: _layer_mean(run, "sink_mean"))
    return [chart for chart in result if any(len(curve.y) for curve in chart.curves)]


def token_axis(runs: Sequence[RunLog]) -> Axis:
    """From zero to the most tokens that a run has trained on."""
    most = max((float(run.tokens[-1]) for run in runs if run.rows), default=1.0)
    return Axis(0.0, most)


def flags(runs: Sequence[RunLog], names: Sequence[str], x: Axis) -> list[Flag]:
    """What happened when: skips, rollbacks (where they left off), resumes, stops, saves."""
    found: dict[tuple[int, str, int], Flag] = {}
    for number, run in enumerate(runs):
        for event in run.events:
            if event["event"] in FLAG_KINDS:
                at = (event.get("from_step") or event["step"]) * run.tokens_per_step
                if math.isfinite(at) and at <= x.high * 1.001:
                    place = (number, event["event"], round(FLAG_PLACES * at / x.high))
                    text = f"{names[number]}: {event_text(event)}"
                    found.setdefault(place, Flag(number, at, event["event"], text))
    return list(found.values())


def event_text(event: dict[str, Any]) -> str:
    """An event in words."""
    step, kind = event["step"], event["event"]
    if kind == "skip":
        return f"step {step:,} skipped: non-finite in micro-batches {event.get('micro_batches')}"
    if kind == "rollback":
        return f"rolled back from step {event.get('from_step', step):,} to {step:,}"
    if kind in START_EVENTS:
        what = "started" if kind == "start" else f"resumed from step {step:,}"
        versions = event.get("versions")
        return what if versions is None else f"{what}, torch {versions.get('torch')} on {versions.get('device')}"
    if kind == "stop":
        return f"stopped at step {step:,} ({event.get('reason', '?')})"
    words = {"save": "saved step", "done": "done at step", "eval": "evaluated step",
             "give_up": "given up by the NaN guard at step"}  # fmt: skip
    return f"{words.get(kind, kind + ' at step')} {step:,}"


def _pairs(runs: Sequence[RunLog], names: Sequence[str], figures: Callable[[RunLog], Floats]) -> list[Curve]:
    """For each run the logged figures, faint, and in front of them the same smoothed."""
    curves = []
    for number, run in enumerate(runs):
        x, y = finite(run.tokens, figures(run))
        curves.append(Curve(number, names[number], x, y, "faint"))
        curves.append(Curve(number, names[number], x, smooth(y)))
    return sorted(curves, key=lambda curve: curve.style != "faint")


def _validation(runs: Sequence[RunLog], names: Sequence[str]) -> list[Curve]:
    curves = []
    for number, run in enumerate(runs):
        known = [event for event in run.evaluations if isinstance(event.get("loss"), float)]
        x = np.array([event["step"] * run.tokens_per_step for event in known], dtype=np.float64)
        curves.append(Curve(number, f"{names[number]} validation", x, np.array([e["loss"] for e in known]), "dots"))
    return curves


def _loss_curves(runs: Sequence[RunLog], names: Sequence[str]) -> list[Curve]:
    training = [f"{name} training" for name in names]
    return [*_pairs(runs, training, lambda run: run.column("ce")), *_validation(runs, names)]


def _loss(runs: Sequence[RunLog], names: Sequence[str], x: Axis) -> Chart:
    curves = _loss_curves(runs, names)
    rows = max((half_life(len(run.rows)) for run in runs), default=1.0)
    note = (
        "Cross-entropy in nats per token, logarithmic. Line: training, a mean whose weights fall to half in "
        f"{rows:.0f} logged row{'s' if rows >= 1.5 else ''} to either side; faint: as logged; dots: validation."
    )
    y = axis_over([curve.y for curve in curves], log=True)
    return Chart("Loss", note, curves, x, y, "nats", large=True, flags=flags(runs, names, x))


def _late_loss(runs: Sequence[RunLog], names: Sequence[str], x: Axis) -> Chart:
    half = Axis(x.high / 2, x.high)
    late = []
    for curve in _loss_curves(runs, names):
        kept = curve.x >= half.low
        if curve.style != "faint":
            late.append(Curve(curve.run, curve.name, curve.x[kept], curve.y[kept], curve.style))
    note = "The same for the second half of the tokens, linear; without the figures as logged."
    return Chart("Loss, second half", note, late, half, axis_over([curve.y for curve in late]), "nats")


def _learning_rate(runs: Sequence[RunLog], names: Sequence[str], x: Axis) -> Chart:
    curves = [Curve(number, names[number], run.tokens, run.column("lr")) for number, run in enumerate(runs)]
    return Chart("Learning rate", "Of each step's update.", curves, x, axis_over([c.y for c in curves], from_zero=True))


def _imbalance(run: RunLog) -> Floats:
    load = run.expert_load
    if not load.size:
        return np.full(len(run.rows), np.nan)
    return (load.max(axis=2) / load.mean(axis=2)).max(axis=1)


def _layer_mean(run: RunLog, key: str) -> Floats:
    by_layer = run.by_layer(key)
    return by_layer.mean(axis=1) if by_layer.size else np.full(len(run.rows), np.nan)


def _uniform(runs: Sequence[RunLog]) -> str:
    experts = {run.expert_load.shape[2] for run in runs} - {0}
    words = [f"ln {count} = {math.log(count):.3f}" for count in sorted(experts)]
    return f" A uniform router has {', '.join(words)}." if words else ""
