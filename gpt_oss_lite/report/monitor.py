"""A run in the terminal: where it stands, how fast it goes, what is left, how its experts share the work.

Reads what the run writes, so it can be started and stopped at any time, also after the run.
"""

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gpt_oss_lite.report.chart import number
from gpt_oss_lite.report.curves import Floats, bucket_means, finite, smooth
from gpt_oss_lite.report.run_charts import event_text
from gpt_oss_lite.report.run_log import CUT_OFF, RunLog, RunReader
from gpt_oss_lite.training.logger import format_duration
from shared_data.console import count_of

BARS = "▁▂▃▄▅▆▇█"
LAST_EVENTS = 6
MAX_EXPERTS_SHOWN = 16
BAR = " | "
FRAME = 16
"""Columns of a terminal that the frame and the labels take."""
SILENT_INTERVALS = 5
"""A run that has logged nothing for so many times its usual interval, and a minute, is called silent."""


def watch(folder: Path, interval: float) -> None:
    """Show a run until it ends, or once where there is no terminal or the run has ended.

    Raises:
        UserError: there is no run.
    """
    reader, console = RunReader(folder), Console()
    if not console.is_terminal or reader.read().ending is not None:
        log = reader.read()
        if console.is_terminal:
            console.print(screen(log, time.time(), console.width))
        else:
            for label, text in lines(log, time.time(), 60):
                print(f"{label:<12}{text}")
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            log = reader.read()
            live.update(screen(log, time.time(), console.width, console.height - 1), refresh=True)
            if log.ending is not None:
                return
            time.sleep(interval)


def figures(log: RunLog, now: float) -> dict[str, Any]:
    """What `--json` prints: the run's standing and the newest row."""
    row = log.rows[-1] if log.rows else None
    result = {"run": str(log.folder), "status": standing(log, now), "stop_step": log.stop_step,
              "writer_lives": log.writer_lives, "seconds_left": seconds_left(log), "row": row}  # fmt: skip
    return {**result, "evaluation": log.evaluations[-1] if log.evaluations else None}


def standing(log: RunLog, now: float) -> str:
    """`running`, `silent for 12 min`, that its process is gone, or how the run ended."""
    if log.ending is not None:
        return log.status
    sign = log.last_sign
    silence = None if sign is None else max(now - sign, 0.0)
    if log.is_cut_off:
        return CUT_OFF + ("" if silence is None else f"; last sign {format_duration(silence)} ago")
    times = log.column("time")
    if silence is None or not len(times):
        return "no step logged yet"
    usual = float(np.median(np.diff(times[-21:]))) if len(times) > 1 else 0.0
    if silence <= max(60.0, SILENT_INTERVALS * usual):
        return f"running, last sign {format_duration(silence)} ago"
    if log.writer_lives:
        return f"silent for {format_duration(silence)}, though its process lives: it hangs, or is stopped"
    where = f" on {log.host}" if log.host else ""
    return f"silent for {format_duration(silence)}: killed, or it hangs{where}"


def seconds_left(log: RunLog) -> float | None:
    """Time to the last step at the speed of the newest row; None when it is not known, or there is none left."""
    if not log.rows or log.stop_step is None or log.ending is not None or log.is_cut_off:
        return None
    speed = log.column("tokens_per_s")[-1]
    steps = log.stop_step - log.rows[-1]["step"]
    return steps * log.tokens_per_step / speed if steps > 0 and speed > 0 else None


def sparkline(values: Sequence[float] | Floats, width: int, floor: float | None = None) -> str:
    """Values as a row of bars from the smallest (or `floor`) up; where more come than fit, means over spans."""
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    if not len(known):
        return ""
    means, _ = bucket_means(known, min(width, len(known)))
    low, high = means.min() if floor is None else floor, means.max()
    places = (means - low) / (high - low) * (len(BARS) - 1) if high > low else np.zeros(len(means))
    return "".join(BARS[int(place)] for place in places.round())


def lines(log: RunLog, now: float, width: int) -> list[tuple[str, str]]:
    """(label, text) of everything that is shown, in order; `width` is that of the sparklines."""
    shown = [("run", f"{log.name}: {standing(log, now)}"), *_run_lines(log, width)]
    return shown + [(label, text.plain) for label, text in experts(log)]


def _run_lines(log: RunLog, width: int) -> list[tuple[str, str]]:
    shown: list[tuple[str, str]] = []
    if log.rows:
        shown += [("progress", _progress(log)), *_loss(log, width), *_speed(log, width), _update(log.rows[-1])]
    shown += [("event" if index == 0 else "", line) for index, line in enumerate(_events(log))]
    return shown + ([_routers(log.rows[-1])] if log.rows else [])


def screen(log: RunLog, now: float, width: int, height: int | None = None) -> RenderableType:
    """The same for a terminal, with a bar and colours.

    Args:
        width: columns.
        height: lines; with fewer than all layers need, only the least even ones are shown. None: no limit.
    """
    layers = list(experts(log, width - FRAME))
    panel, console = _panel(log, now, width, layers), Console(width=width)
    shown = len(layers)
    while height is not None and shown and len(console.render_lines(panel)) > height:
        shown -= 1
        panel = _panel(log, now, width, _least_even(log, layers, shown))
    return panel


def _panel(log: RunLog, now: float, width: int, layers: Sequence[tuple[str, Text]]) -> Panel:
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(style="dim", no_wrap=True, min_width=len("validation"))
    grid.add_column(ratio=1)
    stands = standing(log, now)
    title = f" {log.name}: {stands} "
    if len(title) > width - 4:
        title = f" {log.name} "
        grid.add_row("run", Text(stands))
    if log.rows and log.stop_step:
        grid.add_row("", ProgressBar(total=log.stop_step, completed=log.rows[-1]["step"]))
    room = max(width - FRAME, 10)
    for label, line in _run_lines(log, room):
        grid.add_row(label, Text(break_at_bars(line, room)))
    for label, text in layers:
        grid.add_row(label, text)
    done = log.ending is not None and log.ending["event"] == "done"
    style = "green" if done else "red" if log.is_cut_off else "yellow" if stands.startswith("silent") else ""
    return Panel(grid, title=Text(title, style=f"bold {style}"), title_align="left")


def _least_even(log: RunLog, layers: Sequence[tuple[str, Text]], count: int) -> list[tuple[str, Text]]:
    """The layers with the busiest experts, in order, and how many are left out."""
    chosen = sorted(np.argsort(-log.expert_load[-1].max(axis=1), kind="stable")[:count])
    left = len(layers) - count
    return [*(layers[layer] for layer in chosen), ("", Text(f"{count_of(left, 'layer')} more, more even", style="dim"))]


def break_at_bars(line: str, width: int) -> str:
    """A line's parts, which bars divide, on as many lines as they need in a width; one that is too long stays whole."""
    parts = line.split(BAR)
    folded = parts[0]
    for part in parts[1:]:
        fits = len(folded.rsplit("\n", 1)[-1]) + len(BAR) + len(part) <= width
        folded += (BAR if fits else "\n") + part
    return folded


def experts(log: RunLog, width: int | None = None) -> Iterator[tuple[str, Text]]:
    """A line for each layer: load of each expert as a multiple of its share, and the busiest; of a given width, where
    there is no room for all experts, the least and the largest load."""
    load = log.expert_load
    if not load.size:
        return
    ratios = load[-1] / load[-1].mean(axis=1, keepdims=True)
    n_experts = ratios.shape[1]
    every = n_experts <= MAX_EXPERTS_SHOWN and (width is None or len("0.00 ") * n_experts <= width)
    for layer, ratio in enumerate(ratios):
        text = Text()
        if every:
            for value in ratio:
                text.append(f"{value:4.2f} ", style=_colour(value))
        else:
            text.append(f"{ratio.min():4.2f} ", style=_colour(ratio.min()))
            text.append(f"to {ratio.max():4.2f} over {n_experts} experts ", style=_colour(ratio.max()))
        busiest = f"| busiest {ratio.max():.2f}"
        if width is None or len(text) + len(busiest) <= width:
            text.append(busiest, style="dim")
        text.rstrip()
        yield f"layer {layer}", text


def _colour(ratio: float) -> str:
    if ratio >= 2 or ratio <= 0.25:
        return "bold red"
    return "yellow" if ratio >= 1.5 or ratio <= 0.5 else ""


def _progress(log: RunLog) -> str:
    row, left = log.rows[-1], seconds_left(log)
    share = f" of {log.stop_step:,} ({row['step'] / log.stop_step:.1%})" if log.stop_step else ""
    time_left = "" if left is None else f" | {format_duration(left)} left"
    return f"step {row['step']:,}{share} | {number(row['tokens'])} tokens{time_left}"


def _loss(log: RunLog, width: int) -> Iterator[tuple[str, str]]:
    _, losses = finite(log.tokens, log.column("ce"))
    if len(losses):
        yield "loss", f"{losses[-1]:.4f} | smoothed {smooth(losses)[-1]:.4f} | least logged {losses.min():.4f}"
        yield "", f"{sparkline(np.log(np.maximum(losses, 1e-9)), width)}"
    if log.evaluations:
        newest = log.evaluations[-1]
        bits = newest.get("bits_per_byte")
        text = f"{newest.get('loss') or math.nan:.4f} at step {newest['step']:,}"
        yield "validation", text + (f" | {bits:.4f} bits per byte" if bits else "")


def _speed(log: RunLog, width: int) -> Iterator[tuple[str, str]]:
    row, speed = log.rows[-1], log.column("tokens_per_s")
    mfu = "n/a" if row.get("mfu") is None else f"{row['mfu']:.1%}"
    wait = row.get("data_wait_s") or 0.0
    text = f"{number(speed[-1])} tok/s | MFU {mfu} | {row.get('memory_gib') or math.nan:.2f} GiB"
    yield "speed", f"{text} | data wait {1000 * wait:.1f} ms a step"
    yield "", sparkline(speed, width, floor=0.0)


def _update(row: dict[str, Any]) -> tuple[str, str]:
    norm = math.nan if row.get("grad_norm") is None else row["grad_norm"]
    return "update", f"lr {row.get('lr') or 0.0:.2e} | gradient norm {norm:.3f}"


def _routers(row: dict[str, Any]) -> tuple[str, str]:
    aux = math.nan if row.get("aux") is None else row["aux"]
    entropy = row.get("router_entropy") or [math.nan]
    return "routers", f"balancing loss {aux:.3f} | entropy {np.mean(entropy):.3f} nats{BAR}load over share, by expert:"


def _events(log: RunLog) -> list[str]:
    newest_save = next((event for event in reversed(log.events) if event["event"] == "save"), None)
    newest = [e for e in log.events if e["event"] not in ("eval", "save") or e is newest_save][-LAST_EVENTS:]
    return [f"{_clock(event.get('time'))} {event_text(event)}" for event in newest]


def _clock(seconds: float | None) -> str:
    return "--:--:--" if seconds is None else time.strftime("%H:%M:%S", time.localtime(seconds))
