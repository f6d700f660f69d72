"""metrics.jsonl, events.jsonl, the console line and trackers; tokens per second over the time since the last row.

A row is one JSON object on one line, appended and flushed. Rows after a checkpoint are cut when a run goes back to it,
so that metrics.jsonl has one row a logged step. events.jsonl is the run's history and only grows.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpt_oss_lite.training.flops import format_mfu
from gpt_oss_lite.training.trackers import Tracker, guarded, scalars
from shared_data.console import count_with_unit, say
from shared_data.files import write_atomic

Clock = Callable[[], float]

NOTHING_KEPT = -1
"""For `TrainingLogger.cut`: a run that starts over, whose evaluation at step 0 comes again too."""


class Throughput:
    """Tokens per second between two readings; paused time (saving, evaluation) does not count."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._started = clock()
        self._tokens = 0
        self._steps = 0
        self._waited = 0.0

    def count(self, tokens: int) -> None:
        """Count one finished step of so many tokens."""
        self._tokens += tokens
        self._steps += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The time inside is spent waiting for data."""
        started = self._clock()
        yield
        self._waited += self._clock() - started

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time inside does not count."""
        started = self._clock()
        try:
            yield
        finally:
            self._started += self._clock() - started

    def read(self) -> tuple[float, float, float]:
        """(tokens per second, steps per second, seconds of data wait per step) since the last reading; starts anew."""
        elapsed = max(self._clock() - self._started, 1e-9)
        result = self._tokens / elapsed, self._steps / elapsed, self._waited / max(self._steps, 1)
        self._started, self._tokens, self._steps, self._waited = self._clock(), 0, 0, 0.0
        return result


class TrainingLogger:
    """Writes a run's metrics.jsonl and events.jsonl, and hands rows and evaluations on to trackers.

    Args:
        folder: the run's folder.
        suffix: added to every console line, e.g. a warning that holds for the whole run.
        trackers: get what is logged too; one that fails is named once and left out from then on.
    """

    def __init__(self, folder: Path, suffix: str = "", trackers: Sequence[Tracker] = ()) -> None:
        self._metrics = folder / "metrics.jsonl"
        self._events = folder / "events.jsonl"
        self._suffix = suffix
        self._trackers = list(trackers)

    def log(self, row: dict[str, Any], total_steps: int, seconds_left: float | None) -> None:
        """Append a row to metrics.jsonl and print it for a person."""
        _append(self._metrics, row)
        self._track(lambda tracker: tracker.log(row["step"], scalars("train", row)))
        say(console_line(row, total_steps, seconds_left) + self._suffix)

    def event(self, kind: str, step: int, **details: Any) -> None:
        """Append an event to events.jsonl."""
        _append(self._events, {"event": kind, "step": step, "time": time.time(), **details})
        if kind == "eval":
            self._track(lambda tracker: tracker.log(step, scalars("eval", details)))

    def cut(self, after_step: int, keep: Callable[[int], bool] = lambda step: True) -> None:
        """Drop the metrics rows of later steps, a torn last line, and rows of steps that `keep` refuses."""
        rows = read_rows(self._metrics) if self._metrics.exists() else []
        kept = [row for row in rows if row["step"] <= after_step and keep(row["step"])]
        if self._metrics.exists():
            write_atomic(self._metrics, "".join(_line(row) for row in kept))
        dropped = [row["step"] for row in rows if row["step"] <= after_step and not keep(row["step"])]
        self._track(lambda tracker: tracker.cut(min([after_step + 1, *dropped])))

    def sync(self) -> None:
        """Make both files durable: before each save, so that the log never ends before its checkpoint."""
        for path in (self._metrics, self._events):
            if path.exists():
                with open(path, "ab") as file:
                    os.fsync(file.fileno())

    def finish(self) -> None:
        """Make both files durable and close the trackers; at the end of the run."""
        self.sync()
        self._track(lambda tracker: tracker.finish())

    def _track(self, call: Callable[[Tracker], None]) -> None:
        self._trackers = [tracker for tracker in self._trackers if guarded(tracker, call)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file of ours. A torn last line, left by a killed process, is passed over."""
    rows = []
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        rows.append(json.loads(line))
    return rows


def console_line(row: dict[str, Any], total_steps: int, seconds_left: float | None) -> str:
    """One step in a line: step, losses, rate, speed, utilisation, time left."""
    ce, norm = (math.nan if row[key] is None else row[key] for key in ("ce", "grad_norm"))
    left = "" if seconds_left is None else f" | {format_duration(seconds_left)} left"
    return (
        f"step {row['step']:>6}/{total_steps} | ce {ce:.4f} | aux {row['aux'] or math.nan:.4f} | norm {norm:.2f} | "
        f"lr {row['lr']:.2e} | {count_with_unit(row['tokens_per_s'])} tok/s | MFU {format_mfu(row['mfu'])}{left}"
    )


def format_duration(seconds: float) -> str:
    """`48 s`, `12 min`, `3 h 05 min`, `2 d 04 h`."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60:02d} h"


def _append(path: Path, row: dict[str, Any]) -> None:
    # A process that died while it appended may have left half a line: the new row must not continue it.
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(_line(row).encode())


def _line(row: dict[str, Any]) -> str:
    return json.dumps(_finite(row), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
