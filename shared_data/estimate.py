"""What a run would read, write and take, before any work: `prepare --dry-run`."""

import math
import shutil
from pathlib import Path
from typing import Any

from rich.table import Table

from shared_data.config import Source
from shared_data.console import say
from shared_data.layout import resolve_source_path
from shared_data.manifest import TOKEN_BYTES
from shared_data.records import COMPRESSED_SUFFIXES, find_files
from shared_data.remote import is_url
from shared_data.stage import Context, show_table

# Of English text with the LLaMA-3 tokenizer; code and other languages have fewer bytes a token.
BYTES_PER_TOKEN = 4.4
# Of compressed text and parquet.
COMPRESSION_RATIO = 3.0
# All four stages, per core; docs/data.md says where it was measured.
BYTES_PER_SECOND_PER_WORKER = 7e6


def estimate(context: Context) -> dict[str, Any]:
    """Expected tokens, shards, disk and time per source; of a data set on the hub, what the mixture needs of it."""
    total_weight = sum(source.weight for source in context.sources)
    sources = {}
    for source in context.sources:
        wanted = math.ceil(context.config.total_tokens * source.weight / total_weight)
        there = _text_bytes(source, context.layout.root)
        text_bytes = there if there is not None else int(wanted * BYTES_PER_TOKEN)
        tokens = int(text_bytes / BYTES_PER_TOKEN)
        sources[source.id] = {
            "tokens_wanted": wanted,
            "tokens_expected": tokens if there is not None else None,
            "shards": math.ceil(wanted / context.config.shard_size_tokens),
            "disk_bytes": 2 * text_bytes + TOKEN_BYTES * (tokens + wanted),
            "seconds": text_bytes / BYTES_PER_SECOND_PER_WORKER / context.workers,
        }
    free = shutil.disk_usage(_existing(context.layout.root)).free
    return {"sources": sources, "disk_bytes_free": free, "workers": context.workers}


def _text_bytes(source: Source, root: Path) -> int | None:
    """Bytes of text of a source with files on this machine; None for a data set and for addresses."""
    if source.files is None or any(map(is_url, source.files)):
        return None
    paths = find_files([resolve_source_path(name, root) for name in source.files], source.id)
    packed = (*COMPRESSED_SUFFIXES, ".parquet")
    return sum(int(path.stat().st_size * (COMPRESSION_RATIO if path.suffix in packed else 1)) for path in paths)


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def show(expected: dict[str, Any]) -> None:
    """The estimate as a table on standard error."""
    table = Table(title="expected", box=None, title_justify="left")
    for name in ("source", "tokens wanted", "tokens there", "shards", "disk GB", "minutes"):
        table.add_column(name, justify="left" if name == "source" else "right")
    for source, own in expected["sources"].items():
        there = "?" if own["tokens_expected"] is None else f"{own['tokens_expected']:,}"
        disk, minutes = own["disk_bytes"] / 1e9, own["seconds"] / 60
        table.add_row(source, f"{own['tokens_wanted']:,}", there, str(own["shards"]), f"{disk:,.2f}", f"{minutes:,.1f}")
    show_table(table)
    sums = [sum(own[key] for own in expected["sources"].values()) for key in ("disk_bytes", "seconds")]
    say(
        f"in all {sums[0] / 1e9:,.2f} GB of disk ({expected['disk_bytes_free'] / 1e9:,.1f} GB are free) and about "
        f"{sums[1] / 60:,.0f} minutes with {expected['workers']} workers, download not counted"
    )
