"""Cleaning one document."""

import hashlib

import pytest

from shared_data.filters import content_digest, length_rule, normalise


@pytest.mark.parametrize(
    ("text", "clean", "changes"),
    [
        ("plain\ttext\r\n", "plain\ttext\r\n", {}),
        ("a\x00b\x00", "ab", {"nul_removed": 2}),
        ("a\x07b\x1b[0m\x7f\x9f", "ab[0m", {"control_removed": 4}),
        ("a\ud800", "a\ufffd", {"lone_surrogates_replaced": 1}),
        ("e\u0301", "é", {"nfc_changed": 1}),
        ("\u212b", "\u00c5", {"nfc_changed": 1}),
    ],
)
def test_d14_what_is_changed_is_stated_and_counted(text, clean, changes):
    cleaned = normalise(text)
    assert (cleaned.text, cleaned.changes) == (clean, changes)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "empty"), (" \n\t ", "empty"), ("abc", "too_short"), ("  abc  ", "too_short"), ("abcd", None),
     ("a" * 8, None), ("a" * 9, "too_long")],
)  # fmt: skip
def test_the_length_rule_returns_its_reason(text, reason):
    assert length_rule(4, 8)(text) == reason


def test_the_digest_is_that_of_the_folded_text():
    assert content_digest(" a \n\n b\u3000c ") == hashlib.sha256(b"a b c").digest()
    assert content_digest("e\u0301") == content_digest("é")


@pytest.mark.parametrize("other", ["A b c 1", "a b c 2", "ab c 1", "a b c", "a b c 1."])
def test_case_digits_and_words_make_a_difference(other):
    assert content_digest("a b c 1") != content_digest(other)
