"""The quality rules. A rule is a small function that returns the reason for which a document is dropped, or None.

A rule gets what `measures.measure` counted and its group's limits (`config.quality`, where each is explained with its
source). `RuleSetCheck` asks the rules of a set in their order; the first reason stands.
"""

from collections.abc import Callable, Iterator
from typing import Any

from shared_data.config.quality import C4, Code, FineWeb, GopherQuality, GopherRepetition, RuleSet
from shared_data.measures import DUPLICATE_NGRAMS, TOP_NGRAMS, LineRules, Measures, measure


def _over(value: float, of: float, limit: float | None) -> bool:
    """Whether value / of is above a limit; never where the limit is off or there is nothing to divide by."""
    return limit is not None and of > 0 and value > limit * of


def _under(value: float, of: float, limit: float | None) -> bool:
    return limit is not None and of > 0 and value < limit * of


def gopher_word_count(found: Measures, limits: GopherQuality) -> str | None:
    """Too few or too many words."""
    if limits.min_words is not None and found.words < limits.min_words:
        return "gopher_few_words"
    return "gopher_many_words" if limits.max_words is not None and found.words > limits.max_words else None


def gopher_word_length(found: Measures, limits: GopherQuality) -> str | None:
    """Words that are too short or too long on average."""
    if _under(found.word_chars, found.words, limits.min_mean_word_chars):
        return "gopher_short_words"
    return "gopher_long_words" if _over(found.word_chars, found.words, limits.max_mean_word_chars) else None


def gopher_symbols(found: Measures, limits: GopherQuality) -> str | None:
    """Too many number signs or ellipses for so many words."""
    if _over(found.hashes, found.words, limits.max_hashes_per_word):
        return "gopher_hashes"
    return "gopher_ellipses" if _over(found.ellipses, found.words, limits.max_ellipses_per_word) else None


def gopher_lines(found: Measures, limits: GopherQuality) -> str | None:
    """Too many lines that begin with a bullet or end with an ellipsis."""
    if _over(found.bullet_lines, found.lines, limits.max_bullet_lines):
        return "gopher_bullets"
    return "gopher_ellipsis_lines" if _over(found.ellipsis_lines, found.lines, limits.max_ellipsis_lines) else None


def gopher_letters(found: Measures, limits: GopherQuality) -> str | None:
    """Too few words with a letter in them."""
    return "gopher_no_letters" if _under(found.alpha_words, found.words, limits.min_alpha_words) else None


def gopher_stop_words(found: Measures, limits: GopherQuality) -> str | None:
    """Too few of the most frequent English words."""
    few = limits.min_stop_words is not None and found.stop_words < limits.min_stop_words
    return "gopher_stop_words" if few else None


def repeated_paragraphs(found: Measures, limits: GopherRepetition) -> str | None:
    """Too many paragraphs, or characters in them, that were there before."""
    if _over(found.duplicate_paragraphs, found.paragraphs, limits.max_duplicate_paragraphs):
        return "repeated_paragraphs"
    if _over(found.duplicate_paragraph_chars, found.chars, limits.max_duplicate_paragraph_chars):
        return "repeated_paragraph_chars"
    return None


def repeated_lines(found: Measures, limits: GopherRepetition) -> str | None:
    """Too many lines, or characters in them, that were there before."""
    if _over(found.duplicate_lines, found.lines, limits.max_duplicate_lines):
        return "repeated_lines"
    over = _over(found.duplicate_line_chars, found.chars, limits.max_duplicate_line_chars)
    return "repeated_line_chars" if over else None


def top_ngrams(found: Measures, limits: GopherRepetition) -> str | None:
    """The most frequent n-gram of words makes up too much of the text."""
    for n, chars, limit in zip(TOP_NGRAMS, found.top_ngram_chars, limits.max_top_ngram_chars or (), strict=False):
        if _over(chars, found.chars, limit):
            return f"top_{n}_gram"
    return None


def repeated_ngrams(found: Measures, limits: GopherRepetition) -> str | None:
    """N-grams of words that were there before make up too much of the text."""
    shares = limits.max_duplicate_ngram_chars or ()
    for n, chars, limit in zip(DUPLICATE_NGRAMS, found.duplicate_ngram_chars, shares, strict=False):
        if _over(chars, found.chars, limit):
            return f"repeated_{n}_grams"
    return None


def c4_lorem_ipsum(found: Measures, limits: C4) -> str | None:
    """Placeholder text."""
    return "c4_lorem_ipsum" if limits.lorem_ipsum and found.lorem else None


def c4_curly_brackets(found: Measures, limits: C4) -> str | None:
    """A curly bracket: more likely code than prose."""
    return "c4_curly_bracket" if limits.curly_brackets and found.braces else None


def c4_sentences(found: Measures, limits: C4) -> str | None:
    """Too few sentences in the lines that C4 keeps."""
    few = limits.min_sentences is not None and found.kept_sentences < limits.min_sentences
    return "c4_few_sentences" if few else None


def fineweb_terminal_lines(found: Measures, limits: FineWeb) -> str | None:
    """Too few lines that end in a terminal mark."""
    under = _under(found.kept_terminal_lines, found.kept_lines, limits.min_terminal_lines)
    return "fineweb_few_terminal_marks" if under else None


def fineweb_short_lines(found: Measures, limits: FineWeb) -> str | None:
    """Too many short lines."""
    return "fineweb_short_lines" if _over(found.kept_short_lines, found.kept_lines, limits.max_short_lines) else None


def fineweb_repeated_lines(found: Measures, limits: FineWeb) -> str | None:
    """Too many characters in lines that were there before."""
    over = _over(found.kept_duplicate_chars, found.kept_chars, limits.max_duplicate_line_chars)
    return "fineweb_repeated_lines" if over else None


def fineweb_line_ends(found: Measures, limits: FineWeb) -> str | None:
    """Too many line ends for so many words: a list."""
    over = _over(found.kept_lines - 1, found.kept_words, limits.max_line_ends_per_word)
    return "fineweb_many_line_ends" if over else None


def code_line_length(found: Measures, limits: Code) -> str | None:
    """A line, or the mean line, that is too long: data or minified code."""
    if limits.max_line_chars is not None and found.max_line_chars > limits.max_line_chars:
        return "code_long_line"
    return "code_long_lines" if _over(found.line_chars, found.lines, limits.max_mean_line_chars) else None


def code_alphanumeric(found: Measures, limits: Code) -> str | None:
    """Too few letters and digits."""
    return "code_few_letters" if _under(found.alnum_chars, found.chars, limits.min_alnum_chars) else None


def code_repeated_lines(found: Measures, limits: Code) -> str | None:
    """Too many characters in lines that were there before."""
    over = _over(found.duplicate_line_chars, found.chars, limits.max_duplicate_line_chars)
    return "code_repeated_lines" if over else None


def code_generated(text: str, limits: Code) -> str | None:
    """The one rule that reads the text itself: its first lines only."""
    head = "\n".join(text[: 400 * limits.generated_lines].split("\n", limits.generated_lines)[: limits.generated_lines])
    head = head.lower()
    return "code_generated" if any(mark.lower() in head for mark in limits.generated_marks) else None


_GROUPS: dict[str, tuple[Callable[[Measures, Any], str | None], ...]] = {
    "gopher_repetition": (repeated_paragraphs, repeated_lines, top_ngrams, repeated_ngrams),
    "gopher_quality": (
        gopher_word_count, gopher_word_length, gopher_symbols, gopher_lines, gopher_letters, gopher_stop_words,
    ),
    "c4": (c4_lorem_ipsum, c4_curly_brackets, c4_sentences),
    "fineweb": (fineweb_terminal_lines, fineweb_short_lines, fineweb_repeated_lines, fineweb_line_ends),
    "code": (code_line_length, code_alphanumeric, code_repeated_lines),
}  # fmt: skip


class RuleSetCheck:
    """A rule set, ready to judge documents."""

    def __init__(self, rules: RuleSet) -> None:
        c4, self._code = rules.c4, rules.code
        self._lines = (
            LineRules(c4.max_word_chars, c4.min_words_per_line, c4.terminal_mark, c4.phrases) if c4 else LineRules()
        )
        self._short_line_chars = rules.fineweb.short_line_chars if rules.fineweb else FineWeb().short_line_chars
        self._asked = [
            (rule, limits)
            for group, functions in _GROUPS.items()
            if (limits := getattr(rules, group)) is not None
            for rule in functions
        ]

    def __call__(self, text: str) -> tuple[str, str | None, int]:
        """The text without the lines that C4's rules drop, the reason to drop it all or None, and the lines dropped."""
        if self._code and (reason := code_generated(text, self._code)):
            return text, reason, 0
        found, dropped = measure(text, self._lines, self._short_line_chars)
        for rule, limits in self._asked:
            if reason := rule(found, limits):
                return text, reason, 0
        return ("".join(_without(text, dropped)) if dropped else text), None, len(dropped)


def _without(text: str, dropped: list[tuple[int, int]]) -> Iterator[str]:
    place = 0
    for start, end in dropped:
        yield text[place:start]
        place = end
    yield text[place:]
