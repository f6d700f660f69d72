"""Stage 2, its tasks: filter a piece of raw text, then write what is left without the duplicates.

Filtering a piece needs nothing but the piece. Duplicates need the digests of all pieces of all sources (see `dedup`);
after that, each piece is written alone again. The filtered text between the two lies in state/ under a name that
holds its key, is only a saving, and is made again if it is gone.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shared_data.dedup import write_digests
from shared_data.executor import Result
from shared_data.files import atomic_writer
from shared_data.filters import content_digest, length_rule, normalise
from shared_data.links import share_file
from shared_data.records import Document, Fields, Span, document_of, json_library, parse_json_line, read_lines, text_of

HASH_DIGITS = 16


@dataclass(frozen=True)
class CleanRules:
    """What decides about a document of one source."""

    min_chars: int
    max_chars: int
    fields: Fields
    """Where the text is in a raw file that another program wrote; our own keep it in `text`."""
    n_hash_buckets: int


@dataclass(frozen=True)
class FilterSpan:
    """Filter one piece of raw text: writes the filtered text and the digests of its documents."""

    span: Span
    rules: CleanRules
    filtered: Path
    digests: Path

    def run(self) -> Result:
        """Write both files."""
        counts: Counter[str] = Counter()
        found: list[bytes] = []
        with atomic_writer(self.filtered) as file:
            for line, digest in filter_span(self.span, self.rules, counts):
                file.write(line)
                found.append(digest)
        write_digests(self.digests, found, self.rules.n_hash_buckets)
        return Result({self.digests: None}, counts)


@dataclass(frozen=True)
class WriteClean:
    """Write one clean part: the filtered piece without its duplicates."""

    filter: FilterSpan
    duplicates: np.ndarray
    """Line numbers in the filtered piece, sorted, int64."""
    output: Path

    def run(self) -> Result:
        """Write the part; a piece without duplicates is only given its new name."""
        if not self.filter.filtered.is_file():
            self.filter.run()
        counts: Counter[str] = Counter()
        if len(self.duplicates) == 0:
            share_file(self.filter.filtered, self.output, symbolic=False)
            counts["bytes"] = self.output.stat().st_size
            return Result({self.output: None}, counts)
        dropped = iter([*self.duplicates.tolist(), -1])
        next_dropped = next(dropped)
        digest = hashlib.sha256()
        with open(self.filter.filtered, "rb") as lines, atomic_writer(self.output) as file:
            for number, line in enumerate(lines):
                if number == next_dropped:
                    next_dropped = next(dropped)
                    continue
                digest.update(line)
                file.write(line)
                counts["bytes"] += len(line)
        counts["dropped.duplicate"] = len(self.duplicates)
        return Result({self.output: digest.hexdigest()}, counts)


def filter_span(span: Span, rules: CleanRules, counts: Counter[str]) -> Iterator[tuple[bytes, bytes]]:
    """(line of the clean file, digest) of each document kept; counts what is read, changed and dropped."""
    too_long_or_short = length_rule(rules.min_chars, rules.max_chars)
    dumps = json_library().dumps
    for document in read_raw(span, rules.fields):
        counts["read"] += 1
        counts.update({f"changed.{name}": count for name, count in (document.repairs or {}).items()})
        if document.text is None:
            counts[f"dropped.{document.reason}"] += 1
            continue
        cleaned = normalise(document.text)
        counts.update({f"changed.{name}": count for name, count in cleaned.changes.items()})
        if reason := too_long_or_short(cleaned.text):
            counts[f"dropped.{reason}"] += 1
            continue
        counts["kept"] += 1
        digest = content_digest(cleaned.text)
        record = {"id": document.id, "hash": digest.hex()[:HASH_DIGITS], "text": cleaned.text}
        yield dumps(record) + b"\n", digest


def read_raw(span: Span, fields: Fields) -> Iterator[Document]:
    """Documents of a piece of raw/SOURCE/data.jsonl, ours or another program's."""
    ours = Fields("text", None, "")
    for offset, line in read_lines(span):
        where = f"{span.name}@{offset}"
        try:
            record, repairs = parse_json_line(line)
        except (ValueError, RecursionError):
            yield Document(where, None, "bad_json")
            continue
        yield document_of(record, where, fields if text_of(record, fields) is not None else ours, repairs)
