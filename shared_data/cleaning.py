"""Stage 2, its tasks: filter a piece of raw text, then write what is left without the duplicates.

Filtering a piece needs nothing but the piece. Duplicates need the digests of all pieces of all sources (see `dedup`);
after that, each piece is written alone again. The filtered text between the two lies in state/ under a name that
holds its key, is only a saving, and is made again if it is gone.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shared_data.config.quality import RuleSet
from shared_data.dedup import write_digests
from shared_data.executor import Result
from shared_data.files import atomic_writer
from shared_data.filters import content_digest, length_rule, normalise
from shared_data.links import share_file
from shared_data.near import Banding, Signer
from shared_data.records import (
    PLAIN,
    Document,
    Fields,
    Span,
    document_of,
    json_library,
    parse_json_line,
    read_lines,
    text_of,
)
from shared_data.rules import RuleSetCheck
from shared_data.screens import LanguageCheck, UrlCheck, contamination_check, redact_emails, redact_ips

HASH_DIGITS = 16


@dataclass(frozen=True)
class CleanRules:
    """What decides about a document of one source."""

    min_chars: int
    max_chars: int
    fields: Fields
    """Where the text is: in `text` of our own raw files; in another program's, there or where the source says."""
    n_hash_buckets: int
    rules: RuleSet | None = None
    """Quality rules; None: none."""
    language: str | None = None
    """Code of the language kept; None: all are."""
    min_language_score: float = 0.0
    redact_emails: bool = False
    redact_ips: bool = False
    blocked_urls: Path | None = None
    test_sets: tuple[tuple[str, tuple[Path, ...]], ...] = ()
    """Name and files of each evaluation's test set that documents must not overlap with."""
    test_ngram_words: int = 13
    banding: Banding | None = None
    """How near duplicates are looked for; None: they are not."""

    def files(self) -> list[Path]:
        """The files that the outcome depends on."""
        blocked = [self.blocked_urls] if self.blocked_urls else []
        return [*blocked, *(path for _, paths in self.test_sets for path in paths)]

    def about(self, sha256: Mapping[Path, str]) -> dict[str, Any]:
        """All that the outcome depends on, as plain values: files by their hashes."""
        return {
            **vars(self),
            "fields": vars(self.fields),
            "rules": self.rules and self.rules.model_dump(),
            "banding": self.banding and vars(self.banding),
            "blocked_urls": self.blocked_urls and sha256[self.blocked_urls],
            "test_sets": [[name, [sha256[path] for path in paths]] for name, paths in self.test_sets],
        }


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
        digests: list[bytes] = []
        banding = self.rules.banding
        sign, bands = Signer(banding) if banding else None, [np.zeros((0, banding.bands if banding else 0), np.uint64)]
        with atomic_writer(self.filtered) as file:
            for kept in filter_span(self.span, self.rules, counts):
                file.write(kept.line)
                digests.append(kept.digest)
                if sign:
                    bands.append(sign(kept.text)[None])
        write_digests(self.digests, digests, self.rules.n_hash_buckets, np.concatenate(bands) if sign else None)
        return Result({self.digests: None}, counts)


@dataclass(frozen=True)
class WriteClean:
    """Write one clean part: the filtered piece without its duplicates."""

    filter: FilterSpan
    duplicates: np.ndarray
    """Line numbers in the filtered piece, sorted, int64."""
    near_duplicates: np.ndarray
    """The same of documents that are near others, and equal to none."""
    output: Path

    def run(self) -> Result:
        """Write the part; a piece without duplicates is only given its new name."""
        if not self.filter.filtered.is_file():
            self.filter.run()
        counts: Counter[str] = Counter()
        dropped_lines = np.union1d(self.duplicates, self.near_duplicates)
        if len(dropped_lines) == 0:
            share_file(self.filter.filtered, self.output, symbolic=False)
            counts["bytes"] = self.output.stat().st_size
            return Result({self.output: None}, counts)
        dropped = iter([*dropped_lines.tolist(), -1])
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
        for reason, found in (("duplicate", self.duplicates), ("near_duplicate", self.near_duplicates)):
            if len(found):
                counts[f"dropped.{reason}"] = len(found)
        return Result({self.output: digest.hexdigest()}, counts)


@dataclass(frozen=True)
class Kept:
    """A document that passed."""

    text: str
    line: bytes
    """Its line in the clean file."""
    digest: bytes


class Cleaner:
    """All that is done to one document of a source, ready to be done to many."""

    def __init__(self, rules: CleanRules) -> None:
        self._length = length_rule(rules.min_chars, rules.max_chars)
        self._url = UrlCheck(rules.blocked_urls) if rules.blocked_urls else None
        self._judge = RuleSetCheck(rules.rules) if rules.rules else None
        self._checks: list[Callable[[str], str | None]] = [self._length]
        if rules.language:
            self._checks.append(LanguageCheck(rules.language, rules.min_language_score))
        self._overlaps = contamination_check(rules.test_sets, rules.test_ngram_words) if rules.test_sets else None
        self._redactions = [
            (name, redact)
            for name, redact, wanted in (
                ("emails_redacted", redact_emails, rules.redact_emails),
                ("ips_redacted", redact_ips, rules.redact_ips),
            )
            if wanted
        ]

    def __call__(self, document: Document, counts: Counter[str]) -> tuple[str, str | None]:
        """The clean text, and the reason for which it is dropped or None; counts what is changed."""
        if document.text is None:
            return "", document.reason
        if self._url and document.url and (reason := self._url(document.url)):
            return "", reason
        text, changes = normalise(document.text)
        for check in self._checks:
            if reason := check(text):
                return text, reason
        if self._judge:
            text, reason, n_lines = self._judge(text)
            if n_lines:
                changes["lines_dropped"] = n_lines
                reason = reason or self._length(text)
            if reason:
                return text, reason
        if self._overlaps and (reason := self._overlaps(text)):
            return text, reason
        for name, redact in self._redactions:
            text, changes[name] = redact(text)
        counts.update({f"changed.{name}": count for name, count in changes.items() if count})
        return text, None


def filter_span(span: Span, rules: CleanRules, counts: Counter[str]) -> Iterator[Kept]:
    """The documents of a piece that pass; counts what is read, changed and dropped."""
    clean = Cleaner(rules)
    dumps = json_library().dumps
    for document in read_raw(span, rules.fields):
        counts["read"] += 1
        for name, count in (document.repairs or {}).items():
            counts[f"changed.{name}"] += count
        text, reason = clean(document, counts)
        if reason:
            counts[f"dropped.{reason}"] += 1
            continue
        counts["kept"] += 1
        digest = content_digest(text)
        record = {"id": document.id, "hash": digest.hex()[:HASH_DIGITS], "text": text}
        yield Kept(text, dumps(record) + b"\n", digest)


def read_raw(span: Span, fields: Fields) -> Iterator[Document]:
    """Documents of a piece of raw/SOURCE/data.jsonl, ours or another program's."""
    for offset, line in read_lines(span):
        where = f"{span.name}@{offset}"
        try:
            record, repairs = parse_json_line(line)
        except (ValueError, RecursionError):
            yield Document(where, None, "bad_json")
            continue
        yield document_of(record, where, fields if text_of(record, fields) is not None else PLAIN, repairs)
