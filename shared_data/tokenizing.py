"""Stage 3, its task: from a piece of clean text to token ids.

tokens.bin   uint32 version, uint32 EOS id, then little-endian uint32 ids, EOS after each document
tokens.idx   per document: tokens (EOS included), UTF-8 bytes of its text, leading 64 bits of its digest, and its id
"""

import hashlib
import json
import queue
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
from safetensors.numpy import save as save_safetensors

from shared_data.cleaning import HASH_DIGITS
from shared_data.config.schema import TokenizerConfig
from shared_data.errors import UserError
from shared_data.executor import Result
from shared_data.files import atomic_writer, write_atomic
from shared_data.filters import content_digest
from shared_data.manifest import TOKEN_BYTES, TOKEN_DTYPE, join_ids, split_ids
from shared_data.records import Span, parse_json_line, read_lines
from shared_data.shard_writer import check_document
from shared_data.tokenizer import LLAMA3, Tokenizer, load_tokenizer, replace_lone_surrogates

STREAM_VERSION = 1
INDEX_VERSION = 2
# Batches are read ahead: of long documents (papers, books) 1,024 would be some 60 MB each.
MAX_BATCH_CHARS = 1 << 21
HEADER_BYTES = 2 * TOKEN_BYTES
_INDEX_ARRAYS = ("n_tokens", "n_bytes", "hashes")


@dataclass(frozen=True)
class TokenIndex:
    """The documents of one tokens.bin, in its order; N of them."""

    n_tokens: np.ndarray
    """Tokens of each document, EOS included, int64 (N,)."""
    n_bytes: np.ndarray
    """UTF-8 bytes of each document's text, int64 (N,)."""
    hashes: np.ndarray
    """Leading 64 bits of each document's digest, uint64 (N,)."""


def read_ids(stream: Path, rows: Sequence[int] | np.ndarray | None = None) -> list[str]:
    """The ids of a token stream's documents (their own, or their URL, or their place in the source), in its order.

    Args:
        stream: a tokens.bin.
        rows: numbers of the documents wanted; of the others nothing is read. None: all.
    """
    arrays = {name: _map_array(index_path(stream), name) for name in ("ids", "id_ends")}
    return split_ids(arrays["ids"], arrays["id_ends"], range(len(arrays["id_ends"])) if rows is None else rows)


def _map_array(path: Path, name: str) -> np.ndarray:
    """An array of a safetensors file, mapped."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        about = json.loads(file.read(size))[name]
    begin, end = about["data_offsets"]
    dtype: np.dtype[Any] = np.dtype({"U8": "u1", "I64": "<i8"}[about["dtype"]])
    if begin == end:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r", offset=8 + size + begin, shape=((end - begin) // dtype.itemsize,))


def index_path(stream: Path) -> Path:
    """The index that belongs to a tokens.bin."""
    return stream.with_suffix(".idx")


def read_index(stream: Path) -> TokenIndex:
    """Read the index of a token stream and check it against the stream's size and header.

    Raises:
        UserError: one of the two is missing or damaged.
    """
    path = index_path(stream)
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            index = TokenIndex(**{name: file.get_tensor(name) for name in _INDEX_ARRAYS})
        size = stream.stat().st_size
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{path}: {error}; run the tokenize stage again") from None
    expected = HEADER_BYTES + TOKEN_BYTES * int(index.n_tokens.sum())
    if size != expected:
        raise UserError(f"{stream} has {size} bytes, but its index says {expected}; run the tokenize stage again")
    return index


@dataclass(frozen=True)
class TokenizeSpan:
    """Encode one piece of clean text."""

    span: Span
    tokenizer: TokenizerConfig
    batch_size: int
    prefetch: int
    output: Path

    def run(self) -> Result:
        """Write tokens.bin and tokens.idx."""
        tokenizer = tokenizer_of(self.tokenizer)
        counts: Counter[str] = Counter()
        columns: dict[str, list[int]] = {name: [] for name in _INDEX_ARRAYS}
        ids: list[bytes] = []
        digest = hashlib.sha256()
        with atomic_writer(self.output) as file:
            header = np.array([STREAM_VERSION, tokenizer.eos_token_id], TOKEN_DTYPE).tobytes()
            digest.update(header)
            file.write(header)
            for batch in _read_ahead(_batches(self.span, self.batch_size, counts), self.prefetch):
                content = _encode_batch(batch, tokenizer, counts, columns, ids, str(self.output)).tobytes()
                digest.update(content)
                file.write(content)
        arrays = {
            name: np.array(values, np.uint64 if name == "hashes" else np.int64) for name, values in columns.items()
        }
        arrays["ids"], arrays["id_ends"] = join_ids(ids)
        about = json.dumps({"version": INDEX_VERSION})
        write_atomic(index_path(self.output), save_safetensors(arrays, metadata={"index": about}))
        counts["tokens"] = sum(columns["n_tokens"])
        counts["text_bytes"] = sum(columns["n_bytes"])
        return Result({self.output: digest.hexdigest(), index_path(self.output): None}, counts)


class Text(NamedTuple):
    """A document to encode."""

    text: str
    hash: int
    """Leading 64 bits of its digest."""
    id: str


Batch = list[Text]


def tokenizer_of(settings: TokenizerConfig) -> Tokenizer:
    """The tokenizer that the settings name. Raises UserError."""
    known = settings.name == LLAMA3
    return load_tokenizer(
        settings.name,
        encoder=settings.encoder,
        pattern=settings.pattern,
        revision=settings.revision,
        eos_token_id=None if known else settings.eos_token_id,
        pad_token_id=None if known else settings.pad_token_id,
    )


def _batches(span: Span, size: int, counts: Counter[str]) -> Iterator[Batch]:
    """The documents of a piece of clean/SOURCE/data.jsonl, `size` at a time, fewer where they are long."""
    batch: Batch = []
    n_chars = 0
    for offset, line in read_lines(span):
        counts["read"] += 1
        try:
            record, _ = parse_json_line(line)
        except (ValueError, RecursionError):
            counts["dropped.bad_json"] += 1
            continue
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str) or not text:
            counts["dropped.empty" if text == "" else "dropped.no_text"] += 1
            continue
        text, surrogates = replace_lone_surrogates(text)
        if surrogates:
            counts["changed.lone_surrogates_replaced"] += surrogates
        given = record.get("hash")
        leading = given if isinstance(given, str) and len(given) == HASH_DIGITS else content_digest(text).hex()
        name = record.get("id", f"{span.name}@{offset}")
        batch.append(Text(text, int(leading[:HASH_DIGITS], 16), replace_lone_surrogates(str(name))[0]))
        n_chars += len(text)
        if len(batch) == size or n_chars >= MAX_BATCH_CHARS:
            yield batch
            batch, n_chars = [], 0
    if batch:
        yield batch


def _encode_batch(
    batch: Batch,
    tokenizer: Tokenizer,
    counts: Counter[str],
    columns: dict[str, list[int]],
    names: list[bytes],
    where: str,
) -> np.ndarray:
    """Ids of a batch, EOS after each document, uint32. A text that the encoder cannot do is dropped and counted."""
    eos = np.array([tokenizer.eos_token_id], TOKEN_DTYPE)
    encoded = []
    for document in batch:
        try:
            ids = tokenizer.encode_array(document.text)
        except BaseException as error:
            # Rust's panics are BaseExceptions; the rest of the file must not be lost to one of them.
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            counts["dropped.tokenizer_error"] += 1
            continue
        ids = np.concatenate([ids, eos])
        check_document(ids, vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.eos_token_id, where=where)
        counts["kept"] += 1
        encoded.append(ids)
        n_bytes = len(document.text.encode())
        for name, value in zip(_INDEX_ARRAYS, (len(ids), n_bytes, document.hash), strict=True):
            columns[name].append(value)
        names.append(document.id.encode())
    return np.concatenate(encoded) if encoded else np.zeros(0, TOKEN_DTYPE)


def _read_ahead(batches: Iterator[Batch], depth: int) -> Iterator[Batch]:
    """Read up to `depth` batches ahead in a thread: parsing goes on while the encoder works without the interpreter."""
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=depth)
    stopped = threading.Event()

    def put(item: Batch | BaseException | None) -> None:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
                break
            except queue.Full:
                continue

    def read() -> None:
        try:
            for batch in batches:
                put(batch)
                if stopped.is_set():
                    return
            put(None)
        except BaseException as error:  # raised where the batches are used
            put(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        thread.join()
