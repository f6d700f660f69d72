"""What the quality rules look at: counts over one document's text.

`measure` counts with the compiled pass (see `measures_compiled`) where numba is installed (extra `fast`), and with the
plain functions below where it is not. Both give the same numbers: the plain version says what they mean, and the
tests compare the two.

    word        a maximal run of characters that are not white space (str.split)
    line        text between line feeds without the white space at its ends; blank ones do not count
    paragraph   lines with no blank line between them
    kept line   a line that C4's line rules leave
"""

import functools
import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

BULLETS = "•-"
ELLIPSIS = "…"
CLOSERS = "\"'”’»)]"
TERMINALS = ".!?…。．！？؟۔।॥።｡"
# Gopher's eight (Rae et al., 2021, appendix A.1.1).
STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
LOREM_IPSUM = "lorem ipsum"
# Lines that hold one of these are dropped by C4's reference code (Raffel et al., 2020).
LINE_PHRASES = (
    "javascript", "terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies",
)  # fmt: skip
TOP_NGRAMS = (2, 3, 4)
DUPLICATE_NGRAMS = (5, 6, 7, 8, 9, 10)


@dataclass(frozen=True)
class LineRules:
    """Which lines are dropped, as in C4; the defaults drop none."""

    max_word_chars: int | None = None
    """Drop lines with a longer word."""
    min_words: int | None = None
    """Drop lines with fewer words; blank lines stay, since they part paragraphs."""
    terminal_mark: bool = False
    """Drop lines that do not end in a terminal mark."""
    phrases: bool = False
    """Drop lines that hold one of LINE_PHRASES, in any case."""

    @property
    def any(self) -> bool:
        """Whether a line can be dropped at all."""
        return self != LineRules()


class Measures(NamedTuple):
    """Counts over one document. Characters are code points."""

    chars: int
    """Without white space at the ends."""
    words: int
    word_chars: int
    alpha_words: int
    """Words with at least one letter."""
    stop_words: int
    """Different ones of STOP_WORDS, in any case, what is not a letter at their ends left out."""
    hashes: int
    ellipses: int
    alnum_chars: int
    braces: int
    """Opening curly brackets."""
    lorem: int
    """1 if LOREM_IPSUM occurs."""
    lines: int
    line_chars: int
    max_line_chars: int
    bullet_lines: int
    ellipsis_lines: int
    duplicate_lines: int
    """Second and later ones of equal lines."""
    duplicate_line_chars: int
    paragraphs: int
    duplicate_paragraphs: int
    duplicate_paragraph_chars: int
    dropped_lines: int
    kept_words: int
    kept_chars: int
    kept_sentences: int
    """Words that end in a terminal mark, closing quotes and brackets left out; a line's end also ends a sentence."""
    kept_terminal_lines: int
    """Kept lines that end in a terminal mark, closing quotes and brackets left out."""
    kept_short_lines: int
    kept_duplicate_chars: int
    """Characters of second and later ones of equal kept lines."""
    top_ngram_chars: tuple[int, ...]
    """For TOP_NGRAMS: characters of the most frequent n-gram, times its count; 0 when none occurs twice."""
    duplicate_ngram_chars: tuple[int, ...]
    """For DUPLICATE_NGRAMS: characters of words in n-grams seen before, each word counted once."""

    @property
    def kept_lines(self) -> int:
        """Lines that are left."""
        return self.lines - self.dropped_lines


Measured = tuple[Measures, list[tuple[int, int]]]
"""The counts, and (start, end) of each dropped line with its line feed, in the text."""


def _duplicates(items: Sequence[str]) -> tuple[int, int]:
    """Number and characters of the second and later ones of equal items."""
    again = [item for item, count in Counter(items).items() for _ in range(count - 1)]
    return len(again), sum(map(len, again))


def _top_ngram_chars(words: Sequence[str], n: int) -> int:
    ngrams = Counter(" ".join(words[i : i + n]) for i in range(len(words) - n + 1))
    ngram, count = max(ngrams.items(), key=lambda item: item[1], default=("", 0))
    return len(ngram) * count if count > 1 else 0


def _duplicate_ngram_chars(words: Sequence[str], n: int) -> int:
    seen: set[tuple[str, ...]] = set()
    chars = place = 0
    while place <= len(words) - n:
        ngram = tuple(words[place : place + n])
        if ngram in seen:
            chars += sum(map(len, ngram))
            place += n
        else:
            seen.add(ngram)
            place += 1
    return chars


def _core(word: str) -> str:
    """A word from its first letter to its last, in small letters."""
    letters = [index for index, char in enumerate(word) if char.isalpha()]
    return word[letters[0] : letters[-1] + 1].lower() if letters else ""


def ends_sentence(text: str) -> bool:
    """Whether a text's last character, closing quotes and brackets left out, is a terminal mark."""
    return text.rstrip(CLOSERS)[-1:] in tuple(TERMINALS)


def _sentences(line: str) -> int:
    words = line.split()
    return sum(map(ends_sentence, words)) + (not ends_sentence(words[-1]))


def drops_line(line: str, rules: LineRules) -> bool:
    """Whether C4's line rules drop a line that is not blank."""
    words = line.split()
    return (
        (rules.max_word_chars is not None and max(map(len, words)) > rules.max_word_chars)
        or (rules.min_words is not None and len(words) < rules.min_words)
        or (rules.terminal_mark and not ends_sentence(line))
        or (rules.phrases and any(phrase in _small(line) for phrase in LINE_PHRASES))
    )


def _small(text: str) -> str:
    """Small letters, of A to Z only: text keeps its length."""
    return re.sub("[A-Z]+", lambda run: run[0].lower(), text)


def _lines_and_paragraphs(text: str) -> tuple[list[str], list[str]]:
    """Lines that are not empty, without the space around them, and the runs of them between empty ones."""
    lines = [line.strip() for line in text.split("\n")]
    runs = groupby(lines, key=bool)
    return [line for line in lines if line], ["\n".join(run) for is_text, run in runs if is_text]


def _kept_and_dropped(text: str, line_rules: LineRules) -> tuple[list[str], list[tuple[int, int]]]:
    """Lines that the rules keep, and where in the text those lie that they drop."""
    kept: list[str] = []
    dropped: list[tuple[int, int]] = []
    start = 0
    for whole in text.split("\n"):
        line, end = whole.strip(), min(start + len(whole) + 1, len(text))
        if line and drops_line(line, line_rules):
            dropped.append((start, end))
        elif line:
            kept.append(line)
        start = end
    return kept, dropped


def measure_plainly(text: str, line_rules: LineRules, short_line_chars: int) -> Measured:
    """`measure`, readable and slow."""
    words = text.split()
    lines, blocks = _lines_and_paragraphs(text)
    kept, dropped = _kept_and_dropped(text, line_rules)
    duplicate_lines, duplicate_line_chars = _duplicates(lines)
    duplicate_paragraphs, duplicate_paragraph_chars = _duplicates(blocks)
    measures = Measures(
        chars=len(text.strip()),
        words=len(words),
        word_chars=sum(map(len, words)),
        alpha_words=sum(any(char.isalpha() for char in word) for word in words),
        stop_words=len({_core(word) for word in words}.intersection(STOP_WORDS)),
        hashes=text.count("#"),
        ellipses=text.count("...") + text.count(ELLIPSIS),
        alnum_chars=sum(char.isalnum() for char in text),
        braces=text.count("{"),
        lorem=int(LOREM_IPSUM in _small(text)),
        lines=len(lines),
        line_chars=sum(map(len, lines)),
        max_line_chars=max(map(len, lines), default=0),
        bullet_lines=sum(line[0] in BULLETS for line in lines),
        ellipsis_lines=sum(line.endswith(("...", ELLIPSIS)) for line in lines),
        duplicate_lines=duplicate_lines,
        duplicate_line_chars=duplicate_line_chars,
        paragraphs=len(blocks),
        duplicate_paragraphs=duplicate_paragraphs,
        duplicate_paragraph_chars=duplicate_paragraph_chars,
        dropped_lines=len(dropped),
        kept_words=sum(len(line.split()) for line in kept),
        kept_chars=sum(map(len, kept)),
        kept_sentences=sum(map(_sentences, kept)),
        kept_terminal_lines=sum(map(ends_sentence, kept)),
        kept_short_lines=sum(len(line) <= short_line_chars for line in kept),
        kept_duplicate_chars=_duplicates(kept)[1],
        top_ngram_chars=tuple(_top_ngram_chars(words, n) for n in TOP_NGRAMS),
        duplicate_ngram_chars=tuple(_duplicate_ngram_chars(words, n) for n in DUPLICATE_NGRAMS),
    )
    return measures, dropped


Measurer = Callable[[str, LineRules, int], Measured]


def is_compiled() -> bool:
    """Whether `measure` uses the compiled pass."""
    return importlib.util.find_spec("numba") is not None


@functools.cache
def _measurer() -> Measurer:
    if not is_compiled():
        return measure_plainly
    from shared_data.measures_compiled import measure_compiled

    return measure_compiled


def prepare_measuring() -> str:
    """Load or compile the pass, once before workers need it; returns what is in use."""
    measure("", LineRules(), 1)
    if is_compiled():
        return "counted by the compiled pass"
    return "counted by plain functions; 40 times as fast with: pip install 'gpt-oss-lite[fast]'"


def measure(text: str, line_rules: LineRules, short_line_chars: int) -> Measured:
    """Count what the rules look at.

    Args:
        text: a document, without lone surrogates.
        line_rules: which lines C4's rules drop.
        short_line_chars: a kept line of at most this many characters is a short one.
    """
    return _measurer()(text, line_rules, short_line_chars)
