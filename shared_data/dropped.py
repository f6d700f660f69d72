"""Samples of what each rule of the clean stage dropped, found by filtering the beginning of the raw text again."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from shared_data.cleaning import filter_span, read_raw
from shared_data.config import Source
from shared_data.records import Span, parse_json_line, read_lines
from shared_data.scripts.clean import rules_of
from shared_data.stage import Context, read_parts

# Enough for samples of the usual reasons, little enough to take a second or two a source.
SAMPLED_BYTES = 4 << 20
SAMPLES_PER_REASON = 3
SAMPLE_CHARS = 1200


@dataclass(frozen=True)
class Sample:
    """A document that a rule dropped."""

    id: str
    n_chars: int
    text: str
    """Its first SAMPLE_CHARS characters."""


class _DropLog(Counter[str]):
    """Counts as the filter does, and notes which document each `dropped.REASON` was: the one read last."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[int, str] = {}

    def __setitem__(self, name: str, count: int) -> None:
        super().__setitem__(name, count)
        if name.startswith("dropped."):
            self.reasons[self["read"] - 1] = name.removeprefix("dropped.")


def dropped_samples(context: Context, source: Source) -> dict[str, list[Sample]]:
    """Some documents per reason, from the first few megabytes of a source's first raw file; {} where it is gone."""
    try:
        raw = read_parts(context.layout, "download", source.id)[0]
        cleaned = read_parts(context.layout, "clean", source.id)[0]
    except ValueError:
        return {}
    span = Span(raw.path, raw.path.name, 0, min(raw.bytes, SAMPLED_BYTES))
    rules, log = rules_of(source, context), _DropLog()
    for _ in filter_span(span, rules, log):
        pass
    kept = _ids(Span(cleaned.path, cleaned.path.name, 0, min(cleaned.bytes, SAMPLED_BYTES)))
    known, last, is_known = set(kept), kept[-1] if kept else None, bool(kept)
    samples: dict[str, list[Sample]] = {}
    for number, document in enumerate(read_raw(span, rules.fields)):
        reason = log.reasons.get(number)
        if reason is None and is_known and document.id not in known:
            reason = "duplicate"  # it passed every rule, and is not in the clean text
        is_known = is_known and document.id != last
        own = samples.setdefault(reason, []) if reason else None
        if own is not None and len(own) < SAMPLES_PER_REASON:
            text = document.text or ""
            own.append(Sample(document.id, len(text), text[:SAMPLE_CHARS]))
    return dict(sorted(samples.items()))


def _ids(span: Span) -> list[str]:
    ids: list[str] = []
    for _, line in read_lines(span):
        record: Any = parse_json_line(line)[0]
        ids.append(record.get("id", "") if isinstance(record, dict) else "")
    return ids
