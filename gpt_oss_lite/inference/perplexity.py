"""Held-out loss, perplexity and bits per byte of a whole corpus, overall and per source.

Where `training.evaluation` scores a sample of whole windows during a run, this scores every token once, the ragged end
that fills no window included; all but the corpus's first, which nothing precedes. The counts are exact and depend on
neither the micro-batch nor the device. `by_position` tells how the loss falls as a window goes on, which says how
much of a long context a model uses.

Shapes: B micro-batch, T positions, D width, N tokens.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpt_oss_lite.inference.generate import covering_scale
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


@dataclass(frozen=True)
class PositionScore:
    """The targets at positions [start, stop) of the windows."""

    start: int
    stop: int
    loss: float
    """Mean cross-entropy in nats per token."""
    tokens: int


def by_position(
    model: GPTOSS,
    dataset: PretrainDataset,
    *,
    rope_scale: float | None = None,
    max_windows: int | None = None,
    micro_batch_size: int = 1,
    chunk_size: int = 8192,
) -> list[PositionScore]:
    """Mean loss by the target's position in its window, in spans that double: [0, 64), [64, 128), [128, 256), ...

    Args:
        model: as for `evaluate`; its RoPE scale is as before afterwards.
        dataset: the corpus, with the window length to score at; it may be beyond the model's training windows.
        rope_scale: None: the smallest that covers the window.
        max_windows: windows to score, spread evenly over the corpus; None: all.
        micro_batch_size: windows of one forward pass.
        chunk_size: tokens whose logits are alive at one time.
    """
    width = dataset.max_seq_len
    count = len(dataset) if max_windows is None else min(max_windows, len(dataset))
    windows = (np.arange(count) * len(dataset) // count).tolist()
    nats_T = np.zeros(width)
    scale_before = model.rotary.scale
    try:
        model.set_rope_scale(covering_scale(model.config, width) if rope_scale is None else rope_scale)
        with progress("loss by position", count, "windows") as report, evaluating(model):
            for start in range(0, count, micro_batch_size):
                pairs = [dataset[index] for index in windows[start : start + micro_batch_size]]
                ids_BT = torch.stack([torch.cat((ids_T, targets_T[-1:])) for ids_T, targets_T in pairs])
                nats_T += _losses(model, dataset, ids_BT, chunk_size).reshape(len(pairs), width).sum(axis=0)
                report.advance(len(pairs))
    finally:
        model.set_rope_scale(scale_before)
    edges = [0, *(64 * 2**n for n in range(max(width.bit_length(), 1)) if 64 * 2**n < width), width]
    return [
        PositionScore(start, stop, float(nats_T[start:stop].sum()) / (count * (stop - start)), count * (stop - start))
        for start, stop in itertools.pairwise(edges)
    ]


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
