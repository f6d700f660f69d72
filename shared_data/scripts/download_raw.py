"""Stage 1: sources as they come -> raw/SOURCE/data.jsonl. Run as `python -m shared_data.scripts.download_raw`."""

import sys
from pathlib import Path
from typing import Any

import typer

from shared_data import options
from shared_data.commits import fingerprint, known_state
from shared_data.config import PIPELINE_VERSION, Source
from shared_data.console import run_app
from shared_data.download import ReadDataset, ReadFiles
from shared_data.errors import UserError
from shared_data.executor import Task
from shared_data.hub import dataset_shards, local_files
from shared_data.layout import resolve_source_path
from shared_data.records import cut_into_spans, find_files
from shared_data.stage import (
    Context,
    fields_of,
    finish_source,
    part_path,
    run_parts,
    source_counts,
    stage_record,
    write_report,
)

STAGE = "download"
app = typer.Typer(add_completion=False)


def plan_tasks(context: Context, source: Source) -> list[Task]:
    """The tasks that read one source."""
    return _file_tasks(context, source) if source.files else _dataset_tasks(context, source)


def _file_tasks(context: Context, source: Source) -> list[Task]:
    assert source.files is not None
    paths = find_files([resolve_source_path(name, context.layout.root) for name in source.files], source.id)
    states = {path: known_state(path, context.layout.state / "inputs") for path in paths}
    total = sum(state.bytes for state in states.values())
    if total == 0:
        raise UserError(f"source {source.id}: all its files are empty, the first is {paths[0]}")
    files = [(path, _name(path, paths), states[path].bytes) for path in paths]
    groups = cut_into_spans(files, context.task_bytes(total))
    folder = stage_record(context.layout, STAGE, source.id).parent
    tasks = []
    for index, spans in enumerate(groups):
        output = part_path(context.layout, STAGE, source.id, index, len(groups))
        pieces = [[span.name, states[span.path].sha256, span.start, span.end] for span in spans]
        key = fingerprint(PIPELINE_VERSION, STAGE, pieces, vars(fields_of(source)), output.name)
        work = ReadFiles(tuple(spans), fields_of(source), output)
        n_bytes = sum(span.end - span.start for span in spans)
        tasks.append(Task(folder / f"task-{index:05d}.json", key, n_bytes, work))
    return tasks


def _name(path: Path, paths: list[Path]) -> str:
    """A file's name in its documents' ids: without the folders that all files of the source share."""
    shared = paths[0].parent
    while any(shared not in other.parents for other in paths):
        shared = shared.parent
    return path.relative_to(shared).as_posix()


def _dataset_tasks(context: Context, source: Source) -> list[Task]:
    shards = dataset_shards(source)
    states = [known_state(path, context.layout.state / "inputs") for path in local_files(source)]
    folder = stage_record(context.layout, STAGE, source.id).parent
    tasks = []
    for shard in shards:
        output = part_path(context.layout, STAGE, source.id, shard.index, shard.count)
        content = [[Path(state.path).name, state.sha256] for state in states]
        key = fingerprint(PIPELINE_VERSION, STAGE, vars(shard), content, vars(fields_of(source)), output.name)
        work = ReadDataset(shard, fields_of(source), output)
        tasks.append(Task(folder / f"task-{shard.index:05d}.json", key, 1, work))
    return tasks


def run(context: Context) -> dict[str, Any]:
    """Read every source; returns the stage's report."""
    counts = {}
    commits = run_parts(context, STAGE, {source.id: plan_tasks(context, source) for source in context.sources})
    for source in context.sources:
        own = counts[source.id] = source_counts(commits[source.id])
        if own["read"] and own["dropped.no_text"] == own["read"]:
            names = " and ".join(repr(name) for name in fields_of(source).names())
            raise UserError(
                f"source {source.id}: none of its {own['read']} records has text in {names}; set text_field"
            )
        finish_source(context.layout, STAGE, source.id, commits[source.id])
    return write_report(context, STAGE, counts)


@app.command()
def download_raw(
    mixture: options.MixtureOption = None,
    data_config: options.DataConfigOption = None,
    source: options.SourceOption = None,
    workers: options.WorkersOption = None,
    data_root: options.DataRootOption = Path("data"),
    as_json: options.JsonOption = False,
) -> None:
    """Read the sources of the mixture into raw/SOURCE/data.jsonl."""
    context = options.make_context(mixture, data_config, data_root, source, workers)
    options.run_stage(run, context, as_json)


if __name__ == "__main__":
    sys.exit(run_app(app, prog_name="python -m shared_data.scripts.download_raw"))
