"""Several corpora as one data set: windows of each by its weight, without packing anything again.

A window lies in one corpus; each corpus's last incomplete window is left out, as where it is read alone.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpt_oss_lite.config.training import CorpusPart
from gpt_oss_lite.training.data_order import MixedOrder
from gpt_oss_lite.training.dataset import PretrainDataset
from shared_data.errors import UserError


class MixedDataset(PretrainDataset):
    """Windows of several corpora, numbered one corpus after the other; so are tokens and shards.

    Args:
        parts: the corpora with their weights.
        max_seq_len: T, tokens of a window.
        vocab_rows: rows of the model's embedding; a window with an id beyond them raises. None: any id.

    Raises:
        FileNotFoundError, UserError: as PretrainDataset, for each of them; or their tokenizers differ.
    """

    def __init__(self, parts: Sequence[CorpusPart], max_seq_len: int, vocab_rows: int | None = None) -> None:
        self._parts = [PretrainDataset(part.path, max_seq_len, vocab_rows) for part in parts]
        _check_apart(parts, self._parts)
        steps = [part.turns for part in parts]
        self._shares = tuple(step // math.gcd(*steps) for step in steps)
        self.max_seq_len, self.vocab_rows = max_seq_len, vocab_rows
        self.path = Path(" + ".join(str(part.path) for part in self._parts))  # for messages
        self.manifest = self._parts[0].manifest
        _check_same_tokenizer(self._parts)
        self.shards = [shard for part in self._parts for shard in part.shards]
        self.shard_starts = np.cumsum([0, *(shard.n_tokens for shard in self.shards)], dtype=np.int64)
        self.total_tokens = int(self.shard_starts[-1])
        self._sizes = tuple(len(part) for part in self._parts)
        self._n_windows = sum(self._sizes)
        self._first_windows = np.cumsum([0, *self._sizes])
        self._first_tokens = np.cumsum([0, *(part.total_tokens for part in self._parts)])

    @property
    def parts(self) -> Sequence[PretrainDataset]:
        """The corpora."""
        return self._parts

    def order(self, seed: int) -> MixedOrder:
        """The order in which a run with this seed reads the windows: by the weights at every step."""
        return MixedOrder(len(self), seed, self._sizes, self._shares)

    def start_of(self, window: int) -> int:
        """First token of a window."""
        part = int(np.searchsorted(self._first_windows, window, side="right")) - 1
        return int(self._first_tokens[part] + (window - self._first_windows[part]) * self.max_seq_len)

    def check_ids(self) -> None:
        """As PretrainDataset, in each corpus."""
        for part in self._parts:
            part.check_ids()

    def fingerprint(self) -> dict[str, Any]:
        """What tells these corpora with these weights from others."""
        own = [part.fingerprint() for part in self._parts]
        digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
        total = sum(self._shares)
        weights = [share / total for share in self._shares]
        return {"total_tokens": self.total_tokens, "sha256": digest, "weights": weights}


def _check_apart(parts: Sequence[CorpusPart], opened: Sequence[PretrainDataset]) -> None:
    places: dict[Path, str] = {}
    for part, dataset in zip(parts, opened, strict=True):
        place = dataset.path.resolve()
        if place in places:
            raise UserError(
                f"data.train_data_path: {places[place]} and {part.path} are one corpus: name it once, with the sum of "
                "the weights"
            )
        places[place] = part.path


def _check_same_tokenizer(parts: Sequence[PretrainDataset]) -> None:
    first = parts[0]
    for part in parts[1:]:
        for key in ("tokenizer_name", "vocab_size", "eos_token_id", "pad_token_id"):
            one, other = (getattr(own.manifest, key, None) for own in (first, part))
            if one != other:
                raise UserError(
                    f"data.train_data_path: {first.path} has {key} {one}, but {part.path} has {other}; corpora that "
                    "are mixed must have one tokenizer"
                )


def open_corpus(path: str | Sequence[CorpusPart], max_seq_len: int, vocab_rows: int | None = None) -> PretrainDataset:
    """What a recipe's data.train_data_path names: one corpus, or several with their weights. Raises as they do."""
    if isinstance(path, str):
        return PretrainDataset(path, max_seq_len, vocab_rows)
    return MixedDataset(path, max_seq_len, vocab_rows)
