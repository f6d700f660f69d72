"""A run's folder as it is read back: the rows of metrics.jsonl as arrays, events, recipe, samples.

Reading takes a folder as it lies there, also while the run writes to it: a line that is torn or not ours is counted and
passed over, and what an older version did not log is NaN.

Shapes: N rows, L layers, E experts.
"""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpt_oss_lite.training.run_lock import writer_lives
from shared_data.errors import UserError
from shared_data.yaml_files import read_yaml_mapping

Floats = npt.NDArray[np.float64]
Row = dict[str, Any]
Advance = Callable[[float], None]

START_EVENTS = ("start", "resume")
END_EVENTS = {"done": "done", "stop": "stopped", "give_up": "given up by the NaN guard"}
CUT_OFF = "no process writes here any more: killed, or failed"
SAMPLES_NAME = "samples.jsonl"
NAMED_RUNS = 4
"""Runs that an error's line names."""


class JsonLines:
    """A growing .jsonl file. `read` parses only what came since the last call; a replaced file is read anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._at = 0
        self.rows: list[Row] = []
        self.damaged = 0

    def read(self, advance: Advance = lambda n_bytes: None) -> list[Row]:
        """All rows up to now, in order. A last line without its end is still being written, and waits.

        Args:
            advance: called with the bytes of each line as it is read.
        """
        try:
            with open(self._path, "rb") as file:
                self._begin_again_if_replaced(file.fileno())
                file.seek(self._at)
                content = file.read()
        except FileNotFoundError:
            return self.rows
        whole = content.rfind(b"\n") + 1
        self._at += whole
        for line in content[:whole].splitlines(keepends=True):
            advance(len(line))
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                self.rows.append(row)
            else:
                self.damaged += 1
        return self.rows

    def _begin_again_if_replaced(self, descriptor: int) -> None:
        about = os.fstat(descriptor)
        identity = (about.st_dev, about.st_ino)
        if identity != self._identity or about.st_size < self._at:
            self._identity, self._at, self.rows, self.damaged = identity, 0, [], 0


@dataclass(frozen=True)
class RunLog:
    """What a run has recorded up to now."""

    name: str
    folder: Path
    rows: list[Row]
    events: list[Row]
    samples: list[Row]
    recipe: dict[str, Any]
    """config.yaml as nested blocks; empty when it is missing."""
    record: dict[str, Any]
    """run.json; empty when it is missing."""
    damaged: int = 0
    """Lines that were passed over."""
    writer_lives: bool | None = None
    """Whether a process holds the run; None where it cannot be known, as of another machine's."""

    def column(self, key: str) -> Floats:
        """(N,) figures of the rows; NaN where a row has none."""
        return np.array([_number(row.get(key)) for row in self.rows], dtype=np.float64)

    @cached_property
    def tokens(self) -> Floats:
        """(N,) tokens trained on."""
        return self.column("tokens")

    @cached_property
    def expert_load(self) -> Floats:
        """(N, L, E) share of a layer's token-slots by expert; a shape that differs from the last row's is NaN."""
        return self._stack("expert_load", 2)

    def by_layer(self, key: str) -> Floats:
        """(N, L) figures of the layers."""
        return self._stack(key, 1)

    def _stack(self, key: str, n_dims: int) -> Floats:
        values = [_array(row.get(key)) for row in self.rows]
        shape = next((value.shape for value in reversed(values) if value.ndim == n_dims), (0,) * n_dims)
        stacked = np.full((len(values), *shape), np.nan)
        for index, value in enumerate(values):
            if value.shape == shape:
                stacked[index] = value
        return stacked

    @cached_property
    def tokens_per_step(self) -> float:
        """Tokens of a step, from the last row; NaN without rows."""
        return float(self.rows[-1]["tokens"] / self.rows[-1]["step"]) if self.rows else float("nan")

    @cached_property
    def evaluations(self) -> list[Row]:
        """The evaluations on the run's path, one a step: those past the point that a run went back to are not."""
        path: dict[int, Row] = {}
        for event in self.events:
            if event["event"] == "eval":
                path[event["step"]] = event
            elif event["event"] in ("rollback", "resume"):
                path = {step: kept for step, kept in path.items() if step <= event["step"]}
        return [path[step] for step in sorted(path)]

    @property
    def stop_step(self) -> int | None:
        """The step that the newest process of the run was to stop at."""
        starts = [e["stop_step"] for e in self.events if e["event"] in START_EVENTS and "stop_step" in e]
        planned = self.recipe.get("training", {}).get("total_steps")
        return int(starts[-1]) if starts else planned

    @property
    def ending(self) -> Row | None:
        """The event that ended the newest process; None while it runs, or when it was killed."""
        ends = [event for event in self.events if event["event"] in (*END_EVENTS, *START_EVENTS)]
        return ends[-1] if ends and ends[-1]["event"] in END_EVENTS else None

    @property
    def is_cut_off(self) -> bool:
        """Whether the run is known to have ended without saying so."""
        return self.ending is None and self.writer_lives is False

    @property
    def last_sign(self) -> float | None:
        """Seconds since 1970 at which the run last wrote a row or an event; None where it has not."""
        times = [
            row["time"] for row in (*self.rows[-1:], *self.events[-1:]) if isinstance(row.get("time"), int | float)
        ]
        return max(times, default=None)

    @property
    def host(self) -> str | None:
        """The machine of the newest process, where the run has recorded it."""
        return (newest_process(self.events) or {}).get("host")

    @property
    def status(self) -> str:
        """In a few words: `done at step 600`, `stopped at step 50 (SIGTERM)`, `at step 50 of 600`, the same with `no
        process writes here` where that is known."""
        if self.ending is None:
            at = self.rows[-1]["step"] if self.rows else 0
            place = f"at step {at:,}" + (f" of {self.stop_step:,}" if self.stop_step else "")
            return f"{place}, {CUT_OFF}" if self.is_cut_off else place
        reason = f" ({self.ending['reason']})" if "reason" in self.ending else ""
        return f"{END_EVENTS[self.ending['event']]} at step {self.ending['step']:,}{reason}"


def read_run(folder: Path, advance: Advance = lambda n_bytes: None) -> RunLog:
    """Read a run's folder.

    Args:
        advance: called with bytes of metrics.jsonl as they are read.

    Raises:
        UserError: it is not there, or holds no run.
    """
    return RunReader(folder).read(advance)


class RunReader:
    """Reads a run's folder again and again, each time only what is new."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder: name a run's folder, e.g. runs/quickstart-001")
        files = {name: folder / f"{name}.jsonl" for name in ("metrics", "events")}
        if not any(path.is_file() for path in files.values()):
            raise UserError(f"{folder} holds no run: neither metrics.jsonl nor events.jsonl is there{_below(folder)}")
        self._folder = folder
        self._metrics, self._events = JsonLines(files["metrics"]), JsonLines(files["events"])
        self._samples = JsonLines(folder / SAMPLES_NAME)

    def read(self, advance: Advance = lambda n_bytes: None) -> RunLog:
        """The run as it stands; see `read_run`."""
        # Looked at first: a process that ends meanwhile has written its last event by then.
        alive = writer_lives(self._folder, newest_process(self._events.read()))
        rows = [row for row in self._metrics.read(advance) if isinstance(row.get("tokens"), int)]
        events = [_without_nulls(event) for event in self._events.read() if isinstance(event.get("event"), str)]
        config, record = self._folder / "config.yaml", self._folder / "run.json"
        return RunLog(
            name=self._folder.resolve().name,
            folder=self._folder,
            rows=rows,
            events=events,
            samples=list(self._samples.read()),
            recipe=read_yaml_mapping(config) if config.is_file() else {},
            record=_without_nulls(_read_json(record)),
            damaged=self._metrics.damaged + self._events.damaged + self._samples.damaged,
            writer_lives=alive,
        )


def newest_process(events: Iterable[Row]) -> dict[str, Any] | None:
    """What the newest start among some events recorded of its process; None where it did not."""
    starts = [event for event in events if event.get("event") in START_EVENTS]
    process = starts[-1].get("process") if starts else None
    return process if isinstance(process, dict) else None


def _below(folder: Path) -> str:
    """The runs in a folder of runs, the newest first, as the end of an error's line."""
    inside = {path.parent for name in ("metrics", "events") for path in folder.glob(f"*/{name}.jsonl")}
    newest = sorted(inside, key=lambda run: (-run.stat().st_mtime, run.name))
    if not newest:
        return ""
    more = f" and {len(newest) - NAMED_RUNS} more" if len(newest) > NAMED_RUNS else ""
    return f"; the runs below are {', '.join(map(str, newest[:NAMED_RUNS]))}{more}"


def unique_names(runs: Iterable[RunLog]) -> list[str]:
    """A name for each run: its folder's, with as much of the path before it as tells it from the others."""
    paths = [run.folder.resolve() for run in runs]
    names = []
    for path in paths:
        parts = 1
        while parts < len(path.parts) and sum(other.parts[-parts:] == path.parts[-parts:] for other in paths) > 1:
            parts += 1
        names.append("/".join(path.parts[-parts:]))
    return names


def flatten(block: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested blocks with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in block.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _without_nulls(block: dict[str, Any]) -> dict[str, Any]:
    """What is null was not known: as good as missing."""
    return {key: value for key, value in block.items() if value is not None}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _array(value: Any) -> Floats:
    try:
        return np.array(value, dtype=np.float64)
    except (ValueError, TypeError):  # ragged, or not numbers
        return np.array(np.nan)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")
