"""Stage 4: token streams -> shards/, shards/long/, shards/validation/ and pretrain_chinchilla/, mixed by tokens.

Run as `python -m shared_data.scripts.pack_shards`.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from shared_data.changes import keep_origin, refuse_another_corpus
from shared_data.commits import Commit, fingerprint
from shared_data.config import PIPELINE_VERSION
from shared_data.console import count_of, say
from shared_data.executor import Task, run_by_source
from shared_data.files import write_atomic, write_if_changed
from shared_data.manifest import MANIFEST_NAME, SIDECAR_VERSION, TOKEN_BYTES, CorpusInfo, Manifest, Position, SourceInfo
from shared_data.manifest_builder import build_manifest
from shared_data.mixture import is_validation
from shared_data.options import stage_main
from shared_data.packing import Documents, PackShard, Plan, ShardSlice, cut_into_shards, plan_splits, read_documents
from shared_data.publish import publish, remove_corpus, remove_strays
from shared_data.repair import PLAN_RECORD, packed_split
from shared_data.scripts.tokenize import check_tokenizer
from shared_data.shard_writer import shard_name
from shared_data.stage import Context, Part, mixture_name, read_parts, shares_of, show_table

STAGE = "pack"
SPLITS = ("long", "train", "validation")


@dataclass(frozen=True)
class Packing:
    """What is to be packed, planned."""

    info: CorpusInfo
    streams: tuple[Path, ...]
    bounds: dict[str, list[ShardSlice]]
    """The shards of each split."""
    report: dict[str, Any]


def corpus_info(context: Context, parts: dict[str, list[Part]]) -> CorpusInfo:
    """What holds for the whole corpus; its fingerprint covers everything that the shards depend on."""
    config, mixture = context.config, context.mixture
    everything = [
        [PIPELINE_VERSION, SIDECAR_VERSION],
        [[source.id, source.weight, [part.sha256 for part in parts[source.id]]] for source in context.sources],
        [mixture.name, mixture.on_shortage, mixture.max_epochs],
        [config.total_tokens, config.shard_size_tokens, config.validation_share, config.seed],
        config.pack.long_context.model_dump(),
        config.tokenizer.model_dump(exclude={"batch_size", "prefetch"}),
    ]
    return CorpusInfo(
        corpus=fingerprint(everything),
        mixture=mixture_name(context),
        tokenizer_name=config.tokenizer.name,
        vocab_size=config.tokenizer.vocab_size,
        eos_token_id=config.tokenizer.eos_token_id,
        pad_token_id=config.tokenizer.pad_token_id,
        shard_size_tokens=config.shard_size_tokens,
        window_tokens=config.pack.long_context.window_tokens,
        sources=[
            SourceInfo(id=source.id, weight=share)
            for source, share in zip(context.sources, shares_of(context), strict=True)
        ],
    )


def plan_packing(context: Context, parts: dict[str, list[Part]], info: CorpusInfo) -> Packing:
    """Plan the corpus, or read the plan of an earlier run with the same input."""
    streams = tuple(part.path for source in context.sources for part in parts[source.id])
    folder = context.layout.state / STAGE
    record = context.layout.state / PLAN_RECORD
    try:
        known = json.loads(record.read_bytes())
        if known["corpus"] == info.corpus and all(
            (folder / f"plan-{split}.idx").is_file() for split in known["bounds"]
        ):
            bounds = {split: [ShardSlice(*own) for own in slices] for split, slices in known["bounds"].items()}
            return Packing(info, streams, bounds, known["report"])
    except (OSError, ValueError, KeyError):
        pass
    record.unlink(missing_ok=True)
    documents = [read_documents(own, [part.path for part in parts[own.id]]) for own in context.sources]
    plans = plan_splits(documents, context.mixture, context.config, context.config.total_tokens)
    bounds = {}
    for split, plan in plans.items():
        plan.write(folder / f"plan-{split}.idx")
        bounds[split] = cut_into_shards(plan, split, info)
    report = describe_plan(info, documents, plans, bounds["train"], context.config.validation_share)
    relative = [os.path.relpath(path, context.layout.root) for path in streams]
    known = {"corpus": info.corpus, "bounds": bounds, "report": report}
    origin = {"info": info.model_dump(), "streams": relative, "tokenizer": context.config.tokenizer.model_dump()}
    write_atomic(record, json.dumps({**known, **origin}))
    return Packing(info, streams, bounds, report)


def describe_plan(
    info: CorpusInfo,
    documents: Sequence[Documents],
    plans: dict[str, Plan],
    bounds: list[ShardSlice],
    validation_share: float,
) -> dict[str, Any]:
    """What the plan takes from each source, and how far the mixture is from its target at the shards' ends."""
    train, long = plans["train"], plans.get("long")
    tokens = {split: _tokens_by_source(plan, len(documents)) for split, plan in plans.items()}
    in_long = tokens.get("long", np.zeros_like(tokens["train"]))
    together = tokens["train"] + in_long
    total = int(together.sum())
    ends = np.array([part.end for part in bounds]) - 1
    before = int(in_long.sum())
    at_ends = np.cumsum(train.n_tokens)[ends] + before
    worst = 0.0
    sources = {}
    for index, (own, about) in enumerate(zip(documents, info.sources, strict=True)):
        mine = np.where(train.source_index == index, train.n_tokens, 0)
        worst = max(worst, float(np.abs(in_long[index] + np.cumsum(mine)[ends] - about.weight * at_ends).max()))
        used = {split: int(((plan.source_index == index) & ~plan.is_insert).sum()) for split, plan in plans.items()}
        held_out, trained = used.get("validation", 0), used["train"] + used.get("long", 0)
        distinct = min(trained, len(own.n_tokens) - held_out)
        sources[about.id] = {
            "read": len(own.n_tokens),
            "kept": distinct + held_out,
            "dropped": {"not_needed": len(own.n_tokens) - distinct - held_out},
            "train_documents": trained,
            "repeated_documents": trained - distinct,
            "used_up": trained + int(is_validation(own.hashes, validation_share).sum()) >= len(own.n_tokens),
            "validation_documents": held_out,
            "train_tokens": int(together[index]),
            "long_context_tokens": int(in_long[index]),
            "share": int(together[index]) / total,
            "target_share": about.weight,
        }
    # A long-context window is charged as a whole, like a document.
    longest = max(before and info.window_tokens, *(int(own.n_tokens.max()) for own in documents))
    long_context = {
        "windows": before // info.window_tokens,
        "tokens": before,
        "inserts": int(long.is_insert.sum()) if long else 0,
        "insert_tokens": int(long.n_tokens[long.is_insert].sum()) if long else 0,
    }
    return {"stage": STAGE, "train_tokens": total, "long_context": long_context, "sources": sources,
            "longest_document_tokens": longest, "largest_deviation_tokens": worst}  # fmt: skip


def _tokens_by_source(plan: Plan, n_sources: int) -> np.ndarray:
    """Tokens that each source is charged with, int64."""
    sums = np.zeros(n_sources, np.int64)
    np.add.at(sums, plan.source_index, plan.n_tokens)
    return sums


def pack_tasks(context: Context, packing: Packing) -> dict[str, list[Task]]:
    """One task per shard, by split."""
    tasks: dict[str, list[Task]] = {}
    for split, bounds in packing.bounds.items():
        plan = context.layout.state / STAGE / f"plan-{split}.idx"
        folder = packed_split(context.layout, split)
        tasks[split] = []
        for index, (begin, end, n_tokens) in enumerate(bounds):
            key = fingerprint(packing.info.corpus, split, index, begin, end)
            position = Position.model_validate({"split": split, "index": index, "count": len(bounds)})
            output = folder / shard_name(index)
            work = PackShard(
                plan, begin, end, packing.streams, context.config.tokenizer, packing.info, position, key, output
            )
            record = context.layout.state / STAGE / f"{split}-{index:05d}.json"
            tasks[split].append(Task(record, key, n_tokens * TOKEN_BYTES, work))
    return tasks


def write_shards(context: Context, packing: Packing) -> tuple[dict[str, Manifest], list[Commit]]:
    """Write the shards of all splits, then a manifest for each; returns these and the tasks' commits."""
    tasks = pack_tasks(context, packing)
    for split in tasks:
        folder = packed_split(context.layout, split)
        if not _is_of(folder, packing.info):
            # Shards of another packing are about to be replaced: no manifest may vouch for a mixture of the two.
            (folder / MANIFEST_NAME).unlink(missing_ok=True)
    commits = run_by_source(tasks, workers=context.workers, label=STAGE)
    manifests = {}
    for split in tasks:
        folder = packed_split(context.layout, split)
        remove_strays(folder, [shard_name(index) for index in range(len(tasks[split]))])
        manifests[split] = build_manifest(folder)
        write_if_changed(folder / MANIFEST_NAME, manifests[split].to_json())
    return manifests, [commit for own in commits.values() for commit in own]


def _is_of(folder: Path, info: CorpusInfo) -> bool:
    try:
        return bool(json.loads((folder / MANIFEST_NAME).read_bytes())["corpus"] == info.corpus)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def run(context: Context) -> dict[str, Any]:
    """Plan, pack and publish; returns the stage's report."""
    check_tokenizer(context.config, context.config_name)
    layout = context.layout
    parts = {source.id: read_parts(layout, "tokenize", source.id) for source in context.sources}
    info = corpus_info(context, parts)
    texts = {source: fingerprint([part.sha256 for part in own]) for source, own in parts.items()}
    refuse_another_corpus(context, info.corpus, texts)
    packing = plan_packing(context, parts, info)
    manifests, commits = write_shards(context, packing)
    for split in SPLITS:
        if split not in manifests:
            remove_corpus(packed_split(context.layout, split))
    if "validation" in manifests:
        publish([layout.shards / "validation"], layout.corpus / "validation")
    else:
        remove_corpus(layout.corpus / "validation")
        say("no document was held out for validation: the corpus is small, or validation_share is 0")
    # Windows align with the start of the corpus alone, so the long-context ones come first.
    publish([packed_split(context.layout, split) for split in ("long", "train") if split in manifests], layout.corpus)
    keep_origin(context, info.corpus, texts)
    report = {
        **packing.report,
        "corpus": str(layout.corpus),
        "shards": sum(manifests[split].shard_count for split in ("long", "train") if split in manifests),
        "oversized_documents": manifests["train"].oversized_documents,
        "work": {
            "input_bytes": sum(commit.n_bytes for commit in commits),
            "processed_bytes": sum(commit.processed_bytes for commit in commits),
        },
        "validation_tokens": manifests["validation"].total_tokens if "validation" in manifests else 0,
    }
    write_if_changed(layout.reports / f"{STAGE}.json", json.dumps(report, indent=2) + "\n")
    show(report)
    if context.mixture.on_shortage == "stop" and report["train_tokens"] < context.config.total_tokens:
        say(describe_shortage(report, context.config.total_tokens))
    return report


def describe_shortage(report: dict[str, Any], wanted: int) -> str:
    """How far `on_shortage: stop` came, and which sources it stopped for."""
    ended = [source for source, own in report["sources"].items() if own.get("used_up")]
    reached = f"{report['train_tokens']:,} of {wanted:,} training tokens wanted ({report['train_tokens'] / wanted:.0%})"
    return f"stopped short (on_shortage: stop): {reached}; no more text in: {', '.join(ended)}"


def show(report: dict[str, Any]) -> None:
    """The mixture as packed, as a table on standard error."""
    table = Table(title="pack: training tokens", box=None, title_justify="left")
    for name in (
        "source",
        "tokens",
        "share",
        "target",
        "long context",
        "documents",
        "repeated",
        "validation",
        "not needed",
    ):
        table.add_column(name, justify="left" if name == "source" else "right")
    for source, own in report["sources"].items():
        numbers = ("train_documents", "repeated_documents", "validation_documents")
        shares = (f"{own['share']:.2%}", f"{own['target_share']:.2%}", f"{own['long_context_tokens']:,}")
        counts = (f"{own[name]:,}" for name in numbers)
        table.add_row(source, f"{own['train_tokens']:,}", *shares, *counts, f"{own['dropped']['not_needed']:,}")
    show_table(table)
    long_context = report["long_context"]
    say(
        f"long context: {count_of(long_context['windows'], 'window')}, {long_context['tokens']:,} tokens, of which "
        f"{long_context['insert_tokens']:,} are passkeys ({long_context['inserts']:,} inserts)"
    )
    say(
        f"{report['corpus']}: {report['train_tokens']:,} training tokens in {count_of(report['shards'], 'shard')}, "
        f"{report['validation_tokens']:,} for validation; the mixture is within "
        f"{report['largest_deviation_tokens']:,.0f} tokens of its target at every shard (longest document "
        f"{report['longest_document_tokens']:,})"
    )


if __name__ == "__main__":
    sys.exit(stage_main(run, "pack_shards"))
