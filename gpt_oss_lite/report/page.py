"""One self-contained HTML page of one or several runs: no network, no fonts, nothing to install.

Drawings are made here; the script on the page only adds tooltips and switches. Everything that comes from a run is
escaped.
"""

import datetime
import itertools
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from gpt_oss_lite.report.chart import draw, number
from gpt_oss_lite.report.curves import BUCKETS, finite, smooth
from gpt_oss_lite.report.heat_map import HeatMap, heat_map
from gpt_oss_lite.report.run_charts import charts, event_text
from gpt_oss_lite.report.run_log import RunLog, flatten, unique_names
from shared_data.yaml_files import dump_yaml

COLOURS = 6
MAX_EVENTS = 200
MAX_SAMPLES = 8
QUIET_EVENTS = ("eval", "save")


def render(runs: Sequence[RunLog], now: datetime.datetime) -> str:
    """The page."""
    names = unique_names(runs)
    many = len(runs) > 1
    title = f"{len(runs)} runs: {', '.join(names)}" if many else f"Run {names[0]}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">Made {now:%Y-%m-%d %H:%M} UTC by GPT-OSS-Lite from metrics.jsonl and events.jsonl.</p>',
        _legend(names) if many else "",
        _summary(runs, names),
        "<h2>Curves</h2>",
        _drawn_note(runs),
        f'<div class="charts">{"".join(draw(chart) for chart in charts(runs, names))}</div>',
        "<h2>Expert load</h2>",
        *(_heat(number, run, names[number], many) for number, run in enumerate(runs)),
        _samples(runs, names),
        "<h2>Recipe</h2>",
        _recipe(runs, names),
        "<h2>Events</h2>",
        *(_events(number, run, names[number], many) for number, run in enumerate(runs)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_asset('page.css')}{_run_styles(len(runs))}</style></head>"
        f"<body><main>{''.join(body)}</main><script>{_asset('page.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return (files("gpt_oss_lite.report") / name).read_text(encoding="utf-8")


def _run_styles(n_runs: int) -> str:
    """Six colours, told apart also by people who do not see all colours; then the same again with other dashes."""
    rules = []
    for run in range(n_runs):
        rules.append(f".run{run}{{--c:var(--run{run % COLOURS})}}.hide-{run} .plot .run{run}{{display:none}}")
        if run >= COLOURS:
            rules.append(f".line.run{run}{{stroke-dasharray:{6 * (run // COLOURS)} 4}}")
    return "".join(rules)


def _name(run: int, name: str) -> str:
    return f'<span class="swatch run{run}"></span>{escape(name)}'


def _legend(names: Sequence[str]) -> str:
    boxes = [
        f'<label class="run{run}"><input type="checkbox" checked value="{run}">{_name(run, name)}</label>'
        for run, name in enumerate(names)
    ]
    return f'<div class="legend" role="group" aria-label="Runs shown in the curves">{"".join(boxes)}</div>'


def _drawn_note(runs: Sequence[RunLog]) -> str:
    rows = max(len(run.rows) for run in runs)
    thinned = (
        f" Of {rows:,} logged rows each curve shows the smallest and the largest value in each of {BUCKETS} equal "
        "spans, so every spike is there; smoothing came before."
        if rows > 2 * BUCKETS
        else " Every logged row is drawn."
    )
    return (
        '<p class="note">Over tokens trained on. Point at a chart, or focus it and use the arrow keys, for values.'
        f"{thinned} On the loss: × step skipped, ◀ rolled back, ▶ resumed, ■ stopped, ✖ given up; ticks at the bottom "
        "are saves.</p>"
    )


def _summary(runs: Sequence[RunLog], names: Sequence[str]) -> str:
    columns = [_summary_of(run) for run in runs]
    keys = list(dict.fromkeys(key for column in columns for key in column))
    return _table(names, [(key, [column.get(key, "–") for column in columns]) for key in keys])


def _summary_of(run: RunLog) -> dict[str, str]:
    result = {"status": run.status}
    if run.ending is None and run.last_sign is not None:
        result["last sign"] = f"{datetime.datetime.fromtimestamp(run.last_sign, datetime.UTC):%Y-%m-%d %H:%M} UTC"
    if run.rows:
        last = run.rows[-1]
        _, losses = finite(run.tokens, run.column("ce"))
        result["steps"] = f"{last['step']:,}"
        result["tokens"] = number(last["tokens"])
        if len(losses):
            result["training loss (smoothed)"] = f"{smooth(losses)[-1]:.4f}"
    if run.evaluations:
        best = min(run.evaluations, key=lambda event: event.get("loss") or np.inf)
        newest = run.evaluations[-1]
        result["validation loss"] = f"{newest.get('loss') or np.nan:.4f} (least {best.get('loss') or np.nan:.4f})"
        parts = {"all": newest, **(newest.get("by_source") or {})}
        bits = [
            f"{name} {part['bits_per_byte']:.4f}" for name, part in sorted(parts.items()) if part.get("bits_per_byte")
        ]
        if bits:
            result["bits per byte"] = ", ".join(bits)
    if run.rows:
        result |= _speed_of(run)
    if run.damaged:
        result["damaged lines"] = f"{run.damaged} passed over"
    return result


def _speed_of(run: RunLog) -> dict[str, str]:
    last, speed, mfu = run.rows[-1], run.column("tokens_per_s"), run.column("mfu")
    result = {"throughput (median)": f"{number(float(np.nanmedian(speed)))} tok/s" if np.isfinite(speed).any() else "–"}
    result["MFU (median)"] = f"{np.nanmedian(mfu):.1%}" if np.isfinite(mfu).any() else "n/a on this device"
    if last.get("memory_gib"):
        result["peak memory"] = f"{last['memory_gib']:.2f} GiB"
    counts = {kind: sum(event["event"] == kind for event in run.events) for kind in ("skip", "rollback", "resume")}
    result["skips, rollbacks, resumes"] = ", ".join(str(count) for count in counts.values())
    if device := run.record.get("versions", {}).get("device"):
        result["device"] = str(device)
    return result


def _table(names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    head = "".join(f"<th>{_name(run, name)}</th>" for run, name in enumerate(names))
    body = "".join(
        f"<tr><th scope=row>{escape(key)}</th>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for key, values in rows
    )
    head = f'<thead><tr><th class="corner"></th>{head}</tr></thead>'
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _heat(run_number: int, run: RunLog, name: str, many: bool) -> str:
    title = f"<h3>{_name(run_number, name)}</h3>" if many else ""
    heat = heat_map(run.expert_load)
    if heat is None:
        return f'{title}<p class="empty">No expert load logged.</p>'
    columns = heat.cells_LEC.shape[2]
    rows = len(run.rows)
    spans = (
        f"each column is the mean of {rows / columns:.0f} logged rows" if rows > columns else "a column a logged row"
    )
    note = (
        f'<p class="note">Rows: experts, layer by layer. Columns: time; {spans}. Colour: load as a multiple of a '
        'balanced share, 0 <span class="ramp"></span> 3 or more; its middle is 1.</p>'
    )
    return f'<figure class="heat">{title}{note}{_heat_frame(run, heat, name)}</figure>'


def _heat_frame(run: RunLog, heat: HeatMap, name: str) -> str:
    layers, experts, columns = heat.cells_LEC.shape
    total = layers * (experts + 1) - 1
    height = total * max(2, min(10, 640 // total))
    labels = "".join(
        f'<span style="top:{100 * (layer * (experts + 1) + experts / 2) / total:.2f}%">layer {layer}</span>'
        for layer in range(0, layers, max(1, layers // 24))
    )
    edges = heat.first_rows
    spans = " ".join(
        f"{run.rows[first]['step']} {run.rows[last - 1]['step']}" for first, last in itertools.pairwise(edges)
    )
    x_labels = "".join(
        f'<span style="left:{25 * quarter}%">{number(run.rows[(len(run.rows) - 1) * quarter // 4]["tokens"])}</span>'
        for quarter in range(5)
    )
    return (
        f'<div class="frame"><div class="y-labels" aria-hidden="true">{labels}</div>'
        f'<div class="plot" tabindex="0" style="height:{height}px" data-cells="{heat.cells()}" '
        f'data-shape="{layers} {experts} {columns}" data-steps="{spans}"><picture>'
        f'<source media="(prefers-color-scheme: dark)" srcset="{heat.png(dark=True)}">'
        f'<img src="{heat.png(dark=False)}" alt="{escape(_heat_in_words(run, name))}"></picture></div>'
        f'<div class="x-labels" aria-hidden="true">{x_labels}</div></div>'
    )


def _heat_in_words(run: RunLog, name: str) -> str:
    last = run.expert_load[-1]
    imbalance = last.max(axis=1) / last.mean(axis=1)
    return f"Expert load of {name}; busiest over mean at the end, by layer: " + ", ".join(f"{v:.2f}" for v in imbalance)


def _samples(runs: Sequence[RunLog], names: Sequence[str]) -> str:
    blocks = []
    for run_number, run in enumerate(runs):
        for sample in run.samples[-MAX_SAMPLES:]:
            about = f"{_name(run_number, names[run_number])} at step {sample['step']:,}"
            prompt, text = (escape(str(sample.get(key, ""))) for key in ("prompt", "text"))
            blocks.append(
                f'<div class="sample run{run_number}"><div class="soft">{about}</div>'
                f'<pre><span class="prompt">{prompt}</span>{text}</pre></div>'
            )
    if not blocks:
        return ""
    note = f"The newest {MAX_SAMPLES} of each run at most; the prompt is grey."
    return f'<h2>Samples</h2><p class="note">{note}</p>{"".join(blocks)}'


def _recipe(runs: Sequence[RunLog], names: Sequence[str]) -> str:
    facts = [{**flatten(run.recipe), **_record_facts(run)} for run in runs]
    keys = list(dict.fromkeys(key for fact in facts for key in fact))
    differing = [key for key in keys if len({_show(fact.get(key, "–")) for fact in facts}) > 1]
    parts = []
    if len(runs) > 1 and differing:
        rows = [(key, [_show(fact.get(key, "–")) for fact in facts]) for key in differing]
        parts.append(f'<p class="note">What differs.</p>{_table(names, rows)}')
    elif len(runs) > 1:
        parts.append("<p>The runs have the same recipe, seed, corpus and versions.</p>")
    for run, name in zip(runs, names, strict=True):
        if run.recipe:
            parts.append(
                f"<details><summary>Whole recipe of {escape(name)}</summary><pre>{escape(dump_yaml(run.recipe))}</pre>"
                "</details>"
            )
    return "".join(parts) or '<p class="empty">No config.yaml.</p>'


def _record_facts(run: RunLog) -> dict[str, Any]:
    record = run.record
    facts = {"seed": record.get("seed"), "init_from": record.get("init_from"), "corpus": record.get("corpus")}
    return {**flatten({key: value for key, value in facts.items() if value is not None}),
            **flatten({"versions": record.get("versions", {})})}  # fmt: skip


def _show(value: Any) -> str:
    return "null" if value is None else str(value)


def _events(run_number: int, run: RunLog, name: str, many: bool) -> str:
    title = f"<h3>{_name(run_number, name)}</h3>" if many else ""
    saves = [event for event in run.events if event["event"] == "save"]
    loud = [event for event in run.events if event["event"] not in QUIET_EVENTS]
    lines = []
    if saves:
        seconds = [event["seconds"] for event in saves if isinstance(event.get("seconds"), float)]
        took = f", {np.mean(seconds):.2g} s each" if seconds else ""
        lines.append(f"{len(saves):,} saves{took}; the newest of step {saves[-1]['step']:,}.")
    if run.evaluations:
        lines.append(f"{len(run.evaluations):,} evaluations on the run's path.")
    if len(loud) > MAX_EVENTS:
        lines.append(f"The newest {MAX_EVENTS} of {len(loud):,} other events:")
    rows = "".join(_event_row(event) for event in loud[-MAX_EVENTS:])
    table = f"<table><thead><tr><th>UTC</th><th>step</th><th>what</th></tr></thead><tbody>{rows}</tbody></table>"
    note = f'<p class="note">{escape(" ".join(lines))}</p>'
    return f'{title}{note}<div class="scroll">{table if loud else ""}</div>'


def _event_row(event: dict[str, Any]) -> str:
    time = event.get("time")
    stamp = f"{datetime.datetime.fromtimestamp(time, datetime.UTC):%Y-%m-%d %H:%M:%S}" if time else "–"
    bad = ' class="bad"' if event["event"] in ("skip", "rollback", "give_up") else ""
    return f"<tr><td>{stamp}</td><td>{event['step']:,}</td><td{bad}>{escape(event_text(event))}</td></tr>"
