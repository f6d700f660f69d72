"""Held-out loss, perplexity and bits per byte of a whole corpus, overall and per source.

Where `training.evaluation` scores a sample of whole windows during a run, this scores every token once, the ragged end
that fills no window included; all but the corpus's first, which nothing precedes. The counts are exact and depend on
neither the micro-batch nor the device.

Shapes: B micro-batch, T positions, D width, N tokens.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.dataset import PretrainDataset, document_ids_of
from gpt_oss_lite.training.evaluation import Evaluation, Score, evaluating
from gpt_oss_lite.training.knobs import autocast
from gpt_oss_lite.training.loss import head_token_losses
from shared_data.console import progress
from shared_data.manifest import Sidecar, read_sidecar, sidecar_path


def evaluate(
    model: GPTOSS,
    dataset: PretrainDataset,
    *,
    micro_batch_size: int = 8,
    chunk_size: int = 8192,
    label: str = "evaluate",
) -> Evaluation:
    """Score a model on every token of a corpus; gradients, mode and random state are left as they were.

    A token is predicted from those before it in its window. The end-of-document token is a predicted token like any
    other, in its document's source, and adds no bytes: the bytes are exactly those of the documents' UTF-8 text, all of
    the first document's included. So bits per byte charges the model for saying where documents end, as a code must.

    Args:
        model: on any device; on CUDA it runs under autocast in its `dtype`.
        dataset: the corpus, with the window length to score at.
        micro_batch_size: windows of one forward pass.
        chunk_size: tokens whose logits are alive at one time.
        label: what the progress line says.

    Returns:
        Sums over N - 1 tokens. Without sidecars (a corpus in one file) bits per byte is None and there are no sources.
    """
    sidecars = _read_sidecars(dataset)
    total = Score(n_bytes=None if sidecars is None else 0.0)
    by_source: dict[str, Score] = {}
    with progress(label, dataset.total_tokens - 1, "tokens") as report, evaluating(model):
        for first_target, ids_BT in _batches(dataset, micro_batch_size):
            losses_N = _losses(model, dataset, ids_BT, chunk_size)
            total.nats += float(losses_N.sum())
            total.tokens += losses_N.size
            if sidecars is not None:
                _add_by_source(by_source, dataset, sidecars, first_target, losses_N)
            report.advance(losses_N.size)
    for sidecar in sidecars or []:
        _add_bytes(total, by_source, sidecar)
    return Evaluation(total, dict(sorted(by_source.items())))


def _batches(dataset: PretrainDataset, micro_batch_size: int) -> Iterator[tuple[int, Tensor]]:
    """Position of the first target, and ids (B, T + 1): whole windows side by side, then the ragged end by itself."""
    width, n_tokens = dataset.max_seq_len, dataset.total_tokens
    for window in range(0, len(dataset), micro_batch_size):
        windows = range(window, min(window + micro_batch_size, len(dataset)))
        pairs = [dataset[index] for index in windows]
        yield window * width + 1, torch.stack([torch.cat((ids_T, targets_T[-1:])) for ids_T, targets_T in pairs])
    rest = len(dataset) * width
    if rest + 1 < n_tokens:
        yield rest + 1, torch.from_numpy(dataset.tokens(rest, n_tokens).astype(np.int64))[None]


def _losses(model: GPTOSS, dataset: PretrainDataset, ids_BT: Tensor, chunk_size: int) -> npt.NDArray[np.float64]:
    """Nats of each target, in the corpus's order."""
    device = model.embed.weight.device
    inputs_BT, targets_BT = ids_BT[:, :-1].to(device), ids_BT[:, 1:].to(device)
    with autocast(device, model.config.dtype):
        documents_BT = document_ids_of(inputs_BT, dataset, model.config)
        h_BTD, _ = model.hidden_states(inputs_BT, document_ids_BT=documents_BT)
        losses_BT = head_token_losses(h_BTD, model.head.weight, targets_BT, chunk_size=chunk_size)
    return losses_BT.flatten().double().cpu().numpy()


def _read_sidecars(dataset: PretrainDataset) -> list[Sidecar] | None:
    """Those of all shards; None for a corpus in one file."""
    if dataset.manifest is None:
        return None
    return [read_sidecar(sidecar_path(shard.path)) for shard in dataset.shards]


def _add_by_source(
    by_source: dict[str, Score],
    dataset: PretrainDataset,
    sidecars: list[Sidecar],
    first_target: int,
    losses_N: npt.NDArray[np.float64],
) -> None:
    positions_N = np.arange(first_target, first_target + losses_N.size)
    shards_N = np.searchsorted(dataset.shard_starts, positions_N, side="right") - 1
    for shard in np.unique(shards_N):
        sidecar, here = sidecars[shard], shards_N == shard
        offsets = positions_N[here] - dataset.shard_starts[shard]
        documents = np.searchsorted(sidecar.starts, offsets, side="right") - 1
        sources = sidecar.source_index[documents]
        for index in np.unique(sources):
            mine = sources == index
            score = by_source.setdefault(sidecar.sources[index], Score(n_bytes=0.0))
            score.nats += float(losses_N[here][mine].sum())
            score.tokens += int(mine.sum())


def _add_bytes(total: Score, by_source: dict[str, Score], sidecar: Sidecar) -> None:
    for index in np.unique(sidecar.source_index):
        n_bytes = int(sidecar.n_bytes[sidecar.source_index == index].sum())
        for score in (total, by_source.setdefault(sidecar.sources[index], Score(n_bytes=0.0))):
            assert score.n_bytes is not None
            score.n_bytes += n_bytes
