"""Held-out loss: nats per token, perplexity, and bits per byte, overall and per source.

Bits per byte compares models with different tokenizers: the summed loss in bits over the UTF-8 bytes of the text that
it covers. The bytes come from the sidecar beside each shard (`shard_NNNNN.idx`). A document's bytes are spread evenly
over its tokens, its EOS included, so that a document scored whole counts exactly its bytes.

Shapes: B micro-batch, T positions, D width.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.dataset import PretrainDataset, document_ids_of
from gpt_oss_lite.training.distributed import Ranks
from gpt_oss_lite.training.knobs import autocast
from gpt_oss_lite.training.loss import head_token_losses
from shared_data.console import progress
from shared_data.manifest import Sidecar, read_sidecar, sidecar_path


@dataclass
class Score:
    """Sums over scored tokens."""

    nats: float = 0.0
    tokens: int = 0
    n_bytes: float | None = None
    """UTF-8 bytes of the scored text; None where the corpus has no sidecars."""

    @property
    def loss(self) -> float:
        """Mean cross-entropy in nats per token."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp(loss), infinity where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per UTF-8 byte; None without sidecars."""
        return self.nats / math.log(2) / self.n_bytes if self.n_bytes else None

    def as_dict(self) -> dict[str, float | int | None]:
        """The figures as events.jsonl and --json show them."""
        return {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
        }


@dataclass
class Evaluation:
    """Held-out figures of one model on one corpus."""

    total: Score
    by_source: dict[str, Score] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """The overall figures, and `by_source` with the same for each source."""
        return {**self.total.as_dict(), "by_source": {name: score.as_dict() for name, score in self.by_source.items()}}


class TokenSources:
    """Source and bytes of each token of a corpus, from the sidecars of its shards."""

    def __init__(self, dataset: PretrainDataset) -> None:
        self._dataset = dataset
        self._sidecars: dict[int, Sidecar] = {}
        self._paths = [sidecar_path(shard.path) for shard in dataset.shards]

    @property
    def complete(self) -> bool:
        """Whether every shard has its sidecar."""
        return all(path.is_file() for path in self._paths)

    def lookup(self, start: int, stop: int) -> tuple[npt.NDArray[np.str_], npt.NDArray[np.float64]]:
        """Source names and bytes of tokens [start, stop) of the corpus."""
        names, n_bytes = [], []
        for shard, first, end in self._dataset.by_shard(start, stop):
            sidecar = self._sidecar(shard)
            document = np.searchsorted(sidecar.starts, np.arange(first, end), side="right") - 1
            names.append(np.asarray(sidecar.sources)[sidecar.source_index[document]])
            n_bytes.append(sidecar.n_bytes[document] / sidecar.lengths[document])
        return np.concatenate(names), np.concatenate(n_bytes)

    def documents(self, start: int, stop: int) -> list[tuple[str, str | None]]:
        """(source, id) of the documents that tokens [start, stop) belong to, in order; the id is None where it was not
        kept."""
        found: list[tuple[str, str | None]] = []
        for shard, first, end in self._dataset.by_shard(start, stop):
            sidecar = read_sidecar(self._paths[shard], with_ids=True)
            first_document, last_document = np.searchsorted(sidecar.starts, [first, end - 1], side="right") - 1
            for number in range(first_document, last_document + 1):
                name = None if sidecar.ids is None else sidecar.ids[number]
                found.append((sidecar.sources[sidecar.source_index[number]], name))
        return found

    def _sidecar(self, shard: int) -> Sidecar:
        if shard not in self._sidecars:
            self._sidecars[shard] = read_sidecar(self._paths[shard])
        return self._sidecars[shard]


def evaluate(
    model: GPTOSS,
    dataset: PretrainDataset,
    *,
    max_windows: int | None = None,
    micro_batch_size: int = 8,
    chunk_size: int = 8192,
    label: str = "evaluate",
    ranks: Ranks | None = None,
) -> Evaluation:
    """Score a model on windows of a corpus; gradients, mode and random state are left as they were.

    Args:
        model: on any device; CUDA models run under autocast in their `dtype`.
        dataset: the corpus, with the window length to score at.
        max_windows: windows to score, spread evenly over the corpus; None: all.
        micro_batch_size: windows of one forward pass; the last pass may have fewer.
        chunk_size: tokens whose logits are alive at one time.
        label: what the progress line says.
        ranks: those that share the work, each of which gets the whole result; None: this process alone.
    """
    ranks = ranks or Ranks()
    count = len(dataset) if max_windows is None else min(max_windows, len(dataset))
    windows = np.arange(count) * len(dataset) // count
    sources = TokenSources(dataset)
    has_sidecars = sources.complete
    result = Evaluation(Score(n_bytes=0.0 if has_sidecars else None))
    batches = [windows[start : start + micro_batch_size] for start in range(0, count, micro_batch_size)]
    with progress(label, count, "windows") as report, evaluating(model):
        for first in range(0, len(batches), ranks.size):
            # A sharded model's forward pass takes all ranks: those without a batch of their own compute one in vain.
            batch = batches[min(first + ranks.rank, len(batches) - 1)]
            losses_BT = _losses(model, dataset, batch, chunk_size)
            report.advance(sum(map(len, batches[first : first + ranks.size])))
            if first + ranks.rank >= len(batches):
                continue
            for window, losses_T in zip(batch, losses_BT.double().cpu().numpy(), strict=True):
                _add(result.total, losses_T.sum(), losses_T.size)
                if has_sidecars:
                    _add_by_source(result, sources, dataset.start_of(int(window)) + 1, losses_T)
    result = _sum(ranks.gather(result))
    result.by_source = dict(sorted(result.by_source.items()))
    return result


def _sum(parts: list[Evaluation]) -> Evaluation:
    """The figures of all parts together, added to the first one."""
    result, *others = parts
    for part in others:
        _add(result.total, part.total.nats, part.total.tokens, part.total.n_bytes or 0.0)
        for name, score in part.by_source.items():
            _add(result.by_source.setdefault(name, Score(n_bytes=0.0)), score.nats, score.tokens, score.n_bytes or 0.0)
    return result


def _losses(model: GPTOSS, dataset: PretrainDataset, windows: npt.NDArray[np.int64], chunk_size: int) -> Tensor:
    pairs = [dataset[int(window)] for window in windows]
    device = next(model.parameters()).device
    ids_BT = torch.stack([pair[0] for pair in pairs]).to(device)
    targets_BT = torch.stack([pair[1] for pair in pairs]).to(device)
    with autocast(device, model.config.dtype):
        h_BTD, _ = model.hidden_states(ids_BT, document_ids_BT=document_ids_of(ids_BT, dataset, model.config))
        return head_token_losses(h_BTD, model.head.weight, targets_BT, chunk_size=chunk_size)


def _add(score: Score, nats: float, tokens: int, n_bytes: float = 0.0) -> None:
    score.nats += float(nats)
    score.tokens += tokens
    if score.n_bytes is not None:
        score.n_bytes += float(n_bytes)


def _add_by_source(
    result: Evaluation, sources: TokenSources, first_target: int, losses_T: npt.NDArray[np.float64]
) -> None:
    names_T, n_bytes_T = sources.lookup(first_target, first_target + losses_T.size)
    assert result.total.n_bytes is not None
    result.total.n_bytes += float(n_bytes_T.sum())
    for name in np.unique(names_T):
        mine = names_T == name
        score = result.by_source.setdefault(str(name), Score(n_bytes=0.0))
        _add(score, losses_T[mine].sum(), int(mine.sum()), n_bytes_T[mine].sum())


@contextmanager
def evaluating(model: GPTOSS) -> Iterator[None]:
    """Evaluation mode without gradients, and the mode as it was afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
