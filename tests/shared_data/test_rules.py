"""The quality rules: for each reason a text that earns it, and its like that just does not."""

import json

import pytest
from pipeline_corpus import context_of, edit_yaml, hashes, make_corpus, write_lines

from shared_data.config.quality import (
    C4,
    Code,
    CodeRules,
    FineWeb,
    GopherQuality,
    GopherRepetition,
    MathRules,
    ProseRules,
    RuleSet,
    WebRules,
)
from shared_data.errors import UserError
from shared_data.rules import RuleSetCheck
from shared_data.scripts import clean, download_raw, tokenize
from shared_data.tokenizing import read_ids

OFF = dict.fromkeys(GopherQuality.model_fields)
ONE = dict.fromkeys(GopherRepetition.model_fields)
NO_C4 = {
    "max_word_chars": None, "min_words_per_line": None, "phrases": False, "min_sentences": None, "lorem_ipsum": False,
    "curly_brackets": False,
}  # fmt: skip
NO_FINEWEB = {name: None for name in FineWeb.model_fields if name != "short_line_chars"}
NO_CODE = {"max_mean_line_chars": None, "max_line_chars": None, "min_alnum_chars": None,
           "max_duplicate_line_chars": None, "generated_marks": []}  # fmt: skip


def quality(**limits):
    return RuleSet(gopher_quality=GopherQuality(**{**OFF, **limits}))


def repetition(**limits):
    return RuleSet(gopher_repetition=GopherRepetition(**{**ONE, **limits}))


def c4(**limits):
    return RuleSet(c4=C4(**{**NO_C4, **limits}))


def fineweb(**limits):
    return RuleSet(fineweb=FineWeb(**{**NO_FINEWEB, **limits}))


def code(**limits):
    return RuleSet(code=Code(**{**NO_CODE, **limits}))


def lines(*texts: str) -> str:
    return "\n".join(texts)


NEW = [f"line number {n} of the text" for n in range(10)]
CASES = {
    "gopher_few_words": (quality(min_words=4), "a b c", "a b c d"),
    "gopher_many_words": (quality(max_words=3), "a b c d", "a b c"),
    "gopher_short_words": (quality(min_mean_word_chars=3.0), "aaa bb", "aaa bbb"),
    "gopher_long_words": (quality(max_mean_word_chars=3.0), "aaa bbbb", "aaa bbb"),
    "gopher_hashes": (quality(max_hashes_per_word=0.1), "# # a b c d e f g h", "# a b c d e f g h i"),
    "gopher_ellipses": (quality(max_ellipses_per_word=0.1), "a... b… c d e f g h i j", "a... b c d e f g h i j"),
    "gopher_bullets": (quality(max_bullet_lines=0.9), "- a\n- b\n• c", lines(*["- a"] * 9, "b")),
    "gopher_ellipsis_lines": (quality(max_ellipsis_lines=0.3), "a…\nb...\nc\nd\ne", lines(*["a…"] * 3, *["b"] * 7)),
    "gopher_no_letters": (quality(min_alpha_words=0.8), "a 1 2 3", "a b1 c d 2"),
    "gopher_stop_words": (quality(min_stop_words=2), "The the the cat", "The cat (and) dog"),
    "repeated_paragraphs": (repetition(max_duplicate_paragraphs=0.3), "a\n\na\n\nb", "a\n\na\n\nb\n\nc"),
    "repeated_paragraph_chars": (
        repetition(max_duplicate_paragraph_chars=0.2), "abc d\n\nabc d\n\nb", "abc d\n\nabc d\n\nbbbbbbbbbbbb",
    ),
    "repeated_lines": (repetition(max_duplicate_lines=0.3), lines("a", "a", "b"), lines("a", "a", "b", "c")),
    "repeated_line_chars": (
        repetition(max_duplicate_line_chars=0.2), lines("abc", "abc", "d"), lines("a", "a", "bcdefgh", "ijk"),
    ),
    "top_2_gram": (
        repetition(max_top_ngram_chars=[0.2, 1.0, 1.0]), "a b c a b d", "a b ccccccccccccc a b ddddddddddddd",
    ),
    "top_4_gram": (repetition(max_top_ngram_chars=[1.0, 1.0, 0.2]), "a b c d e a b c d", "a b c d e a b c f"),
    "repeated_5_grams": (
        repetition(max_duplicate_ngram_chars=[0.15, 1.0, 1.0, 1.0, 1.0, 1.0]), "a b c d e a b c d e",
        "a b c d e a b c d f",
    ),
    "repeated_10_grams": (
        repetition(max_duplicate_ngram_chars=[1.0, 1.0, 1.0, 1.0, 1.0, 0.1]),
        "a b c d e f g h i j k a b c d e f g h i j", "a b c d e f g h i j k a b c d e f g h i k",
    ),
    "c4_lorem_ipsum": (c4(lorem_ipsum=True), "x Lorem Ipsum y", "x lorem y ipsum"),
    "c4_curly_bracket": (c4(curly_brackets=True), "a { b", "a ( b"),
    "c4_few_sentences": (c4(min_sentences=3), "One. Two", 'One. "Two." Three'),
    "fineweb_few_terminal_marks": (fineweb(min_terminal_lines=0.12), lines(*NEW), lines(*NEW[:5], "and an end.")),
    "fineweb_short_lines": (fineweb(max_short_lines=0.5), lines("a" * 30, "b" * 30, "c" * 31), "a" * 31),
    "fineweb_repeated_lines": (
        fineweb(max_duplicate_line_chars=0.01), lines("ab", "ab", "c" * 30), lines("ab", "ab", "c" * 300),
    ),
    "fineweb_many_line_ends": (fineweb(max_line_ends_per_word=0.3), lines("a b", "c d", "e"), lines("a b c", "d e")),
    "code_long_line": (code(max_line_chars=20), "a" * 21, "a" * 20),
    "code_long_lines": (code(max_mean_line_chars=3.0), "aaaa\nbbb", "aaa\n\nbbb"),
    "code_few_letters": (code(min_alnum_chars=0.25), "ab ++--++--", "ab ++--"),
    "code_repeated_lines": (code(max_duplicate_line_chars=0.6), lines(*["x = 1"] * 9), lines(*["x = 1"] * 2)),
    "code_generated": (
        code(generated_marks=["do not edit"]), "# Written by hand.\n# DO NOT EDIT\nx", lines(*"abcde", "do not edit"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", CASES)
def test_each_rule_returns_its_reason(reason):
    rules, bad, good = CASES[reason]
    assert RuleSetCheck(rules)(bad)[1] == reason
    assert RuleSetCheck(rules)(good)[1] is None


ARTICLE = """\
The lighthouse at the mouth of the river was built in 1852, after three ships had been lost in one winter. Its keeper
lived with his family in the two rooms below the lamp. They carried the oil up by hand, and the stairs have 210 steps.

In a storm the tower moves by the width of a hand. "You get used to that," said the last keeper, who left in 1971. Since
then a machine has lit the lamp. Visitors may climb up to the gallery in summer, when the weather allows it.
"""
PROGRAM = "def area(r):\n    return 3.14159 * r * r\n\n\ndef main():\n    print({n: area(n) for n in range(4)})\n"
SOLUTION = "Find x with 2x + 6 = 10.\n\n2x = 10 - 6\n2x = 4\nx = 4 / 2\nx = 2\n\nSo the solution is x = 2."


@pytest.mark.parametrize(
    ("rules", "text", "reason"),
    [
        (WebRules(), ARTICLE, None),
        (WebRules(), PROGRAM, "gopher_few_words"),
        (WebRules(), SOLUTION, "gopher_few_words"),
        (WebRules(), ARTICLE + "{", "c4_curly_bracket"),
        (ProseRules(), ARTICLE + "{", None),
        (ProseRules(), ARTICLE + "\n" + ARTICLE, "repeated_paragraphs"),
        (MathRules(), SOLUTION, None),
        (MathRules(), "x = 1\n" * 40, "repeated_lines"),
        (CodeRules(), PROGRAM, None),
        (CodeRules(), "# Generated by a tool\n" + PROGRAM, "code_generated"),
    ],
)  # fmt: skip
def test_each_set_keeps_its_own_kind(rules, text, reason):
    assert RuleSetCheck(rules)(text)[1] == reason


def test_lines_that_c4_drops_are_cut_out_and_the_rest_stays_as_it_was():
    dropped = "\nThis site uses cookies to serve you better.\nMenu\nPlease enable JavaScript in your browser.\n"
    text = ARTICLE + dropped + "  Indented as it was, you see.\n"
    kept, reason, n_lines = RuleSetCheck(WebRules())(text)
    assert (reason, n_lines) == (None, 3)
    assert kept == ARTICLE + "\n  Indented as it was, you see.\n"


def test_what_a_group_counts_in_is_what_c4_left():
    text = lines("One line ends here.", *["go"] * 40)
    assert RuleSetCheck(RuleSet(fineweb=FineWeb()))(text)[1] == "fineweb_few_terminal_marks"
    assert RuleSetCheck(RuleSet(fineweb=FineWeb(max_short_lines=None), c4=C4(min_sentences=None)))(text)[1] is None


def corpus_with_rules(folder, **source):
    """Articles that the web rules keep, among others that they do not."""
    make_corpus(folder, pipeline={"task_bytes": 5000, "quality": {"min_chars": 20}})
    texts = [ARTICLE.replace("1852", str(1000 + n)) for n in range(12)]
    texts[4:4] = [PROGRAM, ARTICLE + "{", "a a a a " * 60, ARTICLE + "\nMenu\n\nWe use cookies on this site.\n"]
    write_lines(folder / "sources" / "web.jsonl", texts)
    web = {"id": "web", "weight": 1.0, "files": [str(folder / "sources" / "web.jsonl")], "rules": "web"}
    edit_yaml(folder / "mixture.yaml", sources=[{**web, **source}])


def test_the_stage_accounts_for_each_reason_and_workers_change_nothing(tmp_path):
    corpus_with_rules(tmp_path)
    reports = []
    for root, workers in (("data", 1), ("two", 2)):
        context = context_of(tmp_path, root=root, workers=workers)
        download_raw.run(context)
        reports.append(clean.run(context))
    assert reports[0] == reports[1]
    assert hashes(tmp_path / "data") == hashes(tmp_path / "two")
    own = reports[0]["sources"]["web"]
    assert (own["read"], own["kept"]) == (16, 13)
    assert own["dropped"] == {"c4_curly_bracket": 1, "gopher_few_words": 1, "top_2_gram": 1}
    assert own["changed"] == {"lines_dropped": 2}


def test_each_documents_id_is_kept_to_the_token_index(tmp_path):
    corpus_with_rules(tmp_path)
    path = tmp_path / "sources" / "web.jsonl"
    records = [
        {**json.loads(line), "url": f"https://é.example/{n}"} for n, line in enumerate(path.read_text().splitlines())
    ]
    records[0]["id"] = "named"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    context = context_of(tmp_path)
    for stage in (download_raw, clean, tokenize):
        stage.run(context)
    ids = [name for path in sorted((tmp_path / "data/tokens/web").glob("*.bin")) for name in read_ids(path)]
    assert ids[:5] == ["named", *(f"https://é.example/{n}" for n in (1, 2, 3, 7))]
    assert len(ids) == 13


def test_a_source_changes_single_limits_of_its_set(tmp_path):
    groups = {"gopher_quality": None, "gopher_repetition": None}
    corpus_with_rules(tmp_path, limits={"c4": {"curly_brackets": False}, **groups})
    context = context_of(tmp_path)
    download_raw.run(context)
    assert clean.run(context)["sources"]["web"]["dropped"] == {"c4_few_sentences": 2, "duplicate": 1}
    corpus_with_rules(tmp_path, limits={"c4": {"curly_bracket": False}})
    hint = r"source web: limits: c4.curly_bracket is not a known key; the nearest known key is curly_brackets"
    with pytest.raises(UserError, match=hint):
        clean.run(context_of(tmp_path))
