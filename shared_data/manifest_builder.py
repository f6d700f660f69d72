"""The manifest of a corpus, derived from its shards and sidecars alone."""

from collections import defaultdict
from pathlib import Path

import numpy as np

from shared_data.errors import UserError
from shared_data.manifest import (
    MANIFEST_VERSION,
    TOKEN_BYTES,
    LongContextEntry,
    Manifest,
    ShardEntry,
    Sidecar,
    SourceEntry,
    read_sidecar,
    shard_files,
)


def build_manifest(folder: Path) -> Manifest:
    """Derive the manifest of the shards and sidecars in a folder; the shards are not read, only their sizes.

    Raises:
        UserError: there are no shards, one is missing or of another packing, or a sidecar does not fit its shard.
    """
    paths = shard_files(folder)
    if not paths:
        raise UserError(f"{folder} holds no shard_*.bin: there is nothing to make a manifest of")
    sidecars = [read_sidecar(path) for path in paths]
    _check_one_packing(paths, sidecars)
    info = sidecars[0].info
    shards = [
        ShardEntry(
            index=index,
            path=path.name,
            n_tokens=sidecar.n_tokens,
            sha256=sidecar.sha256,
            n_eos=len(sidecar.starts),
        )
        for index, (path, sidecar) in enumerate(zip(paths, sidecars, strict=True))
    ]
    return Manifest(
        version=MANIFEST_VERSION,
        **info.model_dump(exclude={"sources", "window_tokens"}),
        total_tokens=sum(shard.n_tokens for shard in shards),
        total_documents=sum(shard.n_eos for shard in shards),
        oversized_documents=sum(int((sidecar.lengths > info.shard_size_tokens).sum()) for sidecar in sidecars),
        shard_count=len(shards),
        shards_dir=".",
        shards=shards,
        sources=_source_entries(sidecars),
        long_context=_long_context_entry(sidecars),
    )


def _source_entries(sidecars: list[Sidecar]) -> dict[str, SourceEntry]:
    sources = sidecars[0].info.sources
    sums = np.zeros((len(sources), 5), np.int64)
    for sidecar in sidecars:
        lengths = sidecar.lengths
        is_insert = np.zeros(len(lengths), bool)
        is_insert[sidecar.inserts] = True
        for index in range(len(sources)):
            mine = sidecar.source_index == index
            inserted = mine & is_insert
            sums[index] += [lengths[mine].sum(), mine.sum(), sidecar.n_bytes[mine].sum(),
                            inserted.sum(), lengths[inserted].sum()]  # fmt: skip
    names = ("tokens", "documents", "bytes", "inserts", "insert_tokens")
    return {
        source.id: SourceEntry(weight=source.weight, **dict(zip(names, own, strict=True)))
        for source, own in zip(sources, sums.tolist(), strict=True)
    }


def _long_context_entry(sidecars: list[Sidecar]) -> LongContextEntry | None:
    own = [sidecar for sidecar in sidecars if sidecar.position.split == "long"]
    if not own:
        return None
    window_tokens = own[0].info.window_tokens
    tokens, inserts = sum(sidecar.n_tokens for sidecar in own), sum(len(sidecar.inserts) for sidecar in own)
    return LongContextEntry(
        window_tokens=window_tokens,
        windows=tokens // window_tokens,
        tokens=tokens,
        documents=sum(len(sidecar.starts) for sidecar in own) - inserts,
        inserts=inserts,
        insert_tokens=sum(int(sidecar.lengths[sidecar.inserts].sum()) for sidecar in own),
    )


def _check_one_packing(paths: list[Path], sidecars: list[Sidecar]) -> None:
    seen: dict[str, set[int]] = defaultdict(set)
    for path, sidecar in zip(paths, sidecars, strict=True):
        if sidecar.info != sidecars[0].info:
            raise UserError(f"{path} belongs to another packing than {paths[0].name}; pack the corpus again")
        if path.stat().st_size != sidecar.n_tokens * TOKEN_BYTES:
            raise UserError(f"{path} has {path.stat().st_size} bytes, but its sidecar says {sidecar.n_tokens} tokens")
        position = sidecar.position
        if position.index in seen[position.split]:
            raise UserError(f"{path}: shard {position.index} of the {position.split} split is there twice")
        seen[position.split].add(position.index)
    for sidecar in sidecars:
        missing = set(range(sidecar.position.count)) - seen[sidecar.position.split]
        if missing:
            raise UserError(
                f"{paths[0].parent}: shard {min(missing)} of {sidecar.position.count} of the {sidecar.position.split} "
                "split is not there; pack the corpus again"
            )
    for number, path in enumerate(paths):
        if path.name != f"shard_{number:05d}.bin":
            raise UserError(f"{paths[0].parent}: shard_{number:05d}.bin is not there; pack the corpus again")
