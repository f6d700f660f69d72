"""What the four stages share: their context, the parts that one leaves for the next, and their report."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shared_data.commits import Commit, FileState, known_state, read_commit
from shared_data.config import Mixture, PipelineConfig, Source
from shared_data.errors import UserError
from shared_data.executor import Task, Workers, run_by_source
from shared_data.files import write_if_changed
from shared_data.layout import Layout
from shared_data.manifest import sidecar_path
from shared_data.records import Fields, Span, cut_into_spans

MIN_TASK_BYTES = 1 << 20
MAX_TASK_BYTES = 64 << 20
TASKS_PER_SOURCE = 64


@dataclass(frozen=True)
class Context:
    """What a stage works with."""

    layout: Layout
    mixture: Mixture
    config: PipelineConfig
    sources: tuple[Source, ...]
    """The sources to work on, in the mixture's order."""
    workers: Workers
    config_name: str
    """The file that the config came from, for errors."""
    mixture_file: str
    """The file that the mixture came from."""
    allow_changed: bool = False
    """Whether a corpus made otherwise may be replaced (see `changes`)."""

    @contextmanager
    def naming_the_mixture(self) -> Iterator[None]:
        """Errors about a source begin with the file that names it."""
        try:
            yield
        except UserError as error:
            if str(error).startswith("source "):
                raise UserError(f"{self.mixture_file}: {error}") from None
            raise

    def task_bytes(self, input_bytes: int) -> int:
        """Input bytes of a task of a source: a function of the input alone, so that any number of workers agrees."""
        fair = min(MAX_TASK_BYTES, max(MIN_TASK_BYTES, input_bytes // TASKS_PER_SOURCE))
        return self.config.pipeline.task_bytes or fair


@dataclass(frozen=True)
class Part:
    """A file that a stage left for the next one."""

    path: Path
    bytes: int
    sha256: str


def mixture_name(context: Context) -> str:
    """The mixture's name, with the sources where not all are wanted."""
    only = [source.id for source in context.sources]
    name = context.mixture.name
    return f"{name}[{','.join(only)}]" if len(only) < len(context.mixture.sources) else name


def shares_of(context: Context) -> list[float]:
    """Share of the training tokens of each source that is worked on."""
    total = sum(source.weight for source in context.sources)
    return [source.weight / total for source in context.sources]


def fields_of(source: Source) -> Fields:
    """Where a source's records keep their text, and what else is asked of them."""
    licences = None if source.licences is None else tuple(name.lower() for name in source.licences)
    return Fields(
        source.text_field, source.extra_text_field, source.separator, source.html, source.licence_field, licences
    )


# Stages: (folder below the root, stem and suffix of its files).
OUTPUTS = {
    "download": ("raw", "data", ".jsonl"),
    "clean": ("clean", "data", ".jsonl"),
    "tokenize": ("tokens", "tokens", ".bin"),
}


def part_path(layout: Layout, stage: str, source: str, index: int, count: int) -> Path:
    """A stage's output file: data.jsonl if one task makes it, data-00000.jsonl, ... if several do."""
    folder, stem, suffix = OUTPUTS[stage]
    return layout.stage(folder, source) / (f"{stem}{suffix}" if count == 1 else f"{stem}-{index:05d}{suffix}")


def stage_record(layout: Layout, stage: str, source: str) -> Path:
    """The record that lists the parts which a stage left for a source."""
    return layout.state / stage / source / "parts.json"


def run_parts(context: Context, stage: str, plans: Mapping[str, Sequence[Task]]) -> dict[str, list[Commit]]:
    """Do the tasks that write the parts of some sources. Until `finish_source` the stage is not done for them."""
    for source, tasks in plans.items():
        if any(read_commit(task.record, task.key) is None for task in tasks):
            stage_record(context.layout, stage, source).unlink(missing_ok=True)
    return run_by_source(plans, workers=context.workers, label=stage)


def finish_source(layout: Layout, stage: str, source: str, commits: Sequence[Commit]) -> None:
    """Record the parts of a source, and remove what an earlier run with other parts left.

    The tasks' records lie beside the stage's: paths in both are relative to the same folder.
    """
    record = stage_record(layout, stage, source)
    states = [commit.outputs[0] for commit in commits]
    folder, stem, suffix = OUTPUTS[stage]
    kept = {(record.parent / state.path).resolve() for state in states}
    kept |= {sidecar_path(path) for path in kept}
    for path in layout.stage(folder, source).glob(f"{stem}*"):
        if path.resolve() not in kept and path.suffix in (suffix, ".idx", ".tmp"):
            path.unlink()
    write_if_changed(record, json.dumps([state.model_dump() for state in states], indent=1))


def read_parts(layout: Layout, stage: str, source: str) -> list[Part]:
    """The parts that a stage left for a source, with the hashes of their bytes as they are now.

    A single file put there by another program, without a record, is taken as it is.

    Raises:
        UserError: the stage has not finished for this source.
    """
    record = stage_record(layout, stage, source)
    folder, stem, suffix = OUTPUTS[stage]
    single = layout.stage(folder, source) / f"{stem}{suffix}"
    cache = layout.state / "inputs"
    states: list[FileState | None]
    if record.is_file():
        states = [FileState.model_validate(item) for item in json.loads(record.read_bytes())]
        paths = [single.parent / Path(state.path).name for state in states if state]
    elif single.is_file():
        states, paths = [None], [single]
    else:
        raise UserError(
            f"source {source}: {single} is not there (or not finished): run the {stage} stage, without --skip-{stage}"
        )
    parts = []
    for known, path in zip(states, paths, strict=True):
        if not path.is_file():
            raise UserError(f"source {source}: {path} is not there: run the {stage} stage, without --skip-{stage}")
        state = known if known and known.unchanged(record.parent) else known_state(path, cache)
        parts.append(Part(path, state.bytes, state.sha256))
    return parts


def spans_of_parts(parts: Iterable[Part], task_bytes: int) -> list[tuple[Part, Span]]:
    """Cut the parts of a stage into spans, one per task of the next stage."""
    found: list[tuple[Part, Span]] = []
    for part in parts:
        for spans in cut_into_spans([(part.path, part.path.name, part.bytes)], task_bytes):
            found.extend((part, span) for span in spans)
    return found


def source_counts(commits: Iterable[Commit]) -> Counter[str]:
    """The counts of a source's tasks, added up."""
    total: Counter[str] = Counter()
    for commit in commits:
        total.update(commit.counts)
        total["work.input_bytes"] += commit.n_bytes
        total["work.processed_bytes"] += commit.processed_bytes
    return total


def write_report(
    context: Context,
    stage: str,
    counts: Mapping[str, Counter[str]],
    about: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Write a stage's JSON report, with what else there is to say about sources, and show it as a table.

    Documents read are those kept and those dropped, to the last one.
    """
    sources: dict[str, dict[str, Any]] = {}
    for source, own in counts.items():
        dropped = {name.removeprefix("dropped."): n for name, n in sorted(own.items()) if name.startswith("dropped.")}
        changed = {name.removeprefix("changed."): n for name, n in sorted(own.items()) if name.startswith("changed.")}
        others = {name: n for name, n in sorted(own.items()) if "." not in name and name not in ("read", "kept")}
        assert own["read"] == own["kept"] + sum(dropped.values()), (source, dict(own))
        work = {name: own[f"work.{name}"] for name in ("input_bytes", "processed_bytes")}
        documents = {"read": own["read"], "kept": own["kept"], "dropped": dropped, "changed": changed}
        sources[source] = {**documents, **others, "work": work}
        sources[source].update((about or {}).get(source, {}))
    report: dict[str, Any] = {"stage": stage, "sources": sources}
    write_if_changed(context.layout.reports / f"{stage}.json", json.dumps(report, indent=2) + "\n")
    table = Table(title=f"{stage}: documents", box=None, title_justify="left")
    for name in ("source", "read", "kept", "dropped", "changed"):
        table.add_column(name, justify="right" if name in ("read", "kept") else "left")
    for source, line in sources.items():
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in line["dropped"].items()) or "-"
        changes = ", ".join(f"{n:,} {name}" for name, n in line["changed"].items()) or "-"
        table.add_row(source, f"{line['read']:,}", f"{line['kept']:,}", reasons, changes)
    show_table(table)
    return report


def show_table(table: Table) -> None:
    """Print a table on standard error; in a pipe without folding it to some terminal's width."""
    console = Console(stderr=True)
    (console if console.is_terminal else Console(stderr=True, width=200)).print(table)
