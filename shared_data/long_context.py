"""The long-context share: windows of exactly `window_tokens` that hold whole documents, and a passkey in what is left.

A window belongs to one source, which is charged for all of it. Documents are placed best-fit decreasing (Ding et al.,
2024, "Fewer Truncations Improve Language Modeling"): the longest first, each into the fullest window that can take it
and keep room for two inserts, documents of their own: one that tells a key, before a document of the window, and one
that asks for it, at the window's end. Only a document that fills a window alone leaves none.
"""

import functools
import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from shared_data.passkeys import ANSWER, FILLER, NEEDLE, QUESTION, training_keys
from shared_data.tokenizer import Tokenizer

# The sentences have at most 59 bytes and the EOS follows: 64 tokens are enough for any byte-level tokenizer.
INSERT_TOKENS = 64
# A window with less text is no example of long context: its documents go to the other shards.
LEAST_TEXT = Fraction(3, 4)


def window_counts(weights: Sequence[Fraction], share: float, window_tokens: int, total_tokens: int) -> list[int]:
    """Windows that each source may have: its weight of the long-context share, rounded down."""
    return [math.floor(weight * Fraction(str(share)) * total_tokens / window_tokens) for weight in weights]


def pack_windows(lengths: np.ndarray, count: int, window_tokens: int) -> list[np.ndarray]:
    """Pack documents into windows, best-fit decreasing.

    Args:
        lengths: tokens of a source's documents in their order, (N,). The first ones that are enough are used.
        count: windows wanted.
        window_tokens: size of a window.

    Returns:
        for each window the places of its documents in `lengths`, rising; at most `count` windows. The windows are in
        the order of their longest document's place. What is left of each is at least 2 * INSERT_TOKENS, or 0 where one
        document fills it.
    """
    fits = np.flatnonzero((lengths == window_tokens) | (lengths <= window_tokens - 2 * INSERT_TOKENS))
    enough = int(np.searchsorted(np.cumsum(lengths[fits]), count * window_tokens)) + 1
    pool = fits[:enough]
    count = min(count, int(lengths[pool].sum()) // window_tokens)
    windows = _best_fit(lengths, pool[np.argsort(-lengths[pool], kind="stable")].tolist(), count, window_tokens)
    least = LEAST_TEXT * window_tokens
    good = [window for window in windows if lengths[window].sum() >= least]
    return [np.sort(np.array(window, np.int64)) for window in sorted(good)]


def _best_fit(lengths: np.ndarray, places: list[int], count: int, window_tokens: int) -> list[list[int]]:
    """Windows with the places of their documents, the longest first. A document that fits nowhere is left out."""
    windows: list[list[int]] = []
    by_room: dict[int, list[int]] = defaultdict(list)
    rooms = 0  # bit r is set where a window has room for r tokens
    for place in places:
        length = int(lengths[place])
        room = _smallest(rooms, length + 2 * INSERT_TOKENS)
        if room is not None:
            window = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
            windows[window].append(place)
        elif len(windows) < count:
            window, room = len(windows), window_tokens
            windows.append([place])
        else:
            continue
        by_room[room - length].append(window)
        rooms |= 1 << (room - length)
    return windows


def _smallest(rooms: int, at_least: int) -> int | None:
    """The smallest number of set bit that is not below `at_least`."""
    above = rooms >> at_least
    return at_least + (above & -above).bit_length() - 1 if above else None


@dataclass(frozen=True)
class Insert:
    """A document that tells a key or asks for it, of a given length in tokens, EOS included."""

    key: int
    asks: bool
    n_tokens: int

    @property
    def code(self) -> int:
        """Key and kind in one number, as a plan keeps it."""
        return 2 * self.key + self.asks

    @classmethod
    def of_code(cls, code: int, n_tokens: int) -> "Insert":
        """The insert of a code."""
        return cls(code // 2, bool(code % 2), n_tokens)

    def ids(self, tokenizer: Tokenizer) -> np.ndarray:
        """Filler, the sentences, EOS: exactly n_tokens, uint32."""
        sentences = _sentence_ids(tokenizer, self.key, self.asks)
        return np.array([*_filler(tokenizer, self._room(sentences)), *sentences, tokenizer.eos_token_id], np.uint32)

    def n_bytes(self, tokenizer: Tokenizer) -> int:
        """UTF-8 bytes of its text."""
        sentences = _sentence_ids(tokenizer, self.key, self.asks)
        return _filler_bytes(tokenizer, self._room(sentences)) + len(tokenizer.decode(sentences).encode())

    def _room(self, sentences: Sequence[int]) -> int:
        room = self.n_tokens - len(sentences) - 1
        assert room >= 0, "an insert is never planned shorter than INSERT_TOKENS"
        return room


def _sentence_ids(tokenizer: Tokenizer, key: int, asks: bool) -> list[int]:
    return tokenizer.encode((QUESTION + ANSWER if asks else NEEDLE).format(key=key))


@functools.lru_cache(maxsize=8)
def _filler_once(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(FILLER)


def _filler(tokenizer: Tokenizer, n_tokens: int) -> list[int]:
    """Filler of so many tokens: its end, so that whole sentences come before the key."""
    once = _filler_once(tokenizer)
    return (once * (n_tokens // len(once) + 1))[-n_tokens:] if n_tokens else []


@functools.lru_cache(maxsize=1 << 14)
def _filler_bytes(tokenizer: Tokenizer, n_tokens: int) -> int:
    return len(tokenizer.decode(_filler(tokenizer, n_tokens)).encode())


def window_inserts(gap: int, n_documents: int, seed: int, source: str, window: int) -> tuple[Insert, Insert, int]:
    """The two inserts of a window, and the place of the first: before that many of its documents.

    Key and place are a function of seed, source and the window's number.
    """
    digest = hashlib.sha256(f"passkey/{seed}/{source}/{window}".encode()).digest()
    keys = training_keys()
    key = keys[int.from_bytes(digest[:8], "little") % len(keys)]
    place = int.from_bytes(digest[8:16], "little") % n_documents
    return Insert(key, False, gap - gap // 2), Insert(key, True, gap // 2), place
