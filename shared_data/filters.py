"""Cleaning one document: what is changed, what is dropped and why.

A rule is a function that returns the reason for which a document is dropped, or None. Changes are counted by name, so
that a report accounts for everything that the stage did.
"""

import hashlib
import re
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

from shared_data.tokenizer import replace_lone_surrogates

# C0 and C1 controls, except tab, line feed and carriage return; NUL is counted apart.
_CONTROL = re.compile("[\x01-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_C0_BYTES = bytes([*range(0x09), 0x0B, 0x0C, *range(0x0E, 0x20), 0x7F])
_C1_LEAD_BYTE = b"\xc2"  # U+0080 to U+00BF

Rule = Callable[[str], str | None]


class Cleaned(NamedTuple):
    """A document's text after normalisation, and what was changed in it."""

    text: str
    changes: dict[str, int]
    """Characters by kind of change: lone_surrogates_replaced, nul_removed, control_removed; documents: nfc_changed."""


def normalise(text: str) -> Cleaned:
    """Make text clean without touching what it says.

    Lone surrogates become U+FFFD; NUL and other control characters (except tab and line ends) are removed; the rest is
    brought to Unicode's composed form (NFC, Unicode Standard Annex 15).
    """
    changes: dict[str, int] = {}
    text, surrogates = replace_lone_surrogates(text)
    if surrogates:
        changes["lone_surrogates_replaced"] = surrogates
    if _may_hold_controls(text):
        if nuls := text.count("\x00"):
            changes["nul_removed"] = nuls
            text = text.replace("\x00", "")
        text, controls = _CONTROL.subn("", text)
        if controls:
            changes["control_removed"] = controls
    if not unicodedata.is_normalized("NFC", text):
        changes["nfc_changed"] = 1
        text = unicodedata.normalize("NFC", text)
    return Cleaned(text, changes)


def _may_hold_controls(text: str) -> bool:
    """Whether a text needs to be looked through for controls: many times faster than doing it."""
    content = text.encode()
    return len(content.translate(None, _C0_BYTES)) < len(content) or _C1_LEAD_BYTE in content


def length_rule(min_chars: int, max_chars: int) -> Rule:
    """Keep documents of min_chars to max_chars characters, white space at both ends not counted."""

    def rule(text: str) -> str | None:
        length = len(text.strip())
        if length == 0:
            return "empty"
        if length < min_chars:
            return "too_short"
        return "too_long" if length > max_chars else None

    return rule


def content_digest(text: str) -> bytes:
    """SHA-256 of the text that duplicates share: NFC, runs of white space folded to one space; case and digits kept."""
    folded = " ".join(unicodedata.normalize("NFC", text).split())
    return hashlib.sha256(folded.encode("utf-8", "replace")).digest()
