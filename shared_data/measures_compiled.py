"""`measures.measure` in one compiled pass (numba): the same counts, some twenty times faster.

Three passes of falling size: over the characters (words, lines, phrases), over the lines and paragraphs, and over the
n-grams. An n-gram that occurs twice holds an (n-1)-gram that does, so that the pass for n only looks where the pass for
n - 1 found something: the six passes for 5 to 10 are nearly free in text that does not repeat itself.

Words, lines and n-grams are compared by 64-bit hashes. Needs numba (extra `fast`); its compiled code is kept beside
this file or, where that cannot be written, in the user's cache.
"""

from dataclasses import dataclass, field

import numba
import numpy as np

from shared_data.measures import (
    BULLETS,
    CLOSERS,
    DUPLICATE_NGRAMS,
    LINE_PHRASES,
    LOREM_IPSUM,
    STOP_WORDS,
    TERMINALS,
    TOP_NGRAMS,
    LineRules,
    Measured,
    Measures,
)

_ALPHA, _ALNUM, _SPACE, _TERMINAL, _CLOSER, _BULLET, _PHRASE = 1, 2, 4, 8, 16, 32, 64
_N_COUNTS = len(Measures._fields) - 2
_N_NGRAMS = len(TOP_NGRAMS) + len(DUPLICATE_NGRAMS)
_PRIME = np.uint64(0x100000001B3)
_BASIS = np.uint64(0xCBF29CE484222325)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_LF, _DOT, _HASH, _BRACE, _ELLIPSIS = 10, ord("."), ord("#"), ord("{"), ord("…")
(_CHARS, _WORDS, _WORD_CHARS, _ALPHA_WORDS, _STOP_WORDS, _HASHES, _ELLIPSES, _ALNUM_CHARS, _BRACES, _LOREM, _LINES,
 _LINE_CHARS, _MAX_LINE_CHARS, _BULLET_LINES, _ELLIPSIS_LINES, _DUP_LINES, _DUP_LINE_CHARS, _PARAGRAPHS,
 _DUP_PARAGRAPHS, _DUP_PARAGRAPH_CHARS, _DROPPED_LINES, _KEPT_WORDS, _KEPT_CHARS, _KEPT_SENTENCES, _KEPT_TERMINAL,
 _KEPT_SHORT, _KEPT_DUP_CHARS) = range(_N_COUNTS)  # fmt: skip


def _character_classes() -> np.ndarray:
    """What each code point is, as Python's str says: uint8 of bits, one per code point."""
    points = np.arange(0x110000, dtype="<u4")
    text = points.view("<U1")
    classes = np.char.isalpha(text) * np.uint8(_ALPHA) + np.char.isalnum(text) * np.uint8(_ALNUM)
    classes += np.char.isspace(text) * np.uint8(_SPACE)
    first_letters = {phrase[0] for phrase in (LOREM_IPSUM, *LINE_PHRASES)}
    first_letters |= {letter.upper() for letter in first_letters}
    for bit, chars in ((_TERMINAL, TERMINALS), (_CLOSER, CLOSERS), (_BULLET, BULLETS), (_PHRASE, first_letters)):
        for char in chars:
            classes[ord(char)] |= bit
    return classes


def _packed(texts: tuple[str, ...]) -> np.ndarray:
    """Short texts as rows of code points, each after its length: int64 (len(texts), longest + 1)."""
    rows = np.zeros((len(texts), max(map(len, texts)) + 1), np.int64)
    for row, text in zip(rows, texts, strict=True):
        row[0] = len(text)
        row[1 : len(text) + 1] = [ord(char) for char in text]
    return rows


@dataclass
class _Workspace:
    """Arrays that documents share one after the other, so that memory is that of the longest."""

    size: int = 0
    words: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.uint64))
    """Per word: hash, length, hash of the n-gram that starts there."""
    lines: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.uint64))
    """Per line: hash, characters, start, end (with line feed), kept or not; and hash, characters of paragraphs."""
    places: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    """Per place: candidates, first equal one, count, level up to which it repeats; then the slots of the hash table."""

    def fit(self, n_chars: int) -> None:
        """Make room for a document: at most every second character begins a word or a line."""
        rows = n_chars // 2 + 2
        if rows > self.size:
            self.size = max(4096, 1 << (rows - 1).bit_length())
            self.words = np.zeros((3, self.size), np.uint64)
            self.lines = np.zeros((7, self.size), np.uint64)
            self.places = np.zeros((8, self.size), np.int32)


_WORKSPACE = _Workspace()
_CLASSES = _character_classes()
_STOPS = _packed(STOP_WORDS)
_PHRASES = _packed((LOREM_IPSUM, *LINE_PHRASES))


def measure_compiled(text: str, line_rules: LineRules, short_line_chars: int) -> Measured:
    """See `measures.measure`."""
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    _WORKSPACE.fit(len(points))
    counts = np.zeros(_N_COUNTS + _N_NGRAMS, np.int64)
    rules = (
        line_rules.max_word_chars if line_rules.max_word_chars is not None else len(points),
        line_rules.min_words or 0,
        line_rules.terminal_mark,
        line_rules.phrases,
    )
    work = (_WORKSPACE.words, _WORKSPACE.lines, _WORKSPACE.places)
    _measure(points, _CLASSES, _STOPS, _PHRASES, rules, short_line_chars, *work, counts)
    values = counts.tolist()
    top, rest = _N_COUNTS, _N_COUNTS + len(TOP_NGRAMS)
    measures = Measures._make([*values[:top], tuple(values[top:rest]), tuple(values[rest:])])
    dropped: list[tuple[int, int]] = []
    if measures.dropped_lines:
        bounds = _WORKSPACE.lines[2:5, : measures.lines]
        begins, ends, _ = bounds[:, bounds[2] == 0].tolist()
        dropped = list(zip(begins, ends, strict=True))
    return measures, dropped


@numba.njit(cache=True, inline="always")
def _lower(point):  # type: ignore[no-untyped-def]
    return point + 32 if 65 <= point <= 90 else point


@numba.njit(cache=True)
def _holds(points, place, phrase):  # type: ignore[no-untyped-def]
    """Whether a phrase stands at `place`, in any case."""
    if place + phrase[0] > len(points):
        return False
    for offset in range(phrase[0]):  # noqa: SIM110 (numba has no all())
        if _lower(points[place + offset]) != phrase[offset + 1]:
            return False
    return True


@numba.njit(cache=True)
def _stop_word(points, classes, begin, end, stops):  # type: ignore[no-untyped-def]
    """The bit of the stop word that a word is, 0 for another."""
    while begin < end and not classes[points[begin]] & _ALPHA:
        begin += 1
    while end > begin and not classes[points[end - 1]] & _ALPHA:
        end -= 1
    for index in range(len(stops)):
        if stops[index, 0] == end - begin and _holds(points, begin, stops[index]):
            return 1 << index
    return 0


@numba.njit(cache=True)
def _group(hashes, candidates, n, first, counts, slots):  # type: ignore[no-untyped-def]
    """Group equal hashes: first[k] is the first of the n candidates equal to the k-th, counts[first] their number."""
    size = 16
    while size < 2 * n:
        size *= 2
    mask = np.uint64(size - 1)
    slots[:size] = 0
    for k in range(n):
        value = hashes[candidates[k]]
        counts[k] = 0
        slot = (value * _MIX) >> np.uint64(32) & mask
        while True:
            found = slots[slot]
            if found == 0:
                slots[slot] = k + 1
                first[k] = k
                counts[k] = 1
                break
            if hashes[candidates[found - 1]] == value:
                first[k] = found - 1
                counts[found - 1] += 1
                break
            slot = (slot + np.uint64(1)) & mask


@numba.njit(cache=True)
def _repeated(hashes, chars, candidates, n, first, counts, slots):  # type: ignore[no-untyped-def]
    """Number and characters of the second and later ones among the candidates' equals."""
    _group(hashes, candidates, n, first, counts, slots)
    number = total = 0
    for k in range(n):
        if first[k] != k:
            number += 1
            total += np.int64(chars[candidates[k]])
    return number, total


@numba.njit(cache=True)
def _ngrams(words, n_words, places, slots, counts):  # type: ignore[no-untyped-def]
    """The n-gram measures, from 2 words to 10."""
    hashes, lengths, grams = words[0], words[1], words[2]
    candidates, first, number, level = places[0], places[1], places[2], places[3]
    n_candidates = max(n_words - 1, 0)
    level[: n_words + 1] = 1
    for k in range(n_candidates):
        candidates[k] = k
        grams[k] = hashes[k]
    for n in range(2, 11):
        left = 0
        for k in range(n_candidates):
            place = candidates[k]
            if place + n <= n_words and level[place] >= n - 1 and level[place + 1] >= n - 1:
                grams[place] = (grams[place] * _PRIME + hashes[place + n - 1]) * _MIX
                candidates[left] = place
                left += 1
        n_candidates = left
        if n_candidates == 0:
            break
        _group(grams, candidates, n_candidates, first, number, slots)
        best = 0
        for k in range(n_candidates):
            if number[first[k]] > 1:
                level[candidates[k]] = n
            if number[k] > number[best]:
                best = k
        if n <= 4:
            if number[best] > 1:
                chars = n - 1
                for word in range(candidates[best], candidates[best] + n):
                    chars += np.int64(lengths[word])
                counts[_N_COUNTS + n - 2] = chars * number[best]
            continue
        following, chars = 0, 0
        for k in range(n_candidates):
            place = candidates[k]
            if place < following:
                continue
            if number[first[k]] < 0:  # a negative count: met before, and not passed over
                for word in range(place, place + n):
                    chars += np.int64(lengths[word])
                following = place + n
            else:
                number[first[k]] = -number[first[k]]
        counts[_N_COUNTS + n - 2] = chars


@numba.njit(cache=True)
def _measure(points, classes, stops, phrases, rules, short_line_chars, words, lines, places, counts):  # type: ignore[no-untyped-def]
    """The pass over the characters; fills `counts` and the rows of `lines`."""
    max_word_chars, min_words, terminal_mark, phrase_rule = rules
    n_points = len(points)
    n_words = n_lines = n_paragraphs = stop_bits = dots = 0
    word_hash, line_hash, line_hash_to_end, paragraph_hash = _BASIS, _BASIS, _BASIS, _BASIS
    word_begin = line_begin = first_char = last_char = -1
    line_begin = 0
    line_words = line_terminals = longest = 0
    alpha = phrase = False
    core = np.uint32(0)  # the last character that is no closing quote or bracket, of a word
    text_begin = text_end = -1
    paragraph_chars, after_blank = 0, True
    for i in range(n_points + 1):
        point = points[i] if i < n_points else np.uint32(_LF)
        kind = classes[point]
        if not kind & _SPACE:
            if word_begin < 0:
                word_begin, word_hash, alpha, core = i, _BASIS, False, np.uint32(0)
                if first_char < 0:
                    first_char = i
            word_hash = (word_hash ^ np.uint64(point)) * _PRIME
            line_hash = (line_hash ^ np.uint64(point)) * _PRIME
            line_hash_to_end = line_hash
            last_char = i
            if kind & _ALNUM:
                counts[_ALNUM_CHARS] += 1
                if kind & _ALPHA:
                    alpha = True
                if kind & _PHRASE:
                    for index in range(len(phrases)):
                        if _lower(point) == phrases[index, 1] and _holds(points, i, phrases[index]):
                            if index == 0:
                                counts[_LOREM] = 1
                            else:
                                phrase = True
            elif point == _HASH:
                counts[_HASHES] += 1
            elif point == _BRACE:
                counts[_BRACES] += 1
            elif point == _ELLIPSIS:
                counts[_ELLIPSES] += 1
            if not kind & _CLOSER:
                core = point
            if point == _DOT:
                dots += 1
                if dots == 3:
                    counts[_ELLIPSES] += 1
                    dots = 0
            else:
                dots = 0
            continue
        dots = 0
        if word_begin >= 0:
            length = i - word_begin
            words[0, n_words], words[1, n_words] = word_hash, length
            n_words += 1
            line_words += 1
            counts[_WORD_CHARS] += length
            counts[_ALPHA_WORDS] += alpha
            if length > longest:
                longest = length
            if classes[core] & _TERMINAL:
                line_terminals += 1
            if stop_bits != 255 and alpha:
                stop_bits |= _stop_word(points, classes, word_begin, i, stops)
            word_begin = -1
        if point != _LF:
            if first_char >= 0:
                line_hash = (line_hash ^ np.uint64(point)) * _PRIME
            continue
        if first_char < 0:
            after_blank = True
        else:
            chars = last_char + 1 - first_char
            if text_begin < 0:
                text_begin = first_char
            text_end = last_char + 1
            terminal = _line_ends_sentence(points, classes, first_char, last_char)
            drop = (
                longest > max_word_chars
                or line_words < min_words
                or (terminal_mark and not terminal)
                or (phrase_rule and phrase)
            )
            lines[0, n_lines], lines[1, n_lines] = line_hash_to_end, chars
            lines[2, n_lines], lines[3, n_lines] = line_begin, min(i + 1, n_points)
            lines[4, n_lines] = not drop
            n_lines += 1
            counts[_LINE_CHARS] += chars
            counts[_MAX_LINE_CHARS] = max(counts[_MAX_LINE_CHARS], chars)
            counts[_BULLET_LINES] += (classes[points[first_char]] & _BULLET) != 0
            counts[_ELLIPSIS_LINES] += points[last_char] == _ELLIPSIS or (
                chars >= 3 and points[last_char] == points[last_char - 1] == points[last_char - 2] == _DOT
            )
            if drop:
                counts[_DROPPED_LINES] += 1
            else:
                counts[_KEPT_WORDS] += line_words
                counts[_KEPT_CHARS] += chars
                counts[_KEPT_SENTENCES] += line_terminals + (not classes[core] & _TERMINAL)
                counts[_KEPT_TERMINAL] += terminal
                counts[_KEPT_SHORT] += chars <= short_line_chars
            if after_blank:
                n_paragraphs += 1
                paragraph_hash, paragraph_chars = _BASIS, -1
            paragraph_hash = ((paragraph_hash ^ line_hash_to_end) * _PRIME) * _MIX
            paragraph_chars += chars + 1
            lines[5, n_paragraphs - 1], lines[6, n_paragraphs - 1] = paragraph_hash, paragraph_chars
            after_blank = False
        line_begin, first_char, last_char, line_hash = i + 1, -1, -1, _BASIS
        line_words = line_terminals = longest = 0
        phrase = False
    counts[_CHARS] = text_end - text_begin
    counts[_WORDS] = n_words
    for bit in range(len(stops)):
        counts[_STOP_WORDS] += (stop_bits >> bit) & 1
    counts[_LINES], counts[_PARAGRAPHS] = n_lines, n_paragraphs
    candidates, first, number, slots = places[0], places[1], places[2], places[4:].reshape(-1)
    for k in range(max(n_lines, n_paragraphs)):
        candidates[k] = k
    repeated = _repeated(lines[0], lines[1], candidates, n_lines, first, number, slots)
    counts[_DUP_LINES], counts[_DUP_LINE_CHARS] = repeated
    repeated = _repeated(lines[5], lines[6], candidates, n_paragraphs, first, number, slots)
    counts[_DUP_PARAGRAPHS], counts[_DUP_PARAGRAPH_CHARS] = repeated
    counts[_KEPT_DUP_CHARS] = counts[_DUP_LINE_CHARS]
    if counts[_DROPPED_LINES]:
        kept = 0
        for k in range(n_lines):
            if lines[4, k]:
                candidates[kept] = k
                kept += 1
        counts[_KEPT_DUP_CHARS] = _repeated(lines[0], lines[1], candidates, kept, first, number, slots)[1]
    _ngrams(words, n_words, places, slots, counts)


@numba.njit(cache=True)
def _line_ends_sentence(points, classes, first, last):  # type: ignore[no-untyped-def]
    while last >= first and classes[points[last]] & _CLOSER:
        last -= 1
    return last >= first and (classes[points[last]] & _TERMINAL) != 0
