"""Writing shards: ids checked on the way, whole files only, and no lost work when the process is killed.

A shard in progress lies in `shard_NNNNN.bin.tmp`. Every few megabytes it is flushed to disk and a small state file
beside it (`.progress`) records how many documents are safe. A new writer for the same shard and key cuts the
temporary file back to that point and goes on from there; anything else starts over. The final rename makes the shard
appear whole.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shared_data.errors import UserError
from shared_data.files import TEMPORARY_SUFFIX, fsync_folder, write_atomic
from shared_data.manifest import (
    TOKEN_BYTES,
    TOKEN_DTYPE,
    CorpusInfo,
    Manifest,
    Position,
    Sidecar,
    sidecar_bytes,
    sidecar_path,
)
from shared_data.manifest_builder import build_manifest

CHECKPOINT_BYTES = 8 << 20
MIN_CHECKPOINT_BYTES = 1 << 20
CHECKPOINTS_PER_SHARD = 16


def shard_name(index: int) -> str:
    """File name of a shard: shard_00000.bin, shard_00001.bin, ..."""
    return f"shard_{index:05d}.bin"


def check_document(ids: np.ndarray, *, vocab_size: int, eos_token_id: int, where: str) -> None:
    """Refuse a document that would damage a shard.

    Args:
        ids: the document, EOS included, uint32 (n,).

    Raises:
        UserError: it does not end with EOS, or another id is not below vocab_size.
    """
    if len(ids) == 0 or ids[-1] != eos_token_id:
        raise UserError(f"{where}: a document does not end with the EOS id {eos_token_id}")
    if len(ids) > 1 and (largest := int(ids[:-1].max())) >= vocab_size:
        raise UserError(f"{where}: token id {largest} is not below vocab_size ({vocab_size})")


def _temporary_path(shard: Path) -> Path:
    return shard.with_name(shard.name + TEMPORARY_SUFFIX)


def _progress_path(shard: Path) -> Path:
    return shard.with_suffix(".progress")


def safe_progress(shard: Path, key: str) -> tuple[int, int]:
    """Documents and bytes of an unfinished shard that are safe; 0 for one of another key."""
    try:
        progress = json.loads(_progress_path(shard).read_text())
        documents, n_bytes = int(progress["documents"]), int(progress["bytes"])
        if key and progress["key"] == key and _temporary_path(shard).stat().st_size >= n_bytes:
            return documents, n_bytes
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return 0, 0


@dataclass
class ShardWriter:
    """Writes one shard and its sidecar; the documents' lengths and sources are known before the first is written."""

    path: Path
    info: CorpusInfo
    position: Position
    lengths: np.ndarray
    """Tokens of each document, EOS included, (N,)."""
    source_index: np.ndarray
    n_bytes: np.ndarray
    inserts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Which documents are passkey inserts, int64."""
    ids: Sequence[str] | None = None
    """Where each document comes from: its id or URL at its source, else its place there."""
    key: str = ""
    """Fingerprint of the content: progress made under another key is not resumed."""
    done: int = field(default=0, init=False)
    """Documents written and safe, or resumed: the caller's next document."""

    def __post_init__(self) -> None:
        assert len(self.lengths) == len(self.source_index) == len(self.n_bytes) > 0
        self._ends = np.cumsum(self.lengths, dtype=np.int64)
        self._temporary = _temporary_path(self.path)
        fair = max(MIN_CHECKPOINT_BYTES, int(self._ends[-1]) * TOKEN_BYTES // CHECKPOINTS_PER_SHARD)
        self._checkpoint_bytes = min(CHECKPOINT_BYTES, fair)
        self._digest = hashlib.sha256()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._temporary, "r+b" if self._temporary.exists() else "w+b")  # noqa: SIM115 (closed by finish or abandon)
        self._resume()
        self._last_checkpoint = self._file.tell()

    def _resume(self) -> None:
        """Go to the end of what a killed process left safe, and drop the rest."""
        documents, n_bytes = safe_progress(self.path, self.key)
        if not (
            documents <= len(self._ends) and (documents == 0 or n_bytes == self._ends[documents - 1] * TOKEN_BYTES)
        ):
            documents, n_bytes = 0, 0
        left = n_bytes
        while left and (chunk := self._file.read(min(left, CHECKPOINT_BYTES))):
            self._digest.update(chunk)
            left -= len(chunk)
        self.done = documents
        self._file.truncate(n_bytes)
        self._file.seek(n_bytes)

    def add(self, ids: np.ndarray) -> None:
        """Append the next document, EOS included."""
        check_document(ids, vocab_size=self.info.vocab_size, eos_token_id=self.info.eos_token_id, where=str(self.path))
        assert len(ids) == self.lengths[self.done], "the document is not the one that was planned"
        content = ids.astype(TOKEN_DTYPE, copy=False).tobytes()
        self._digest.update(content)
        self._file.write(content)
        self.done += 1
        if self._file.tell() - self._last_checkpoint >= self._checkpoint_bytes and self.key:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._last_checkpoint = self._file.tell()
            safe = {"key": self.key, "documents": self.done, "bytes": self._last_checkpoint}
            write_atomic(_progress_path(self.path), json.dumps(safe))

    def finish(self) -> str:
        """Make the shard and its sidecar appear; returns the shard's SHA-256."""
        assert self.done == len(self.lengths), "not every planned document was added"
        sidecar = Sidecar(
            starts=self._ends - self.lengths,
            source_index=self.source_index,
            n_bytes=self.n_bytes,
            n_tokens=int(self._ends[-1]),
            sha256=self._digest.hexdigest(),
            info=self.info,
            position=self.position,
            inserts=self.inserts,
            ids=self.ids,
        )
        write_atomic(sidecar_path(self.path), sidecar_bytes(sidecar))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self.path)
        _progress_path(self.path).unlink(missing_ok=True)
        fsync_folder(self.path.parent)
        return self._digest.hexdigest()

    def abandon(self) -> None:
        """Close without finishing; what is safe can be resumed."""
        self._file.close()


def split_into_shards(lengths: np.ndarray, shard_size_tokens: int) -> list[slice]:
    """Cut a sequence of documents into shards of whole documents.

    A shard is closed when the next document would make it longer than `shard_size_tokens`. A document longer than that
    has a shard of its own.
    """
    slices, begin, size = [], 0, 0
    for index, length in enumerate(lengths.tolist()):
        if index > begin and size + length > shard_size_tokens:
            slices.append(slice(begin, index))
            begin, size = index, 0
        size += length
    return [*slices, slice(begin, len(lengths))] if len(lengths) else slices


def write_corpus(
    folder: Path,
    info: CorpusInfo,
    documents: Iterable[tuple[Sequence[int] | np.ndarray, int, int]],
    split: str = "train",
    names: Sequence[str] | None = None,
) -> Manifest:
    """Write a small corpus that is at hand in memory.

    Args:
        folder: where shards, sidecars and manifest go.
        info: what holds for the whole corpus.
        documents: (ids without EOS, index of the source, UTF-8 bytes of the text) of each document, in order.
        split: "train" or "validation".
        names: where each document comes from; None: that is not kept.
    """
    listed = [(np.array([*ids, info.eos_token_id], TOKEN_DTYPE), source, size) for ids, source, size in documents]
    lengths = np.array([len(ids) for ids, _, _ in listed], np.int64)
    slices = split_into_shards(lengths, info.shard_size_tokens)
    for index, part in enumerate(slices):
        writer = ShardWriter(
            path=folder / shard_name(index),
            info=info,
            position=Position.model_validate({"split": split, "index": index, "count": len(slices)}),
            lengths=lengths[part],
            source_index=np.array([source for _, source, _ in listed[part]], np.int32),
            n_bytes=np.array([size for _, _, size in listed[part]], np.int64),
            ids=None if names is None else names[part],
        )
        for ids, _, _ in listed[part]:
            writer.add(ids)
        writer.finish()
    manifest = build_manifest(folder)
    manifest.write(folder)
    return manifest
