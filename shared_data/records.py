"""Reading documents: from the source's files (JSON lines, text, parquet, each as it comes), and from the stages' own.

A span is a piece of a file that a task reads. A line belongs to the span that holds its first byte, so that spans of
any size read each line once. A document that cannot be read is returned as a reason, never skipped in silence.
"""

import functools
import glob
import gzip
import itertools
import json
import lzma
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any, BinaryIO

from shared_data.errors import UserError, require_extra
from shared_data.html import text_of_html
from shared_data.tokenizer import replace_lone_surrogates

CHUNK_BYTES = 1 << 20
LINE_SUFFIXES = (".jsonl", ".json")
TEXT_SUFFIXES = (".txt",)
HTML_SUFFIXES = (".html", ".htm")
COMPRESSED_SUFFIXES = (".gz", ".xz", ".zst")
KNOWN_SUFFIXES = (*LINE_SUFFIXES, *TEXT_SUFFIXES, *HTML_SUFFIXES, ".parquet")
ALLOWED_SUFFIXES = "allowed: .jsonl, .json, .txt, .html, .htm, each also with .gz, .xz or .zst, and .parquet"


@dataclass(frozen=True)
class Fields:
    """Where a record keeps its text, and what else is asked of it."""

    text_field: str
    extra_text_field: str | None
    separator: str
    html: bool = False
    """The text is HTML."""
    licence_field: str | None = None
    licences: tuple[str, ...] | None = None
    """Licences allowed, in small letters; a record whose licence field names none, or another, is dropped."""

    def names(self) -> list[str]:
        """The fields of the text."""
        return [name for name in (self.text_field, self.extra_text_field) if name]

    def columns(self) -> list[str]:
        """All fields that must be there."""
        return [*self.names(), *([self.licence_field] if self.licence_field else [])]


PLAIN = Fields("text", None, "")
"""Where the stages' own files keep their text."""


@dataclass(frozen=True)
class Span:
    """A piece of a file: bytes [start, end) of a file that can be cut, or the whole of one that cannot."""

    path: Path
    name: str
    """The file's name in the ids of its documents."""
    start: int
    end: int


@dataclass(frozen=True)
class Document:
    """A document as read: its text, or the reason why there is none."""

    id: str
    text: str | None
    reason: str | None = None
    repairs: Mapping[str, int] | None = None
    """Changes that reading itself had to make: invalid_utf8_replaced, lone_surrogates_replaced."""
    url: str | None = None
    """Where the document came from, if its record says so."""


def base_suffix(path: PurePath) -> str:
    """The suffix that says what is in a file, compression apart."""
    suffix = path.suffix.lower()
    return PurePath(path.stem).suffix.lower() if suffix in COMPRESSED_SUFFIXES else suffix


def is_compressed(path: Path) -> bool:
    """Whether a file's suffix says that it is compressed."""
    return path.suffix.lower() in COMPRESSED_SUFFIXES


def find_files(patterns: Sequence[Path], source: str) -> list[Path]:
    """The files of a source, sorted, each once.

    Raises:
        UserError: a pattern matches nothing, or a file's suffix is unknown.
    """
    found: set[Path] = set()
    for pattern in patterns:
        matches = [Path(name) for name in glob.glob(str(pattern), recursive=True)]
        files = [path for path in matches if path.is_file()]
        if not files:
            raise UserError(f"source {source}: files: {_why_no_file(pattern)}")
        found.update(files)
    return check_suffixes(sorted(found), source)


def _why_no_file(pattern: Path) -> str:
    if not pattern.is_dir():
        return f"{pattern} matches no file"
    inside = sorted(base_suffix(path) for path in pattern.iterdir() if path.is_file())
    suffix = next((suffix for suffix in inside if suffix in KNOWN_SUFFIXES), ".jsonl")
    return f"{pattern} is a folder; write the files in it, such as {pattern}/*{suffix}"


def first_keys(path: Path) -> list[str]:
    """The keys of the first record of a file of JSON lines; none where it is another kind of file, or no record."""
    if base_suffix(path) not in LINE_SUFFIXES:
        return []
    _, line = next(lines_of_stream(read_chunks(path)), (0, b""))
    try:
        record, _ = parse_json_line(line)
    except (ValueError, RecursionError):
        return []
    return list(record) if isinstance(record, dict) else []


def check_suffixes(paths: list[Path], source: str) -> list[Path]:
    """The paths, if all are of a known kind. Raises UserError for the first that is not."""
    for path in paths:
        if base_suffix(path) not in KNOWN_SUFFIXES:
            raise UserError(f"source {source}: files: {path} has a suffix that is not known; {ALLOWED_SUFFIXES}")
    return paths


def cut_into_spans(files: Sequence[tuple[Path, str, int]], task_bytes: int) -> list[list[Span]]:
    """Group files into tasks of about task_bytes; only plain JSON lines are cut inside a file.

    Args:
        files: (path, name, size in bytes), in order.
        task_bytes: input bytes of a task.
    """
    tasks: list[list[Span]] = [[]]
    room = task_bytes
    for path, name, size in files:
        can_cut = base_suffix(path) in LINE_SUFFIXES and not is_compressed(path)
        # Equal pieces: a file a little over task_bytes is one task, not one and a crumb.
        step = math.ceil(size / max(1, round(size / task_bytes))) if can_cut else size
        for start in range(0, size, step) if size else ():
            span = Span(path, name, start, min(start + step, size))
            if tasks[-1] and span.end - span.start > room:
                tasks.append([])
                room = task_bytes
            tasks[-1].append(span)
            room -= span.end - span.start
    return [spans for spans in tasks if spans]


def read_chunks(path: Path, start: int = 0) -> Iterator[bytes]:
    """The bytes of a file from `start` on, decompressed by its suffix.

    Raises:
        UserError: a compressed file is damaged or ends in the middle.
    """
    with open(path, "rb") as file:
        file.seek(start)
        yield from open_decompressed(file, path)


def open_decompressed(file: BinaryIO, path: PurePath) -> Iterator[bytes]:
    """The bytes of an open file, decompressed by the suffix of its name. Raises UserError as `read_chunks`."""
    if path.suffix.lower() == ".zst":
        yield from _read_zst(file, path)
        return
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
    opener = openers.get(path.suffix.lower())
    stream: Any = file if opener is None else opener(file)
    try:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise UserError(f"{path}: the compressed file is cut off or damaged ({error})") from None


def _read_zst(file: BinaryIO, path: PurePath) -> Iterator[bytes]:
    """Decompress frame after frame. zstandard's own reader takes a file that is cut off for a short one."""
    zstandard = require_extra("zstandard", "data")
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame, started = decompressor.decompressobj(), False
    try:
        while chunk := file.read(CHUNK_BYTES):
            while chunk:
                started = True
                yield frame.decompress(chunk)
                chunk = b""
                if frame.eof:
                    chunk = frame.unused_data
                    frame, started = decompressor.decompressobj(), False
    except zstandard.ZstdError as error:
        raise UserError(f"{path}: the compressed file is damaged ({error})") from None
    if started:
        raise UserError(f"{path}: the compressed file is cut off: its last frame does not end")


def lines_of_stream(chunks: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    """(offset, line without its end) of each line of a stream; empty lines are left out."""
    offset, rest = 0, b""
    for chunk in chunks:
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        for line in lines:
            if line.strip():
                yield offset, line
            offset += len(line) + 1
    if rest.strip():
        yield offset, rest


def read_lines(span: Span) -> Iterator[tuple[int, bytes]]:
    """(offset, line without its end) of each line whose first byte lies in the span; empty lines are left out."""
    whole = is_compressed(span.path)
    position = 0 if whole else span.start
    skipping = False
    if not whole and span.start > 0:
        # A line that starts exactly at span.start is ours only if the byte before it ends a line.
        position -= 1
        skipping = True
    rest = b""
    for chunk in read_chunks(span.path, position):
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        for line in lines:
            offset, position = position, position + len(line) + 1
            if skipping:
                skipping = False
                continue
            if not whole and offset >= span.end:
                return
            if line.strip():
                yield offset, line
    if rest.strip() and not skipping and (whole or position < span.end):
        yield position, rest


@functools.cache
def json_library() -> ModuleType:
    """orjson, which is several times faster than the standard library's json."""
    return require_extra("orjson", "data")


def parse_json_line(line: bytes) -> tuple[Any, dict[str, int]]:
    """Parse one line of JSON; returns the value and the repairs made.

    Invalid UTF-8 is replaced by U+FFFD and counted; escapes of lone surrogates are let through.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return json_library().loads(line), {}
    except ValueError:
        text = line.decode("utf-8", "replace")
        repairs = text.count("\ufffd") - line.count("\ufffd".encode())
        return json.loads(text), {"invalid_utf8_replaced": repairs} if repairs else {}


def text_of(record: Any, fields: Fields) -> str | None:
    """The text of a record, the extra field's joined to it; None when a field is missing or holds no text."""
    if not isinstance(record, dict):
        return None
    names = fields.names()
    parts = [part for name in names if isinstance(part := record.get(name), str)]
    return fields.separator.join(parts) if len(parts) == len(names) else None


def document_of(record: Any, where: str, fields: Fields, repairs: dict[str, int] | None = None) -> Document:
    """A document from a parsed record. Its id is the record's own id or url, else the place it was read at."""
    text = text_of(record, fields)
    if text is None:
        return Document(where, None, "no_text")
    if fields.licences is not None and not _is_licensed(record, fields.licences, fields.licence_field):
        return Document(where, None, "licence")
    if fields.html:
        text = text_of_html(text)
    name = next((record[key] for key in ("id", "url") if isinstance(record.get(key), str | int)), where)
    text, surrogates = replace_lone_surrogates(text)
    repairs = dict(repairs or {})
    if surrogates:
        repairs["lone_surrogates_replaced"] = surrogates
    url = record.get("url")
    url = replace_lone_surrogates(url)[0] if isinstance(url, str) else None
    return Document(replace_lone_surrogates(str(name))[0], text, None, repairs, url)


def _is_licensed(record: dict[str, Any], allowed: Sequence[str], field: str | None) -> bool:
    """Whether a record names a licence and all that it names are allowed."""
    named = record.get(field or "")
    names = named if isinstance(named, list) else [named]
    return bool(names) and all(isinstance(name, str) and name.lower() in allowed for name in names)


def read_json_lines(span: Span, fields: Fields) -> Iterator[Document]:
    """The documents of a span of JSON lines."""
    return documents_of_lines(read_lines(span), span.name, fields)


def documents_of_lines(
    lines: Iterable[tuple[int, bytes]], name: str, fields: Fields, start: int = 0
) -> Iterator[Document]:
    """The documents of JSON lines with their offsets, from number `start` on."""
    for offset, line in itertools.islice(lines, start, None):
        where = f"{name}@{offset}"
        try:
            record, repairs = parse_json_line(line)
        except (ValueError, RecursionError):
            yield Document(where, None, "bad_json")
            continue
        yield document_of(record, where, fields, repairs)


def _read_text(span: Span, html: bool) -> Iterator[Document]:
    content = b"".join(read_chunks(span.path))
    text = content.decode("utf-8", "replace")
    repairs = text.count("\ufffd") - content.count("\ufffd".encode())
    if html:
        text = text_of_html(text)
    yield Document(span.name, text, None, {"invalid_utf8_replaced": repairs} if repairs else {})


def documents_of_parquet(file: Path | BinaryIO, name: str, fields: Fields, start: int = 0) -> Iterator[Document]:
    """The documents of a parquet file from row `start` on; of earlier row groups, and other columns, nothing is read.

    Raises:
        UserError: it is no whole parquet file, or a column is missing.
    """
    require_extra("pyarrow", "data")
    parquet = require_extra("pyarrow.parquet", "data")
    arrow_errors = require_extra("pyarrow.lib", "data").ArrowException
    row = 0
    try:
        with parquet.ParquetFile(file) as content:
            known = content.schema_arrow.names
            if missing := [column for column in fields.columns() if column not in known]:
                raise UserError(f"{name} has no column {missing[0]!r}; it has: {', '.join(known)}")
            columns = [*fields.columns(), *(column for column in ("id", "url") if column in known)]
            for group in range(content.num_row_groups):
                n_rows = content.metadata.row_group(group).num_rows
                if row + n_rows <= start:
                    row += n_rows
                    continue
                for batch in content.iter_batches(1024, row_groups=[group], columns=columns):
                    for record in batch.to_pylist():
                        if row >= start:
                            yield document_of(record, f"{name}@{row}", fields)
                        row += 1
    except arrow_errors as error:
        raise UserError(f"{name}: not a whole parquet file ({str(error).splitlines()[0]})") from None


def read_documents(spans: Iterable[Span], fields: Fields) -> Iterator[Document]:
    """The documents of a task's spans, in order."""
    for span in spans:
        kind = base_suffix(span.path)
        if kind in LINE_SUFFIXES:
            yield from read_json_lines(span, fields)
        elif kind in (*TEXT_SUFFIXES, *HTML_SUFFIXES):
            yield from _read_text(span, fields.html or kind in HTML_SUFFIXES)
        else:
            yield from documents_of_parquet(span.path, span.name, fields)
