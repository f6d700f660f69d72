"""Stage 1, its tasks: from a source, as it comes, to raw/SOURCE/data.jsonl with an id and a text on each line."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, ConfigDict, ValidationError

from shared_data.executor import Result
from shared_data.files import TEMPORARY_SUFFIX, atomic_writer, fsync_folder, write_atomic
from shared_data.records import Document, Fields, Span, json_library, read_documents
from shared_data.remote import RemoteFile, read_remote

SAVE_EVERY_BYTES = 8 << 20
# Of English text with the LLaMA-3 tokenizer; code and other languages have fewer bytes a token.
BYTES_PER_TOKEN = 4.4


@dataclass(frozen=True)
class ReadFiles:
    """Read pieces of files into one raw part."""

    spans: tuple[Span, ...]
    fields: Fields
    output: Path

    def run(self) -> Result:
        """Write the part."""
        return write_raw(read_documents(self.spans, self.fields), self.output)


def write_raw(documents: Iterable[Document], output: Path) -> Result:
    """Write documents as JSON lines; those without text are dropped and counted by reason."""
    counts: Counter[str] = Counter()
    digest = hashlib.sha256()
    with atomic_writer(output) as file:
        for document in documents:
            line = raw_line(document, counts)
            digest.update(line)
            file.write(line)
    return Result({output: digest.hexdigest()}, counts)


def raw_line(document: Document, counts: Counter[str]) -> bytes:
    """A document's line, empty if it has no text; counts it."""
    counts["read"] += 1
    if document.text is None:
        counts[f"dropped.{document.reason}"] += 1
        return b""
    counts["kept"] += 1
    for name, count in (document.repairs or {}).items():
        counts[f"changed.{name}"] += count
    url = {"url": document.url} if document.url else {}
    line: bytes = json_library().dumps({"id": document.id, **url, "text": document.text}) + b"\n"
    counts["bytes"] += len(line)
    return line


class Progress(BaseModel):
    """How far a file from afar has been read."""

    model_config = ConfigDict(frozen=True)

    key: str
    """Fingerprint of the file and of what is read from it."""
    counts: dict[str, int]
    """Of the documents so far; `read` is the number of the next one, `bytes` the length of what is written."""
    ended: bool
    """The file has no more documents."""


@dataclass(frozen=True)
class ReadRemote:
    """Read a file from afar into one raw part, up to a number of bytes, going on where an earlier run stopped.

    What is written lies in `data....jsonl.tmp`. Every few megabytes it is flushed to disk and the progress file says
    how much of it is safe; a killed run's temporary file is cut back to that, and a finished part with a smaller
    limit is taken up again.
    """

    file: RemoteFile
    fields: Fields
    key: str
    """Fingerprint of the file and of what is read from it."""
    max_bytes: int | None
    """The document that reaches so many bytes is the last. None: all are read."""
    n_bytes: int
    """About how many bytes it will give."""
    progress: Path
    output: Path

    def resumed_bytes(self) -> int:
        """Bytes that an earlier run has given already."""
        known = self._known()
        return min(self.n_bytes, known.counts.get("bytes", 0)) if known else 0

    def run(self) -> Result:
        """Write the part."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        partial = self.output.with_name(self.output.name + TEMPORARY_SUFFIX)
        counts, ended = self._take_up(partial)
        digest = hashlib.sha256()
        with open(partial, "r+b" if partial.exists() else "w+b") as file:
            file.truncate(counts["bytes"])
            while chunk := file.read(1 << 20):
                digest.update(chunk)
            saved = counts["bytes"]
            if not ended and not self._is_enough(counts):
                ended = True
                for document in read_remote(self.file, self.fields, counts["read"]):
                    line = raw_line(document, counts)
                    digest.update(line)
                    file.write(line)
                    if counts["bytes"] - saved >= SAVE_EVERY_BYTES:
                        self._save(file, counts, ended=False)
                        saved = counts["bytes"]
                    if self._is_enough(counts):
                        ended = False
                        break
            self._save(file, counts, ended=ended)
        os.replace(partial, self.output)
        fsync_folder(self.output.parent)
        return Result({self.output: digest.hexdigest()}, {**counts, "files_ended": int(ended)})

    def _is_enough(self, counts: Counter[str]) -> bool:
        return self.max_bytes is not None and counts["bytes"] >= self.max_bytes

    def _save(self, file: BinaryIO, counts: Counter[str], *, ended: bool) -> None:
        file.flush()
        os.fsync(file.fileno())
        write_atomic(self.progress, Progress(key=self.key, counts=dict(counts), ended=ended).model_dump_json())

    def _known(self) -> Progress | None:
        """The progress of an earlier run, if it is of the same file."""
        try:
            known = Progress.model_validate_json(self.progress.read_bytes())
        except (OSError, ValidationError):
            return None
        return known if known.key == self.key else None

    def _take_up(self, partial: Path) -> tuple[Counter[str], bool]:
        """What is there of an earlier run, in the temporary file; nothing if it is of another file or too long."""
        known = self._known()
        size = known.counts.get("bytes", 0) if known else 0
        if known and (self.max_bytes is None or size <= self.max_bytes):
            if self.output.is_file() and self.output.stat().st_size == size:
                os.replace(self.output, partial)
            if partial.is_file() and partial.stat().st_size >= size:
                return Counter(known.counts), known.ended
        partial.unlink(missing_ok=True)
        return Counter(), False


def expected_text_bytes(file: RemoteFile) -> int:
    """About how many bytes of text a file holds, for choosing how many files to read."""
    packed = file.name.lower().endswith((".parquet", ".gz", ".xz", ".zst"))
    return 2 * file.size if packed else file.size


def choose_files(files: list[RemoteFile], done: list[int], wanted: int | None) -> tuple[int, int | None]:
    """How many of a source's files to read next, and up to how many bytes each.

    Args:
        files: all of them, in order.
        done: bytes that each file read so far gave.
        wanted: bytes of text that the source must give; None: all of it.

    Returns:
        Number of files that are read after this round, and the limit for each file of the round. A function of sizes
        and contents alone, so that the result does not depend on how many are read at once.
    """
    if wanted is None:
        return len(files), None
    missing = wanted - sum(done)
    if missing <= 0:
        return len(done), None
    count, expected = len(done), 0
    while count < len(files) and expected < missing:
        expected += expected_text_bytes(files[count])
        count += 1
    return count, missing


def describe(file: RemoteFile, fields: Fields) -> str:
    """Fingerprint of a file and of what is read from it."""
    about = [file.url, file.size, file.version, vars(fields)]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
