"""What a run would read, write and take, before any work: `prepare --dry-run`.

The beginnings of a source's files go through reading, cleaning and tokenizing, in memory but for a temporary file:
bytes per token, share kept and speed are then this text's and this machine's. Of a data set on the hub nothing is
read: constants stand in.
"""

import math
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from shared_data.cleaning import filter_span
from shared_data.config import Source
from shared_data.console import say
from shared_data.download import BYTES_PER_TOKEN, write_raw
from shared_data.filters import normalise
from shared_data.layout import resolve_source_path
from shared_data.manifest import TOKEN_BYTES
from shared_data.records import COMPRESSED_SUFFIXES, PLAIN, Document, Span, find_files, read_documents
from shared_data.remote import is_url
from shared_data.scripts.clean import rules_of
from shared_data.scripts.download_raw import fields_of, refuse_without_text
from shared_data.stage import Context, show_table
from shared_data.tokenizing import tokenizer_of

# Of compressed text and parquet.
COMPRESSION_RATIO = 3.0
# All four stages, per core; docs/data.md says where it was measured.
BYTES_PER_SECOND_PER_WORKER = 7e6
SAMPLED_FILES = 4
SAMPLED_BYTES_PER_FILE = 200_000


@dataclass(frozen=True)
class Sample:
    """What the beginnings of a source's files gave."""

    text_per_file_byte: float
    """Bytes of text in a byte of a file: JSON and other fields take space, compression saves it."""
    share_kept: float
    """Of the documents, by the rules; duplicates are not known before the run."""
    bytes_per_token: float
    bytes_per_second: float
    """Of text, through reading, cleaning and tokenizing on one core."""


ASSUMED = Sample(1.0, 1.0, BYTES_PER_TOKEN, BYTES_PER_SECOND_PER_WORKER)


def sample_source(source: Source, paths: list[Path], context: Context) -> Sample:
    """Prepare the beginnings of some of a source's files; ASSUMED where they hold no text.

    Raises:
        UserError: none of the records there has the source's text_field.
    """
    chosen = paths[:: max(1, len(paths) // SAMPLED_FILES)][:SAMPLED_FILES]
    tokenizer = tokenizer_of(context.config.tokenizer)
    started = time.perf_counter()
    beginnings = [_beginning(path, source) for path in chosen]
    documents = [document for beginning in beginnings for document in beginning.documents]
    texts = [normalise(document.text).text for document in documents if document.text]
    text_bytes = sum(len(text.encode()) for text in texts)
    if not text_bytes:
        without = sum(document.reason == "no_text" for document in documents)
        refuse_without_text(source, chosen, Counter({"read": len(documents), "dropped.no_text": without}))
        return ASSUMED
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder, "data.jsonl")
        write_raw(documents, raw)
        rules = replace(rules_of(source, context), fields=PLAIN)
        for _ in filter_span(Span(raw, raw.name, 0, raw.stat().st_size), rules, counts):
            pass
    tokens = sum(len(tokenizer.encode(text)) + 1 for text in texts)
    seconds = time.perf_counter() - started
    file_bytes = [beginning.file_bytes for beginning in beginnings]
    return Sample(
        text_per_file_byte=COMPRESSION_RATIO if None in file_bytes else text_bytes / sum(filter(None, file_bytes)),
        share_kept=counts["kept"] / max(1, counts["read"]),
        bytes_per_token=text_bytes / tokens,
        bytes_per_second=text_bytes / seconds,
    )


def _is_packed(path: Path) -> bool:
    return path.suffix in (*COMPRESSED_SUFFIXES, ".parquet")


@dataclass(frozen=True)
class Beginning:
    """What stands at the beginning of a file."""

    documents: list[Document]
    file_bytes: int | None
    """Bytes of the file that hold them; None where compression hides it."""


def _beginning(path: Path, source: Source) -> Beginning:
    size = path.stat().st_size
    end = size if _is_packed(path) else min(size, SAMPLED_BYTES_PER_FILE)
    documents, left = [], SAMPLED_BYTES_PER_FILE
    for document in read_documents([Span(path, path.name, 0, end)], fields_of(source)):
        documents.append(document)
        left -= len(document.text or "")
        if left <= 0 and _is_packed(path):
            return Beginning(documents, None)
    return Beginning(documents, end)


def estimate(context: Context) -> dict[str, Any]:
    """Expected tokens, shards, disk and time per source; of a data set on the hub, what the mixture needs of it."""
    total_weight = sum(source.weight for source in context.sources)
    sources = {}
    for source in context.sources:
        wanted = math.ceil(context.config.total_tokens * source.weight / total_weight)
        paths = _paths(source, context.layout.root)
        if paths is None:
            sample, text_bytes = ASSUMED, int(wanted * BYTES_PER_TOKEN)
        else:
            sample = sample_source(source, paths, context)
            text_bytes = int(sum(path.stat().st_size for path in paths) * sample.text_per_file_byte)
        clean_bytes = int(text_bytes * sample.share_kept)
        tokens = int(clean_bytes / sample.bytes_per_token)
        used = min(wanted, tokens)
        sources[source.id] = {
            "tokens_wanted": wanted,
            "tokens_expected": None if paths is None else tokens,
            "share_kept": None if paths is None else sample.share_kept,
            "bytes_per_token": sample.bytes_per_token,
            "shards": math.ceil(used / context.config.shard_size_tokens),
            # Raw, filtered and clean text (the last two share their bytes unless duplicates go), tokens, shards.
            "disk_bytes": text_bytes + 2 * clean_bytes + TOKEN_BYTES * (tokens + used),
            "seconds": text_bytes / sample.bytes_per_second / context.workers.count,
        }
    free = shutil.disk_usage(_existing(context.layout.root)).free
    return {"sources": sources, "disk_bytes_free": free, "workers": context.workers.count}


def _paths(source: Source, root: Path) -> list[Path] | None:
    """The files of a source; None for a data set and for addresses."""
    if source.files is None or any(map(is_url, source.files)):
        return None
    return find_files([resolve_source_path(name, root) for name in source.files], source.id)


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def show(expected: dict[str, Any]) -> None:
    """The estimate as a table on standard error."""
    table = Table(title="expected", box=None, title_justify="left")
    for name in ("source", "tokens wanted", "tokens there", "kept", "bytes/token", "shards", "disk GB", "minutes"):
        table.add_column(name, justify="left" if name == "source" else "right")
    for source, own in expected["sources"].items():
        there = "?" if own["tokens_expected"] is None else f"{own['tokens_expected']:,}"
        kept = "?" if own["share_kept"] is None else f"{own['share_kept']:.1%}"
        sizes = (f"{own['bytes_per_token']:.2f}", str(own["shards"]), f"{own['disk_bytes'] / 1e9:,.2f}")
        table.add_row(source, f"{own['tokens_wanted']:,}", there, kept, *sizes, f"{own['seconds'] / 60:,.1f}")
    show_table(table)
    short = [
        f"{source} (about {own['tokens_wanted'] - own['tokens_expected']:,} tokens)"
        for source, own in expected["sources"].items()
        if own["tokens_expected"] is not None and own["tokens_expected"] < own["tokens_wanted"]
    ]
    if short:
        say(f"too little text, even without duplicates removed: {', '.join(short)}")
    sums = [sum(own[key] for own in expected["sources"].values()) for key in ("disk_bytes", "seconds")]
    say(
        f"in all {sums[0] / 1e9:,.2f} GB of disk ({expected['disk_bytes_free'] / 1e9:,.1f} GB are free) and about "
        f"{sums[1] / 60:,.0f} minutes with {expected['workers']} workers, download not counted"
    )
    if sums[0] > expected["disk_bytes_free"]:
        say("that is more disk than is free")
