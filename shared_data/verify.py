"""Reads a packed corpus again, to the last token, and says what is wrong with which file."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from shared_data import options
from shared_data.console import ProgressReporter, progress, say
from shared_data.errors import UserError
from shared_data.manifest import (
    MANIFEST_NAME,
    TOKEN_BYTES,
    TOKEN_DTYPE,
    Manifest,
    ShardEntry,
    build_manifest,
    read_sidecar,
    sidecar_path,
)

CHUNK_TOKENS = 1 << 20
SUBFOLDERS = ("validation",)


def check_shard(path: Path, entry: ShardEntry, manifest: Manifest, bar: ProgressReporter) -> str | None:
    """Read a shard and its sidecar; returns what is wrong, or None.

    Size, SHA-256, ids (all below vocab_size but the EOS), and the documents' ends, which must be where the sidecar
    says.
    """
    if not path.is_file():
        return f"{path} is not there, but {MANIFEST_NAME} names it"
    if (size := path.stat().st_size) != entry.n_tokens * TOKEN_BYTES:
        return f"{path} has {size} bytes, but {MANIFEST_NAME} says {entry.n_tokens * TOKEN_BYTES}"
    digest, ends, start = hashlib.sha256(), [], 0
    for ids in _chunks(path):
        digest.update(ids.tobytes())
        is_end = ids == manifest.eos_token_id
        wrong = np.flatnonzero((ids >= manifest.vocab_size) & ~is_end)
        if len(wrong):
            place, token = start + wrong[0], ids[wrong[0]]
            return f"{path}: token {place} is {token}, not below vocab_size ({manifest.vocab_size})"
        ends.append(np.flatnonzero(is_end) + start)
        start += len(ids)
        bar.advance(ids.nbytes)
    if digest.hexdigest() != entry.sha256:
        return f"{path}: SHA-256 is {digest.hexdigest()}, but {MANIFEST_NAME} says {entry.sha256}"
    return _check_ends(path, np.concatenate(ends), entry, manifest)


def _check_ends(path: Path, ends: np.ndarray, entry: ShardEntry, manifest: Manifest) -> str | None:
    if len(ends) != entry.n_eos:
        return f"{path} holds {len(ends)} documents, but {MANIFEST_NAME} says {entry.n_eos}"
    if len(ends) and ends[-1] != entry.n_tokens - 1:
        return f"{path} does not end with the EOS id {manifest.eos_token_id}"
    if manifest.corpus is None and not sidecar_path(path).exists():
        return None
    try:
        sidecar = read_sidecar(path)
    except UserError as error:
        return str(error)
    if sidecar.info.corpus != manifest.corpus:
        return f"{sidecar_path(path)} belongs to another packing than {MANIFEST_NAME}"
    if not np.array_equal(sidecar.starts + sidecar.lengths - 1, ends):
        return f"{sidecar_path(path)}: its documents do not end where those of {path.name} do"
    return None


def _chunks(path: Path) -> Iterator[np.ndarray]:
    with open(path, "rb") as file:
        while content := file.read(CHUNK_TOKENS * TOKEN_BYTES):
            yield np.frombuffer(content, TOKEN_DTYPE)


def verify_folder(folder: Path) -> tuple[Manifest, list[str]]:
    """Check one folder of shards; returns its manifest and a line per bad file.

    Raises:
        UserError: the manifest is missing or wrong.
    """
    manifest = Manifest.load(folder, check_sizes=False)
    with progress(f"verify {folder}", total=manifest.total_tokens * TOKEN_BYTES, unit="B") as bar:
        shards = zip(manifest.shard_paths(folder), manifest.shards, strict=True)
        problems = [problem for path, entry in shards if (problem := check_shard(path, entry, manifest, bar))]
    if not problems and manifest.corpus is not None:
        written, rebuilt = manifest.model_dump(), build_manifest(folder).model_dump()
        for key, value in rebuilt.items():
            if (found := written[key]) != value and key not in ("shards", "shards_dir", "version"):
                problems.append(f"{folder / MANIFEST_NAME}: {key} is {found}, but shards and sidecars give {value}")
    return manifest, problems


def repair_manifest(folder: Path) -> bool:
    """Write a missing manifest, from the shards and sidecars; returns whether one was missing.

    Raises:
        UserError: they do not say all that it needs.
    """
    if (folder / MANIFEST_NAME).is_file():
        return False
    build_manifest(folder).write(folder)
    return True


def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of shards: data/pretrain_chinchilla.")],
    repair: Annotated[
        bool, typer.Option("--repair", help="Rebuild a missing manifest from shards and sidecars.")
    ] = False,
    as_json: options.JsonOption = False,
) -> int:
    """Read every shard again: sizes, SHA-256, counts, ids and sidecars. Exit code 1 if a file is bad."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: name one that holds {MANIFEST_NAME}, e.g. data/pretrain_chinchilla")
    folders = [folder, *(folder / name for name in SUBFOLDERS if (folder / name).is_dir())]
    results: dict[str, dict[str, Any]] = {}
    bad: list[str] = []
    for own in folders:
        if repair and repair_manifest(own):
            say(f"{own / MANIFEST_NAME}: rebuilt from shards and sidecars")
        manifest, problems = verify_folder(own)
        bad += problems
        results[str(own)] = {
            "shards": manifest.shard_count,
            "tokens": manifest.total_tokens,
            "documents": manifest.total_documents,
            "problems": problems,
        }
    for problem in bad:
        say(f"bad: {problem}")
    if as_json:
        print(json.dumps(results, indent=2))
    else:
        for name, result in results.items():
            state = "all good" if not result["problems"] else f"{len(result['problems'])} bad files"
            print(f"{name}: {result['shards']} shards, {result['tokens']:,} tokens, {state}")
    return 1 if bad else 0
