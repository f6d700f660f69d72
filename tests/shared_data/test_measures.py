"""What the quality rules count: known values, and the compiled pass against the plain functions."""

import random
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_data.measures import LineRules, is_compiled, measure, measure_plainly
from shared_data.measures_compiled import measure_compiled

C4_LINES = LineRules(max_word_chars=1000, min_words=3, phrases=True)
STRICT = LineRules(max_word_chars=12, min_words=2, terminal_mark=True, phrases=True)
PIECES = [
    "the ", "The. ", "a", "b ", "To,", "(be) ", "...", "..", "…", "\n", "\n\n", " \n", "\r\n", "- ", "• ", "#", "{",
    "}", "lorem ipsum ", "LOREM  ipsum", "JavaScript ", "use cookies", "Terms of Use", "'", '"', ")", ". ", "! ", "é",
    "中。", "\u3000", "\x85", "\x1c", "\u2028", "foo bar baz qux quux corge grault garply waldo fred plugh ", "x" * 40,
    "\t", "1 ", "۔", "ﬁ", "İ", "\U0001f600", "K",
]  # fmt: skip


def real_texts() -> list[str]:
    """Source files, licences and read-me files that the installed packages carry."""
    folders = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]
    paths = [*sorted(folders[0].glob("*.py"))[:40], *sorted(folders[1].glob("*.dist-info/METADATA"))[:60]]
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def test_what_is_counted_in_a_small_text():
    text = "  The cat sat. And the cat sat.\n\n- one {two}\n- one {two}\nUse cookies… #\n"
    found, dropped = measure(text, C4_LINES, 12)
    assert (found.chars, found.words, found.word_chars) == (69, 16, 53)
    assert (found.lines, found.line_chars, found.max_line_chars) == (4, 65, 29)
    assert (found.alpha_words, found.stop_words) == (13, 2)
    assert (found.hashes, found.ellipses, found.braces, found.lorem) == (1, 1, 2, 0)
    assert (found.bullet_lines, found.ellipsis_lines) == (2, 0)
    assert (found.duplicate_lines, found.duplicate_line_chars) == (1, 11)
    assert (found.paragraphs, found.duplicate_paragraphs) == (2, 0)
    assert dropped == [(57, 72)]
    assert (found.kept_lines, found.kept_words, found.kept_chars, found.kept_sentences) == (3, 13, 51, 4)
    assert (found.kept_terminal_lines, found.kept_short_lines, found.kept_duplicate_chars) == (1, 2, 11)
    assert found.top_ngram_chars == (2 * len("cat sat."), 2 * len("- one {two}"), 0)


def test_repeated_ngrams_are_counted_once_per_word():
    words = ["aa", "bb", "cc", "dd", "ee"]
    found, _ = measure(" ".join(words * 4), LineRules(), 30)
    # The first five words are new; as many whole n-grams as fit into the other 15 were there before.
    assert found.duplicate_ngram_chars == (30, 24, 28, 16, 18, 20)
    assert found.top_ngram_chars == (5 * 4, 8 * 4, 11 * 4)
    assert measure(" ".join(map(str, range(99))), LineRules(), 30)[0].duplicate_ngram_chars == (0,) * 6


def test_it_is_compiled_here():
    assert is_compiled()


@pytest.mark.parametrize("rules", [LineRules(), C4_LINES, STRICT], ids=["none", "c4", "strict"])
def test_compiled_equals_plain_on_real_text(rules):
    texts = real_texts()
    assert sum(map(len, texts)) > 500_000
    for text in texts:
        assert measure_compiled(text[:30_000], rules, 30) == measure_plainly(text[:30_000], rules, 30)


def test_compiled_equals_plain_on_random_pieces():
    rng = random.Random(5)
    for _ in range(1500):
        text = "".join(rng.choices(PIECES, k=rng.randint(0, 70)))
        rules = LineRules(
            rng.choice([None, 1, 3, 30]), rng.choice([None, 0, 2, 3]), rng.random() < 0.5, rng.random() < 0.5
        )
        assert measure_compiled(text, rules, 12) == measure_plainly(text, rules, 12), repr(text)


@settings(max_examples=150, deadline=None)
@given(st.text(st.one_of(st.sampled_from('ab .\n…"{'), st.characters(exclude_categories=("Cs",))), max_size=120))
def test_compiled_equals_plain_on_any_characters(text):
    assert measure_compiled(text, STRICT, 5) == measure_plainly(text, STRICT, 5)


def test_without_numba_the_plain_functions_are_used():
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "import importlib.util as u; plain = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'numba' else plain(name, *rest)\n"
        "from shared_data.measures import *; print(is_compiled(), measure('one two', LineRules(), 30)[0].words)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "2"]
