"""Reads a packed corpus again, to the last token, and says what is wrong with which file."""

import hashlib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from shared_data import options
from shared_data.console import ProgressReporter, count_of, progress, say
from shared_data.errors import UserError
from shared_data.manifest import (
    MANIFEST_NAME,
    TOKEN_BYTES,
    TOKEN_DTYPE,
    Manifest,
    ShardEntry,
    read_sidecar,
    sidecar_path,
)
from shared_data.manifest_builder import build_manifest
from shared_data.repair import repair_manifest, repair_shards

CHUNK_TOKENS = 1 << 20
SUBFOLDERS = ("validation", "long")


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
        sidecar = read_sidecar(path, with_ids=True)
    except UserError as error:
        return str(error)
    if sidecar.info.corpus != manifest.corpus:
        return f"{sidecar_path(path)} belongs to another packing than {MANIFEST_NAME}"
    if not np.array_equal(sidecar.starts + sidecar.lengths - 1, ends):
        return f"{sidecar_path(path)}: its documents do not end where those of {path.name} do"
    if sidecar.ids is not None and len(sidecar.ids) != len(ends):
        return f"{sidecar_path(path)}: it names {len(sidecar.ids)} documents, but {path.name} holds {len(ends)}"
    return None


def _chunks(path: Path) -> Iterator[np.ndarray]:
    with open(path, "rb") as file:
        while content := file.read(CHUNK_TOKENS * TOKEN_BYTES):
            yield np.frombuffer(content, TOKEN_DTYPE)


@dataclass(frozen=True)
class Problem:
    """What is wrong with a corpus."""

    message: str
    shard: int | None
    """Number of the bad shard; None: the manifest's counts are wrong."""


def verify_folder(folder: Path, only: Collection[int] | None = None) -> tuple[Manifest, list[Problem]]:
    """Check one folder of shards, or only some of them; returns its manifest and what is wrong.

    Raises:
        UserError: the manifest is missing or wrong.
    """
    manifest = Manifest.load(folder, check_sizes=False)
    wanted = [entry for entry in manifest.shards if only is None or entry.index in only]
    problems = []
    with progress(f"verify {folder}", total=sum(entry.n_tokens for entry in wanted) * TOKEN_BYTES, unit="B") as bar:
        for entry in wanted:
            if message := check_shard(folder / entry.path, entry, manifest, bar):
                problems.append(Problem(message, entry.index))
    if not problems and manifest.corpus is not None:
        written, rebuilt = manifest.model_dump(), build_manifest(folder).model_dump()
        for key, value in rebuilt.items():
            if (found := written[key]) != value and key not in ("shards", "shards_dir", "version"):
                message = f"{folder / MANIFEST_NAME}: {key} is {found}, but shards and sidecars give {value}"
                problems.append(Problem(message, None))
    return manifest, problems


def repair_folder(folder: Path, manifest: Manifest, problems: list[Problem]) -> tuple[Manifest, list[Problem]]:
    """Rebuild the bad shards, or the manifest where only its counts are wrong; returns what is left wrong."""
    bad = [problem.shard for problem in problems if problem.shard is not None]
    for problem in problems:
        say(f"bad: {problem.message}")
    if not bad:
        build_manifest(folder).write(folder)
        say(f"{folder / MANIFEST_NAME}: rebuilt from shards and sidecars")
        return verify_folder(folder, bad)
    try:
        for path in repair_shards(folder, manifest, bad):
            say(f"{path}: rebuilt from the token streams")
    except UserError as error:
        say(f"not repaired: {error}")
        return manifest, problems
    return verify_folder(folder, bad)


def verify(
    folder: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Folders of shards, one or several: data/pretrain_chinchilla."),
    ],
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Rebuild bad shards from the token streams, the manifest from the sidecars."),
    ] = False,
    as_json: options.JsonOption = False,
) -> int:
    """Read every shard again: sizes, SHA-256, counts, ids and sidecars. Exit code 1 if a file is bad."""
    folders = []
    for own in folder:
        if not own.is_dir():
            raise UserError(
                f"{own} is not a folder: name one that holds {MANIFEST_NAME}, e.g. data/pretrain_chinchilla"
            )
        folders += [own, *(own / name for name in SUBFOLDERS if (own / name).is_dir())]
    results: dict[str, dict[str, Any]] = {}
    bad: list[str] = []
    for own in folders:
        if repair and repair_manifest(own):
            say(f"{own / MANIFEST_NAME}: rebuilt from shards and sidecars")
        manifest, problems = verify_folder(own)
        if repair and problems:
            manifest, problems = repair_folder(own, manifest, problems)
        bad += [problem.message for problem in problems]
        results[str(own)] = {
            "shards": manifest.shard_count,
            "tokens": manifest.total_tokens,
            "documents": manifest.total_documents,
            "problems": [problem.message for problem in problems],
        }
    for problem in bad:
        say(f"bad: {problem}")
    if as_json:
        print(json.dumps(results, indent=2))
    else:
        for name, result in results.items():
            state = "all good" if not result["problems"] else count_of(len(result["problems"]), "bad file")
            print(f"{name}: {count_of(result['shards'], 'shard')}, {result['tokens']:,} tokens, {state}")
    return 1 if bad else 0
