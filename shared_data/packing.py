"""Stage 4, its plan and its tasks: which document goes where, and one task per shard.

The plan is serial and small: it is made of documents' lengths alone. It lies in state/pack/ as arrays with one entry
per document of the corpus, in the corpus's order; each shard is a slice of it, written by a task of its own.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import safetensors
from safetensors.numpy import save as save_safetensors

from shared_data.config import Mixture, PipelineConfig, Source
from shared_data.errors import UserError
from shared_data.executor import Result
from shared_data.files import write_atomic
from shared_data.manifest import TOKEN_BYTES, TOKEN_DTYPE, CorpusInfo, Position, sidecar_path
from shared_data.mixture import Supply, check_supply, interleave, is_validation, shuffled
from shared_data.shard_writer import ShardWriter
from shared_data.tokenizing import HEADER_BYTES, read_index

OPEN_STREAMS = 256


@dataclass(frozen=True)
class Documents:
    """All documents of one source, in the source's order; N of them."""

    source: Source
    streams: tuple[Path, ...]
    """The source's tokens.bin or its numbered parts."""
    stream: np.ndarray
    """Index into `streams`, int32 (N,)."""
    offset: np.ndarray
    """First token of each document in its stream, header not counted, int64 (N,)."""
    n_tokens: np.ndarray
    """Tokens, EOS included, int64 (N,)."""
    n_bytes: np.ndarray
    hashes: np.ndarray
    """Leading 64 bits of the digest, uint64 (N,)."""


@dataclass(frozen=True)
class Plan:
    """The documents of one split in the corpus's order; M of them. What a file of it holds."""

    source_index: np.ndarray
    stream: np.ndarray
    """Index into the streams of all sources, one after the other."""
    offset: np.ndarray
    n_tokens: np.ndarray
    n_bytes: np.ndarray

    def write(self, path: Path) -> None:
        """Write the plan's arrays."""
        write_atomic(path, save_safetensors(dict(vars(self))))


def read_documents(source: Source, streams: Sequence[Path]) -> Documents:
    """Read the indices of a source's token streams.

    Raises:
        UserError: a stream is damaged, or there is no document at all.
    """
    indices = [read_index(path) for path in streams]
    counts = [len(index.n_tokens) for index in indices]
    if sum(counts) == 0:
        raise UserError(f"source {source.id} has no document left after cleaning: see state/reports/clean.json for why")
    return Documents(
        source=source,
        streams=tuple(streams),
        stream=np.repeat(np.arange(len(streams), dtype=np.int32), counts),
        offset=np.concatenate([np.cumsum(index.n_tokens) - index.n_tokens for index in indices]),
        n_tokens=np.concatenate([index.n_tokens for index in indices]),
        n_bytes=np.concatenate([index.n_bytes for index in indices]),
        hashes=np.concatenate([index.hashes for index in indices]),
    )


def plan_splits(
    documents: Sequence[Documents], mixture: Mixture, config: PipelineConfig, total_tokens: int
) -> dict[str, Plan]:
    """Choose and order the documents of training and validation.

    Validation takes at most `validation_share` of total_tokens, in the mixture's shares as far as the documents go.

    Raises:
        UserError: the mixture cannot hold for total_tokens and on_shortage does not say what to do.
    """
    total_weight = sum(Fraction(str(own.source.weight)) for own in documents)
    weights = [Fraction(str(own.source.weight)) / total_weight for own in documents]
    held_out = [is_validation(own.hashes, config.validation_share) for own in documents]
    orders = []
    for own, weight, held in zip(documents, weights, held_out, strict=True):
        rows = np.flatnonzero(~held)
        needed = weight * total_tokens
        epochs = min(mixture.max_epochs, max(1, math.ceil(needed / max(1, int(own.n_tokens[rows].sum())) + 1)))
        orders.append([rows[shuffled(own.hashes[rows], config.seed, own.source.id, epoch)] for epoch in range(epochs)])
    train = [np.concatenate(order) for order in orders]
    supplies = [
        Supply(own.source.id, weight, own.n_tokens[order])
        for own, weight, order in zip(documents, weights, train, strict=True)
    ]
    if mixture.on_shortage != "stop":
        check_supply(supplies, total_tokens)
    plans = {"train": _gather(documents, train, interleave(supplies, total_tokens, "stop"))}
    if len(plans["train"].n_tokens) == 0:
        raise UserError("the mixture cannot hold even for one document; give more text")
    wanted = math.ceil(total_tokens * Fraction(str(config.validation_share)))
    validation = [
        rows[shuffled(own.hashes[rows], config.seed, own.source.id, 0)]
        for own, rows in zip(documents, map(np.flatnonzero, held_out), strict=True)
    ]
    supplies = [
        Supply(own.source.id, weight, own.n_tokens[order])
        for own, weight, order in zip(documents, weights, validation, strict=True)
    ]
    chosen = interleave(supplies, wanted, "go_on")
    if len(chosen):
        plans["validation"] = _gather(documents, validation, chosen)
    return plans


def _gather(documents: Sequence[Documents], orders: Sequence[np.ndarray], chosen: np.ndarray) -> Plan:
    """Look up the chosen documents: the k-th time that a source is chosen, its k-th document comes."""
    first_stream = np.cumsum([0, *(len(own.streams) for own in documents)])
    columns = {name: np.zeros(len(chosen), np.int64) for name in ("stream", "offset", "n_tokens", "n_bytes")}
    for index, (own, order) in enumerate(zip(documents, orders, strict=True)):
        places = np.flatnonzero(chosen == index)
        rows = order[: len(places)]
        columns["stream"][places] = own.stream[rows] + first_stream[index]
        for name in ("offset", "n_tokens", "n_bytes"):
            columns[name][places] = getattr(own, name)[rows]
    return Plan(source_index=chosen, **columns)


def _map_stream(path: Path) -> np.ndarray:
    return np.memmap(path, TOKEN_DTYPE, mode="r", offset=HEADER_BYTES)


@dataclass(frozen=True)
class PackShard:
    """Write one shard: a slice of the plan."""

    plan: Path
    begin: int
    end: int
    streams: tuple[Path, ...]
    info: CorpusInfo
    position: Position
    key: str
    output: Path

    def run(self) -> Result:
        """Write the shard and its sidecar, going on from what a killed run left."""
        with safetensors.safe_open(self.plan, framework="numpy") as file:
            plan = Plan(**{name: file.get_slice(name)[self.begin : self.end] for name in Plan.__annotations__})
        writer = ShardWriter(
            path=self.output,
            info=self.info,
            position=self.position,
            lengths=plan.n_tokens,
            source_index=plan.source_index,
            n_bytes=plan.n_bytes,
            key=self.key,
        )
        # For this run only: a later one in the same process may find other files under the same names.
        stream = functools.lru_cache(maxsize=OPEN_STREAMS)(_map_stream)
        try:
            for row in range(writer.done, len(plan.n_tokens)):
                begin = int(plan.offset[row])
                writer.add(stream(self.streams[plan.stream[row]])[begin : begin + int(plan.n_tokens[row])])
            sha256 = writer.finish()
        finally:
            writer.abandon()
        counts = {"tokens": int(plan.n_tokens.sum()), "documents": len(plan.n_tokens)}
        return Result({self.output: sha256, sidecar_path(self.output): None}, counts)

    @property
    def n_bytes(self) -> int:
        """About the size of the shard, for progress."""
        return self.info.shard_size_tokens * TOKEN_BYTES
