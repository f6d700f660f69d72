"""Stage 4, its plan and its tasks: which document goes where, and one task per shard.

The plan is serial and small: it is made of documents' lengths alone. It lies in state/pack/ as arrays with one entry
per document of the corpus, in the corpus's order; each shard is a slice of it, written by a task of its own.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors
from safetensors.numpy import save as save_safetensors

from shared_data.config import Mixture, PipelineConfig, Source
from shared_data.config.schema import TokenizerConfig
from shared_data.errors import UserError
from shared_data.executor import Result
from shared_data.files import write_atomic
from shared_data.long_context import Insert, pack_windows, window_counts, window_inserts
from shared_data.manifest import TOKEN_DTYPE, CorpusInfo, Position, sidecar_path
from shared_data.mixture import Supply, check_supply, interleave, is_validation, shuffled
from shared_data.shard_writer import ShardWriter, safe_progress, split_into_shards
from shared_data.tokenizing import HEADER_BYTES, read_ids, read_index, tokenizer_of

OPEN_STREAMS = 256
INSERT = -1
INSERT_ID = "passkey"
_OF_A_DOCUMENT = ("offset", "row", "n_tokens", "n_bytes")
"""Columns of a plan that are the document's own, in the plan's order."""


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
    row: np.ndarray
    """Number of each document in its stream, int64 (N,)."""
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
    """Index into the streams of all sources, one after the other; or INSERT: the document is a passkey insert."""
    offset: np.ndarray
    """First token in the stream, or the insert's code."""
    row: np.ndarray
    """Number of the document in its stream; 0 for an insert."""
    n_tokens: np.ndarray
    n_bytes: np.ndarray

    @property
    def is_insert(self) -> np.ndarray:
        """Which documents are passkey inserts, bool (M,)."""
        return self.stream == INSERT

    def write(self, path: Path) -> None:
        """Write the plan's arrays."""
        write_atomic(path, save_safetensors(dict(vars(self))))


class ShardSlice(NamedTuple):
    """A shard as a slice of the plan."""

    begin: int
    end: int
    n_tokens: int


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
        row=np.concatenate([np.arange(count, dtype=np.int64) for count in counts]),
        n_tokens=np.concatenate([index.n_tokens for index in indices]),
        n_bytes=np.concatenate([index.n_bytes for index in indices]),
        hashes=np.concatenate([index.hashes for index in indices]),
    )


def plan_splits(
    documents: Sequence[Documents], mixture: Mixture, config: PipelineConfig, total_tokens: int
) -> dict[str, Plan]:
    """Choose and order the documents of training, of its long-context share, and of validation.

    Long-context windows take whole documents first, at most `share` of total_tokens, each source its weight of them.
    The others go on from there, so that both together hold the mixture. Validation takes at most `validation_share` of
    total_tokens, in the mixture's shares as far as the documents go.

    Raises:
        UserError: the mixture cannot hold for total_tokens and on_shortage does not say what to do.
    """
    total_weight = sum(Fraction(str(own.source.weight)) for own in documents)
    weights = [Fraction(str(own.source.weight)) / total_weight for own in documents]
    held_out = [is_validation(own.hashes, config.validation_share) for own in documents]
    orders = [
        _epochs(own, np.flatnonzero(~held), weight * total_tokens, mixture, config)
        for own, weight, held in zip(documents, weights, held_out, strict=True)
    ]
    if mixture.on_shortage != "stop":
        check_supply(_supplies(documents, weights, [np.concatenate(order) for order in orders]), total_tokens)
    lasting = min(
        sum(int(own.n_tokens[epoch].sum()) for epoch in order) / weight
        for own, order, weight in zip(documents, orders, weights, strict=True)
    )
    reachable = min(total_tokens, math.floor(lasting))
    plans = {}
    windows = _choose_windows(documents, [order[0] for order in orders], weights, reachable, config)
    if any(windows):
        plans["long"] = _plan_windows(documents, windows, config)
    train = [np.concatenate([_without(order[0], own), *order[1:]]) for order, own in zip(orders, windows, strict=True)]
    charged = [len(own) * config.pack.long_context.window_tokens for own in windows]
    chosen = interleave(_supplies(documents, weights, train), total_tokens, "stop", charged)
    plans["train"] = _gather(documents, train, chosen)
    if len(plans["train"].n_tokens) == 0:
        raise UserError("the mixture cannot hold even for one document; give more text")
    validation = _plan_validation(documents, weights, held_out, config, total_tokens)
    return {**plans, "validation": validation} if len(validation.n_tokens) else plans


def _plan_validation(
    documents: Sequence[Documents],
    weights: Sequence[Fraction],
    held_out: Sequence[np.ndarray],
    config: PipelineConfig,
    total_tokens: int,
) -> Plan:
    wanted = math.ceil(total_tokens * Fraction(str(config.validation_share)))
    orders = [
        rows[shuffled(own.hashes[rows], config.seed, own.source.id, 0)]
        for own, rows in zip(documents, map(np.flatnonzero, held_out), strict=True)
    ]
    return _gather(documents, orders, interleave(_supplies(documents, weights, orders), wanted, "go_on"))


def _epochs(
    own: Documents, rows: np.ndarray, needed: Fraction, mixture: Mixture, config: PipelineConfig
) -> list[np.ndarray]:
    """The rows of a source in the order of their use, epoch by epoch."""
    epochs = min(mixture.max_epochs, max(1, math.ceil(needed / max(1, int(own.n_tokens[rows].sum())) + 1)))
    return [rows[shuffled(own.hashes[rows], config.seed, own.source.id, epoch)] for epoch in range(epochs)]


def _supplies(
    documents: Sequence[Documents], weights: Sequence[Fraction], orders: Sequence[np.ndarray]
) -> list[Supply]:
    return [
        Supply(own.source.id, weight, own.n_tokens[order])
        for own, weight, order in zip(documents, weights, orders, strict=True)
    ]


def _choose_windows(
    documents: Sequence[Documents],
    orders: Sequence[np.ndarray],
    weights: Sequence[Fraction],
    total_tokens: int,
    config: PipelineConfig,
) -> list[list[np.ndarray]]:
    """The rows of each long-context window, by source."""
    window_tokens = config.pack.long_context.window_tokens
    counts = window_counts(weights, config.pack.long_context.share, window_tokens, total_tokens)
    return [
        [order[places] for places in pack_windows(own.n_tokens[order], count, window_tokens)]
        for own, order, count in zip(documents, orders, counts, strict=True)
    ]


def _without(order: np.ndarray, windows: Sequence[np.ndarray]) -> np.ndarray:
    return order[~np.isin(order, np.concatenate(windows))] if windows else order


def _plan_windows(
    documents: Sequence[Documents], windows: Sequence[Sequence[np.ndarray]], config: PipelineConfig
) -> Plan:
    """The long-context documents in order: windows mixed like documents, each with its passkey."""
    window_tokens = config.pack.long_context.window_tokens
    total = sum(map(len, windows))
    supplies = [
        Supply(own.source.id, Fraction(len(some), total), np.full(len(some), window_tokens))
        for own, some in zip(documents, windows, strict=True)
        if some
    ]
    indices = [index for index, some in enumerate(windows) if some]
    tokenizer = tokenizer_of(config.tokenizer)
    streams, used = np.cumsum([0, *(len(own.streams) for own in documents)]), [0] * len(documents)
    lines: list[tuple[int, ...]] = []
    for supply in interleave(supplies, total * window_tokens, "go_on").tolist():
        index = indices[supply]
        own, number = documents[index], used[index]
        rows = windows[index][number]
        used[index] += 1
        first = streams[index] + own.stream[rows]
        columns = (first, *(getattr(own, name)[rows] for name in _OF_A_DOCUMENT))
        window = [(index, *line) for line in zip(*(column.tolist() for column in columns), strict=True)]
        if gap := window_tokens - int(own.n_tokens[rows].sum()):
            tells, asks, place = window_inserts(gap, len(rows), config.seed, own.source.id, number)
            about = [(index, INSERT, each.code, 0, each.n_tokens, each.n_bytes(tokenizer)) for each in (tells, asks)]
            window = [*window[:place], about[0], *window[place:], about[1]]
        lines += window
    return Plan(*(np.ascontiguousarray(column) for column in np.array(lines, np.int64).T))


def _gather(documents: Sequence[Documents], orders: Sequence[np.ndarray], chosen: np.ndarray) -> Plan:
    """Look up the chosen documents: the k-th time that a source is chosen, its k-th document comes."""
    first_stream = np.cumsum([0, *(len(own.streams) for own in documents)])
    columns = {name: np.zeros(len(chosen), np.int64) for name in ("stream", *_OF_A_DOCUMENT)}
    for index, (own, order) in enumerate(zip(documents, orders, strict=True)):
        places = np.flatnonzero(chosen == index)
        rows = order[: len(places)]
        columns["stream"][places] = own.stream[rows] + first_stream[index]
        for name in _OF_A_DOCUMENT:
            columns[name][places] = getattr(own, name)[rows]
    return Plan(source_index=chosen, **columns)


def cut_into_shards(plan: Plan, split: str, info: CorpusInfo) -> list[ShardSlice]:
    """What each shard is: whole documents, of the long-context share whole windows."""
    if split == "long":
        pairs = _cut_between_windows(plan, info)
    else:
        pairs = [(part.start, part.stop) for part in split_into_shards(plan.n_tokens, info.shard_size_tokens)]
    return [ShardSlice(begin, end, int(plan.n_tokens[begin:end].sum())) for begin, end in pairs]


def _cut_between_windows(plan: Plan, info: CorpusInfo) -> list[tuple[int, int]]:
    ends = np.cumsum(plan.n_tokens)
    size = max(1, info.shard_size_tokens // info.window_tokens) * info.window_tokens
    cuts = [*range(size, int(ends[-1]), size), int(ends[-1])]
    return list(itertools.pairwise([0, *(np.searchsorted(ends, cuts) + 1).tolist()]))


def _ids_of(plan: Plan, streams: Sequence[Path]) -> list[str]:
    """Where each document of a plan comes from, in the plan's order."""
    found = np.full(len(plan.stream), INSERT_ID, dtype=object)
    for number in np.unique(plan.stream[~plan.is_insert]):
        places = np.flatnonzero(plan.stream == number)
        found[places] = read_ids(streams[number], plan.row[places])
    return found.tolist()


def _map_stream(path: Path) -> np.ndarray:
    return np.memmap(path, TOKEN_DTYPE, mode="r", offset=HEADER_BYTES)


@dataclass(frozen=True)
class PackShard:
    """Write one shard: a slice of the plan."""

    plan: Path
    begin: int
    end: int
    streams: tuple[Path, ...]
    tokenizer: TokenizerConfig
    """Of the passkey inserts."""
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
            inserts=np.flatnonzero(plan.is_insert),
            ids=_ids_of(plan, self.streams),
            key=self.key,
        )
        # For this run only: a later one in the same process may find other files under the same names.
        stream = functools.lru_cache(maxsize=OPEN_STREAMS)(_map_stream)
        try:
            for row in range(writer.done, len(plan.n_tokens)):
                begin, length = int(plan.offset[row]), int(plan.n_tokens[row])
                if plan.stream[row] == INSERT:
                    writer.add(Insert.of_code(begin, length).ids(tokenizer_of(self.tokenizer)))
                else:
                    writer.add(stream(self.streams[plan.stream[row]])[begin : begin + length])
            sha256 = writer.finish()
        finally:
            writer.abandon()
        counts = {"tokens": int(plan.n_tokens.sum()), "documents": len(plan.n_tokens)}
        return Result({self.output: sha256, sidecar_path(self.output): None}, counts)

    def resumed_bytes(self) -> int:
        """What is safe of the shard already."""
        return safe_progress(self.output, self.key)[1]
