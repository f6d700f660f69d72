"""No corpus is replaced by another one unasked: what it was made with is held against what is asked for now.

`state/pack/corpus.json` keeps the settings of the corpus that pretrain_chinchilla/ holds, and a fingerprint of each
source's tokens. A corpus without that record is held against its manifest, which knows the mixture and the tokenizer.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from shared_data.config import PIPELINE_VERSION
from shared_data.errors import UserError
from shared_data.files import write_if_changed
from shared_data.manifest import Manifest
from shared_data.stage import Context, mixture_name, shares_of

RECORD = Path("pack", "corpus.json")
MOST_NAMED = 5

# Settings that change speed or memory, and no byte of a corpus.
_WITHOUT_EFFECT = {
    "tokenizer.batch_size", "tokenizer.prefetch", "dedup.n_hash_buckets", "dedup.bloom_capacity_per_bucket",
    "dedup.bloom_error_rate",
}  # fmt: skip


class Origin(BaseModel):
    """What the corpus of a data folder was made with."""

    model_config = ConfigDict(frozen=True)

    corpus: str
    """Fingerprint of the packing, as in its manifest."""
    settings: dict[str, Any]
    texts: dict[str, str]
    """Fingerprint of the tokens of each source."""


def settings_of(context: Context) -> dict[str, Any]:
    """Every setting that a corpus depends on, by its dotted name."""
    found: dict[str, Any] = {
        "pipeline_version": PIPELINE_VERSION,
        "mixture": mixture_name(context),
        "on_shortage": context.mixture.on_shortage,
        "max_epochs": context.mixture.max_epochs,
        "sources": [source.id for source in context.sources],
    }
    for source, share in zip(context.sources, shares_of(context), strict=True):
        own = {**source.model_dump(mode="json", exclude={"id"}), "weight": share}
        found.update(_flat(own, f"sources.{source.id}."))
    found.update(_flat(context.config.model_dump(mode="json"), ""))
    return {name: value for name, value in found.items() if name not in _WITHOUT_EFFECT}


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def keep_origin(context: Context, corpus: str, texts: dict[str, str]) -> None:
    """Record what the corpus that was just published was made with."""
    origin = Origin(corpus=corpus, settings=settings_of(context), texts=texts)
    write_if_changed(context.layout.state / RECORD, origin.model_dump_json(indent=1))


def refuse_another_corpus(context: Context, corpus: str | None = None, texts: Mapping[str, str] | None = None) -> None:
    """Refuse to go on where another corpus would be replaced, unless that is allowed.

    Args:
        context: what is asked for.
        corpus: fingerprint of the packing asked for, where it is known already.
        texts: fingerprint of the tokens of each source, with `corpus`.

    Raises:
        UserError: names each thing that differs, the old and the new value, and the two ways on.
    """
    if context.allow_changed:
        return
    folder = context.layout.corpus
    try:
        manifest = Manifest.load(folder, check_sizes=False)
    except UserError:
        return  # there is no whole corpus that could be lost
    if corpus is not None and corpus == manifest.corpus:
        return
    known = _read_origin(context, manifest)
    old, new = known.settings if known else _settings_in(manifest), settings_of(context)
    changes = list(_differences(old, new if known else {name: new.get(name) for name in old}, "{}"))
    if not changes and texts is not None:
        changes = list(_differences(known.texts, texts, "the fingerprint of the tokens of {}")) if known else []
        changes = changes or list(_differences({"": manifest.corpus}, {"": corpus}, "the packing's fingerprint"))
    if changes:
        more = f"; and {len(changes) - MOST_NAMED} more" if len(changes) > MOST_NAMED else ""
        raise UserError(
            f"{folder} holds a corpus that was made otherwise: {'; '.join(changes[:MOST_NAMED])}{more}. Keep it and "
            "prepare the new one elsewhere with --data-root DIR, or replace it with --allow-changed"
        )


def _read_origin(context: Context, manifest: Manifest) -> Origin | None:
    try:
        known = Origin.model_validate_json((context.layout.state / RECORD).read_bytes())
    except (OSError, ValidationError):
        return None
    return known if known.corpus == manifest.corpus else None


def _settings_in(manifest: Manifest) -> dict[str, Any]:
    """The settings that a manifest tells of."""
    return {
        "mixture": manifest.mixture,
        "sources": list(manifest.sources),
        "shard_size_tokens": manifest.shard_size_tokens,
        "tokenizer.name": manifest.tokenizer_name,
        "tokenizer.vocab_size": manifest.vocab_size,
        "tokenizer.eos_token_id": manifest.eos_token_id,
        "tokenizer.pad_token_id": manifest.pad_token_id,
        **{f"sources.{name}.weight": own.weight for name, own in manifest.sources.items()},
    }


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], form: str) -> Iterator[str]:
    """A phrase for each name with another value; not for what comes or goes with a whole source."""
    sources = [f"sources.{name}." for own in (old, new) for name in own.get("sources", ())]
    moved = tuple(name for name in sources if sources.count(name) == 1)
    for name in {**old, **new}:
        if (before := old.get(name, "(none)")) != (now := new.get(name, "(none)")) and not name.startswith(moved):
            yield f"{form.format(name)} was {_shown(before)}, is {_shown(now)}"


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
