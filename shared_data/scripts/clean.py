"""Stage 2: raw text -> clean/SOURCE/data.jsonl, filtered and without duplicates over all sources.

Run as `python -m shared_data.scripts.clean`.
"""

import itertools
import math
import sys
from typing import Any

import numpy as np

from shared_data.cleaning import CleanRules, FilterSpan, WriteClean
from shared_data.commits import Commit, fingerprint, known_state
from shared_data.config import PIPELINE_VERSION, Source
from shared_data.config.quality import RuleSet
from shared_data.console import say
from shared_data.dedup import CompareBuckets, count_digests, duplicates_by_piece
from shared_data.executor import Task, run_by_source, run_tasks
from shared_data.layout import resolve_source_path
from shared_data.measures import prepare_measuring
from shared_data.near import Banding, CompareBand, linked_documents
from shared_data.options import stage_main
from shared_data.records import PLAIN, find_files
from shared_data.stage import (
    Context,
    fields_of,
    finish_source,
    part_path,
    read_parts,
    run_parts,
    source_counts,
    spans_of_parts,
    stage_record,
    write_report,
)
from shared_data.yaml_files import check_config

STAGE = "clean"
DOCUMENTS_PER_COMPARISON = 2_000_000


def rules_of(source: Source, context: Context) -> CleanRules:
    """The rules for a source: the file's own over the general ones.

    Raises:
        UserError: its limits are not those of its rules.
    """
    is_own_raw = stage_record(context.layout, "download", source.id).is_file()
    pipeline, near = context.config.pipeline, context.config.dedup.near
    quality, root = pipeline.quality, context.layout.root
    sets = {
        name: tuple(find_files([resolve_source_path(path, root) for path in paths], f"decontaminate.against.{name}"))
        for name, paths in pipeline.decontaminate.against.items()
    }
    return CleanRules(
        min_chars=source.min_chars or quality.min_chars,
        max_chars=source.max_chars or quality.max_chars,
        fields=PLAIN if is_own_raw else fields_of(source),
        n_hash_buckets=context.config.dedup.n_hash_buckets,
        rules=_rule_set(source, context),
        language=source.lang,
        min_language_score=quality.min_language_score,
        redact_emails=pipeline.redact.emails,
        redact_ips=pipeline.redact.ips,
        blocked_urls=resolve_source_path(quality.blocked_urls, root) if quality.blocked_urls else None,
        test_sets=tuple(sets.items()),
        test_ngram_words=pipeline.decontaminate.ngram_words,
        banding=Banding(near.ngram_words, near.bands, near.rows, near.seed) if near.enabled else None,
    )


def _rule_set(source: Source, context: Context) -> RuleSet | None:
    if source.rules is None:
        return None
    general: RuleSet = getattr(context.config.pipeline.rules, source.rules)
    merged = general.model_dump()
    for group, own in source.limits.items():
        known = merged.get(group)
        merged[group] = {**known, **own} if isinstance(known, dict) and isinstance(own, dict) else own
    return check_config(type(general), merged, f"source {source.id}: limits")


def filter_tasks(context: Context, source: Source) -> list[Task]:
    """The tasks that filter one source."""
    parts = read_parts(context.layout, "download", source.id)
    spans = spans_of_parts(parts, context.task_bytes(sum(part.bytes for part in parts)))
    rules = rules_of(source, context)
    cache = context.layout.state / "inputs"
    about = rules.about({path: known_state(path, cache).sha256 for path in rules.files()})
    folder = stage_record(context.layout, STAGE, source.id).parent
    tasks = []
    for index, (part, span) in enumerate(spans):
        key = fingerprint(PIPELINE_VERSION, "filter", part.sha256, span.name, span.start, span.end, about)
        work = FilterSpan(
            span=span,
            rules=rules,
            filtered=folder / f"filtered-{index:05d}-{key[:12]}.jsonl",
            digests=folder / f"digests-{index:05d}.idx",
        )
        tasks.append(Task(folder / f"filter-{index:05d}.json", key, span.end - span.start, work))
    return tasks


def compare(context: Context, tasks: list[Task], commits: list[Commit]) -> list[np.ndarray]:
    """Find the duplicates over all sources; returns the lines to drop from each filtered piece."""
    dedup = context.config.dedup
    if not dedup.enabled:
        return [np.zeros(0, np.int64) for _ in tasks]
    paths = tuple(task.work.digests for task in tasks if isinstance(task.work, FilterSpan))
    hashes = [commit.outputs[0].sha256 for commit in commits]
    n_documents = sum(count_digests(path) for path in paths)
    n_groups = min(dedup.n_hash_buckets, max(1, math.ceil(n_documents / DOCUMENTS_PER_COMPARISON)))
    folder = context.layout.state / STAGE
    bounds = [dedup.n_hash_buckets * group // n_groups for group in range(n_groups + 1)]
    comparisons = []
    for group, (first, end) in enumerate(itertools.pairwise(bounds)):
        output = folder / f"duplicates-{group:05d}.idx"
        work = CompareBuckets(paths, first, end, dedup.bloom_capacity_per_bucket, dedup.bloom_error_rate, output)
        key = fingerprint(PIPELINE_VERSION, "compare", hashes, dedup.method, dedup.n_hash_buckets, first, end)
        size = sum(path.stat().st_size for path in paths) // n_groups
        comparisons.append(Task(folder / f"compare-{group:05d}.json", key, size, work))
    run_tasks(comparisons, workers=context.workers, label="clean: find duplicates")
    return duplicates_by_piece([folder / f"duplicates-{group:05d}.idx" for group in range(n_groups)], len(tasks))


def compare_bands(context: Context, tasks: list[Task], commits: list[Commit]) -> list[np.ndarray]:
    """Find the near duplicates over all sources; returns the lines to drop from each filtered piece."""
    near = context.config.dedup.near
    paths = tuple(task.work.digests for task in tasks if isinstance(task.work, FilterSpan))
    if not near.enabled:
        return [np.zeros(0, np.int64) for _ in tasks]
    hashes = [commit.outputs[0].sha256 for commit in commits]
    folder = context.layout.state / STAGE
    size = sum(path.stat().st_size for path in paths) // near.bands
    comparisons = []
    for band in range(near.bands):
        key = fingerprint(PIPELINE_VERSION, "band", hashes, band)
        work = CompareBand(paths, band, folder / f"links-{band:03d}.idx")
        comparisons.append(Task(folder / f"band-{band:03d}.json", key, size, work))
    run_tasks(comparisons, workers=context.workers, label="clean: find near duplicates")
    sizes = [count_digests(path) for path in paths]
    linked = linked_documents([folder / f"links-{band:03d}.idx" for band in range(near.bands)], sum(sizes))
    return [np.flatnonzero(own) for own in np.split(linked, np.cumsum(sizes)[:-1])]


def write_tasks(
    context: Context, source: Source, filters: list[Task], duplicates: list[tuple[np.ndarray, np.ndarray]]
) -> list[Task]:
    """The tasks that write the clean parts of one source."""
    folder = stage_record(context.layout, STAGE, source.id).parent
    tasks = []
    for index, (task, (equal, near)) in enumerate(zip(filters, duplicates, strict=True)):
        assert isinstance(task.work, FilterSpan)
        output = part_path(context.layout, STAGE, source.id, index, len(filters))
        key = fingerprint(PIPELINE_VERSION, "write", task.key, equal.tolist(), near.tolist(), output.name)
        work = WriteClean(task.work, equal, near, output)
        tasks.append(Task(folder / f"write-{index:05d}.json", key, task.n_bytes, work))
    return tasks


def run(context: Context) -> dict[str, Any]:
    """Filter every source, find duplicates over all, write what is left; returns the stage's report."""
    filters = {source.id: filter_tasks(context, source) for source in context.sources}
    if any(source.rules for source in context.sources):
        say(f"{STAGE}: quality rules {prepare_measuring()}")
    filtered = run_by_source(filters, workers=context.workers, label="clean: filter")
    tasks = [task for own in filters.values() for task in own]
    commits = [commit for own in filtered.values() for commit in own]
    equal, near = compare(context, tasks, commits), compare_bands(context, tasks, commits)
    pieces = iter([(one, np.setdiff1d(other, one)) for one, other in zip(equal, near, strict=True)])
    writes = {
        source.id: write_tasks(context, source, filters[source.id], [next(pieces) for _ in filters[source.id]])
        for source in context.sources
    }
    counts = {}
    for source, written in run_parts(context, STAGE, writes).items():
        finish_source(context.layout, STAGE, source, written)
        for leftover in stage_record(context.layout, STAGE, source).parent.glob("filtered-*"):
            leftover.unlink()
        counts[source] = source_counts([*filtered[source], *written])
        counts[source]["kept"] -= counts[source]["dropped.duplicate"] + counts[source]["dropped.near_duplicate"]
    return write_report(context, STAGE, counts)


if __name__ == "__main__":
    sys.exit(stage_main(run, "clean"))
