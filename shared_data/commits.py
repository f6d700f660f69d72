"""Commit records: how a stage knows what is done.

A task writes its outputs whole (temporary name, fsync, rename) and then its record, which names them and the
fingerprint of everything that they depend on. A task is done when its record has the fingerprint expected now and its
outputs are there with the recorded sizes. So a kill at any moment costs at most the tasks in flight, a second run
does nothing, and a changed input redoes only what depends on it.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from shared_data.files import sha256_file, write_atomic


class FileState(BaseModel):
    """A file as it was when its SHA-256 was taken. While size, time and inode stay, the hash is trusted."""

    model_config = ConfigDict(frozen=True)

    path: str
    """Relative to the record's folder, or absolute."""
    bytes: int
    sha256: str
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path, base: Path, sha256: str | None = None) -> Self:
        """The state of a file now, named relative to `base`; its hash is computed unless the caller has it."""
        status = path.stat()
        digest = sha256 or sha256_file(path)
        return cls(
            path=os.path.relpath(path, base),
            bytes=status.st_size,
            sha256=digest,
            mtime_ns=status.st_mtime_ns,
            inode=status.st_ino,
        )

    def unchanged(self, base: Path) -> bool:
        """Whether the file is still there and looks as it did."""
        try:
            status = (base / self.path).stat()
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns, status.st_ino) == (self.bytes, self.mtime_ns, self.inode)


class Commit(BaseModel):
    """The record of a finished task."""

    model_config = ConfigDict(frozen=True)

    key: str
    outputs: list[FileState]
    counts: dict[str, int]
    """Documents, bytes and tokens by name; `dropped.REASON` for each reason."""
    n_bytes: int = 0
    """Input bytes of the task."""
    processed_bytes: int = 0
    """Input bytes of all attempts at it: the difference is what kills cost."""


def fingerprint(*parts: Any) -> str:
    """SHA-256 over values of plain types: equal values give equal fingerprints on any machine."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_commit(record: Path, key: str) -> Commit | None:
    """The record of a task if it is done: same key, and every output there with its size."""
    try:
        commit = Commit.model_validate_json(record.read_bytes())
    except (OSError, ValidationError):
        return None
    if commit.key != key:
        return None
    for output in commit.outputs:
        path = record.parent / output.path
        if not path.is_file() or path.stat().st_size != output.bytes:
            return None
    return commit


def note_attempt(record: Path, key: str, n_bytes: int) -> None:
    """Note that a task begins, with the input bytes that are left to do. Killed or not, it counts as processed."""
    path = record.with_suffix(".attempts")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(f"{key} {n_bytes}\n")


def attempted_bytes(record: Path, key: str) -> int:
    """Input bytes of all attempts at a task since its key is this one."""
    path = record.with_suffix(".attempts")
    lines = path.read_text().splitlines() if path.is_file() else []
    return sum(int(words[1]) for line in lines if (words := line.split()) and words[0] == key and words[1:])


def write_commit(
    record: Path, key: str, outputs: Mapping[Path, str | None], counts: Mapping[str, int], n_bytes: int = 0
) -> Commit:
    """Record a task as done.

    Args:
        record: the record's path.
        key: fingerprint of everything that the outputs depend on.
        outputs: the files, with their SHA-256 where it is known.
        counts: see Commit.
        n_bytes: input bytes of the task.
    """
    states = [FileState.of(path, record.parent, digest) for path, digest in outputs.items()]
    processed = attempted_bytes(record, key)
    commit = Commit(key=key, outputs=states, counts=dict(counts), n_bytes=n_bytes, processed_bytes=processed)
    write_atomic(record, commit.model_dump_json())
    return commit


def known_state(path: Path, cache: Path) -> FileState:
    """The state of an input file, hashed again only when the file looks changed; kept in `cache` (a folder)."""
    record = cache / f"{fingerprint(os.path.relpath(path, cache))[:32]}.json"
    try:
        state = FileState.model_validate_json(record.read_bytes())
    except (OSError, ValidationError):
        state = None
    if state is None or state.path != os.path.relpath(path, cache) or not state.unchanged(cache):
        state = FileState.of(path, cache)
        write_atomic(record, state.model_dump_json())
    return state
