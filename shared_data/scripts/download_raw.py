"""Stage 1: sources as they come -> raw/SOURCE/data.jsonl. Run as `python -m shared_data.scripts.download_raw`."""

import math
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared_data.commits import Commit, FileState, fingerprint, known_state
from shared_data.config import PIPELINE_VERSION, Source
from shared_data.console import count_of
from shared_data.download import (
    BYTES_PER_TOKEN,
    ReadFiles,
    ReadRemote,
    choose_files,
    describe,
    expected_text_bytes,
)
from shared_data.errors import UserError
from shared_data.executor import Task
from shared_data.hub import data_files
from shared_data.layout import resolve_source_path
from shared_data.options import stage_main
from shared_data.records import Span, cut_into_spans, find_files, first_keys
from shared_data.remote import RemoteFile, find_remote_files, is_url
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


@dataclass
class Plan:
    """What is read of one source: files of this machine whole, files from afar as far as they are needed."""

    source: Source
    local: list[Path]
    remote: list[RemoteFile]
    commit: str | None
    wanted_bytes: int | None
    """Text wanted of the files from afar; None: all."""
    limits: list[int | None] = field(default_factory=list)
    """Bytes at which to stop, for each file from afar chosen so far."""
    finished: bool = False

    def choose_more(self, done: list[int]) -> None:
        """Choose the files of the next round, given the bytes of those read so far."""
        count, limit = choose_files(self.remote, done, self.wanted_bytes)
        self.finished = count == len(self.limits)
        self.limits += [limit] * (count - len(self.limits))


def make_plan(context: Context, source: Source) -> Plan:
    """Find the files of a source.

    Raises:
        UserError: there are none, they cannot be reached, or they are all empty.
    """
    if source.dataset is not None:
        found = data_files(source, stage_record(context.layout, STAGE, source.id).with_name("revision.json"))
        local, remote, commit = found.local, found.remote, found.commit
    else:
        assert source.files is not None
        paths = [resolve_source_path(name, context.layout.root) for name in source.files if not is_url(name)]
        local = find_files(paths, source.id)
        remote = [file for name in source.files if is_url(name) for file in find_remote_files(name, source.id)]
        commit = None
    if not remote and not any(path.stat().st_size for path in local):
        raise UserError(f"source {source.id}: all its files are empty, the first is {local[0]}")
    return Plan(source, local, remote, commit, wanted_bytes(context, source))


def wanted_bytes(context: Context, source: Source) -> int | None:
    """How many bytes of text the mixture needs of a source that need not be read whole; None: all."""
    if source.max_bytes is not None:
        return source.max_bytes
    margin = context.config.pipeline.download_margin
    if margin is None:
        return None
    share = source.weight / sum(other.weight for other in context.sources)
    return math.ceil(context.config.total_tokens * share * BYTES_PER_TOKEN * margin)


def plan_tasks(context: Context, plan: Plan) -> list[Task]:
    """The tasks that read one source, those of this machine's files first."""
    groups, states = _local_groups(context, plan)
    count = len(groups) + len(plan.remote)
    fields, source = fields_of(plan.source), plan.source.id
    folder = stage_record(context.layout, STAGE, source).parent
    tasks = []
    for index, spans in enumerate(groups):
        output = part_path(context.layout, STAGE, source, index, count)
        pieces = [[span.name, states[span.path].sha256, span.start, span.end] for span in spans]
        key = fingerprint(PIPELINE_VERSION, STAGE, pieces, vars(fields), output.name)
        n_bytes = sum(span.end - span.start for span in spans)
        tasks.append(Task(folder / f"task-{index:05d}.json", key, n_bytes, ReadFiles(tuple(spans), fields, output)))
    for index, (file, limit) in enumerate(zip(plan.remote, plan.limits, strict=False), start=len(groups)):
        output = part_path(context.layout, STAGE, source, index, count)
        about = fingerprint(PIPELINE_VERSION, STAGE, describe(file, fields), output.name)
        expected = expected_text_bytes(file)
        n_bytes = max(1, expected if limit is None else min(limit, expected))
        work = ReadRemote(file, fields, about, limit, n_bytes, folder / f"progress-{index:05d}.json", output)
        tasks.append(Task(folder / f"task-{index:05d}.json", fingerprint(about, limit), n_bytes, work))
    return tasks


def _local_groups(context: Context, plan: Plan) -> tuple[list[list[Span]], dict[Path, FileState]]:
    """The files of this machine, cut into tasks, and their hashes."""
    states = {path: known_state(path, context.layout.state / "inputs") for path in plan.local}
    files = [(path, _name(path, plan.local), states[path].bytes) for path in plan.local]
    total = sum(state.bytes for state in states.values())
    return (cut_into_spans(files, context.task_bytes(total)) if total else []), states


def _name(path: Path, paths: list[Path]) -> str:
    """A file's name in its documents' ids: without the folders that all files of the source share."""
    shared = paths[0].parent
    while any(shared not in other.parents for other in paths):
        shared = shared.parent
    return path.relative_to(shared).as_posix()


def run(context: Context) -> dict[str, Any]:
    """Read every source; returns the stage's report."""
    plans = [make_plan(context, source) for source in context.sources]
    commits: dict[str, list[Commit]] = {plan.source.id: [] for plan in plans}
    while unfinished := [plan for plan in plans if not plan.finished]:
        for plan in unfinished:
            own = commits[plan.source.id]
            plan.choose_more([commit.counts["bytes"] for commit in own[len(own) - len(plan.limits) :]])
        commits = run_parts(context, STAGE, {plan.source.id: plan_tasks(context, plan) for plan in plans})
    counts, about = {}, {}
    for plan in plans:
        name = plan.source.id
        counts[name] = source_counts(commits[name])
        refuse_without_text(plan.source, plan.local, counts[name])
        finish_source(context.layout, STAGE, name, commits[name])
        if plan.remote:
            about[name] = {"revision": plan.commit, "files": len(plan.remote), "files_read": len(plan.limits)}
    return write_report(context, STAGE, counts, about)


def refuse_without_text(source: Source, local: list[Path], counts: Counter[str]) -> None:
    """Refuse a source whose records all keep their text elsewhere.

    Args:
        source: the source.
        local: its files on this machine.
        counts: of what was read of it.

    Raises:
        UserError: names the field, and those that the first record has.
    """
    if counts["read"] and counts["dropped.no_text"] == counts["read"]:
        names = " and ".join(repr(name) for name in fields_of(source).names())
        keys = ", ".join(first_keys(local[0])) if local else ""
        which = f" (the first record has: {keys})" if keys else ""
        records = count_of(counts["read"], "record")
        raise UserError(f"source {source.id}: none of its {records} has text in {names}; set text_field{which}")


if __name__ == "__main__":
    sys.exit(stage_main(run, "download_raw"))
