"""metrics.jsonl, events.jsonl, the console line and trackers; tokens per second over the time since the last row.

A row is one JSON object on one line, appended and flushed. Rows after a checkpoint are cut when a run goes back to it,
so that metrics.jsonl has one row a logged step. events.jsonl is the run's history and only grows.
"""

import errno
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
from shared_data.console import count_with_unit, describe, say
from shared_data.files import write_atomic

METRICS_NAME = "metrics.jsonl"
EVENTS_NAME = "events.jsonl"

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
        writes: False on ranks that have nothing to write, because the first one does.
    """

    def __init__(self, folder: Path, suffix: str = "", trackers: Sequence[Tracker] = (), writes: bool = True) -> None:
        self._metrics = folder / METRICS_NAME
        self._events = folder / EVENTS_NAME
        self._unwritten: dict[Path, bytes] = {}
        self._suffix, self._writes = suffix, writes
        self._trackers = list(trackers)

    def log(self, row: dict[str, Any], total_steps: int, seconds_left: float | None) -> None:
        """Append a row to metrics.jsonl and print it for a person."""
        self._append(self._metrics, row)
        self._track(lambda tracker: tracker.log(row["step"], scalars("train", row)))
        say(console_line(row, total_steps, seconds_left) + self._suffix)

    def event(self, kind: str, step: int, **details: Any) -> None:
        """Append an event to events.jsonl."""
        self._append(self._events, {"event": kind, "step": step, "time": time.time(), **details})
        if kind == "eval":
            self._track(lambda tracker: tracker.log(step, scalars("eval", details)))

    def cut(self, after_step: int, keep: Callable[[int], bool] = lambda step: True) -> None:
        """Drop the metrics rows of later steps, a torn last line, and rows of steps that `keep` refuses."""
        if not self._writes:
            return
        rows = read_rows(self._metrics) if self._metrics.exists() else []
        rows += [json.loads(line) for line in self._unwritten.pop(self._metrics, b"").splitlines()]
        kept = [row for row in rows if row["step"] <= after_step and keep(row["step"])]
        if rows or self._metrics.exists():
            write_atomic(self._metrics, "".join(_line(row) for row in kept))
        dropped = [row["step"] for row in rows if row["step"] <= after_step and not keep(row["step"])]
        self._track(lambda tracker: tracker.cut(min([after_step + 1, *dropped])))

    def _append(self, path: Path, row: dict[str, Any]) -> None:
        """Append a row; one that the disk refuses is kept, and written with the next. Training goes on: the next save
        looks at the disk too."""
        if not self._writes:
            return
        lines = self._unwritten.pop(path, b"") + _line(row).encode()
        try:
            _append(path, lines)
        except OSError as error:
            self._unwritten[path] = lines
            say(f"WARNING: {path} NOT WRITTEN: {describe(error)}; trying again with the next line")

    def sync(self) -> None:
        """Make both files durable: before each save, so that the log never ends before its checkpoint."""
        if not self._writes:
            return
        for path in (self._metrics, self._events):
            if path in self._unwritten:
                _append(path, self._unwritten[path])
                del self._unwritten[path]
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
    """The rows of a .jsonl file of ours. A torn last line, left by a killed process, is passed over; so is a damaged
    one, which is named."""
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
            if not isinstance(row["step"], int):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            say(f"warning: {path}, line {number}, is damaged and passed over")
            continue
        rows.append(row)
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


def _append(path: Path, lines: bytes) -> None:
    """Append whole lines, all of them or nothing. A line that a dying process left half-written goes first."""
    with open(path, "ab+", buffering=0) as file:
        end = file.tell()
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            end = path.read_bytes().rfind(b"\n") + 1
            file.truncate(end)
        try:
            written = file.write(lines)
            if written != len(lines):
                raise OSError(errno.ENOSPC, f"only {written} of {len(lines)} bytes could be written", str(path))
        except OSError:
            file.truncate(end)
            raise


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
