"""Exact removal of duplicates over all sources, out of core.

Each piece of filtered text has a file of its documents' SHA-256 digests, grouped by bucket. A task compares some
buckets: of the documents with one digest, the first in the order of (source, piece, line) stays, and the places of
the others are written. Buckets are read one at a time, so memory is that of the largest bucket; nothing depends on
how buckets are shared among tasks.

Before the exact comparison a counting Bloom filter (Fan et al., 2000) picks the documents that can have a double:
every double counts each of its cells twice, so none is missed, and a unique text that collides is only compared in
vain.
"""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
from safetensors.numpy import save as save_safetensors

from shared_data.executor import Result
from shared_data.files import write_atomic

DIGEST_BYTES = 32
MAX_CELLS = 1 << 30


def bucket_of(digests: np.ndarray, n_buckets: int) -> np.ndarray:
    """Bucket of each digest (N, 32) uint8: its first 16 bits, scaled to n_buckets."""
    leading = digests[:, 0].astype(np.int64) << 8 | digests[:, 1]
    return leading * n_buckets >> 16


def write_digests(path: Path, digests: Sequence[bytes], n_buckets: int, bands: np.ndarray | None = None) -> None:
    """Write the digests of a piece of N documents, grouped by bucket, each with its line number.

    `bands`, if given, goes with them: uint64 (N, bands), in the order of the lines (see `near`).
    """
    array = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES)
    buckets = bucket_of(array, n_buckets)
    order = np.argsort(buckets, kind="stable")
    offsets = np.searchsorted(buckets[order], np.arange(n_buckets + 1))
    content: dict[str, np.ndarray] = {
        "digests": np.ascontiguousarray(array[order]),
        "lines": order.astype(np.int64),
        "offsets": offsets.astype(np.int64),
    }
    if bands is not None:
        content["bands"] = bands
    write_atomic(path, save_safetensors(content, metadata={"digests": json.dumps({"version": 1})}))


def count_digests(path: Path) -> int:
    """Number of documents in a digests file."""
    with safetensors.safe_open(path, framework="numpy") as file:
        return int(file.get_slice("lines").get_shape()[0])


@dataclass(frozen=True)
class CompareBuckets:
    """Find the duplicates of some buckets: writes (piece, line) of each, sorted."""

    digests: tuple[Path, ...]
    """The digests file of each piece, in the order of (source, piece)."""
    first_bucket: int
    end_bucket: int
    bloom_capacity: int
    """Documents per bucket that the pre-filter is sized for; 0: no pre-filter."""
    bloom_error_rate: float
    output: Path

    def run(self) -> Result:
        """Write the duplicates."""
        files = [safetensors.safe_open(path, framework="numpy") for path in self.digests]
        offsets = [file.get_tensor("offsets") for file in files]
        found: list[np.ndarray] = []
        for bucket in range(self.first_bucket, self.end_bucket):
            digests, pieces, lines = [], [], []
            for piece, file in enumerate(files):
                begin, end = offsets[piece][bucket : bucket + 2].tolist()
                if begin < end:
                    digests.append(file.get_slice("digests")[begin:end])
                    lines.append(file.get_slice("lines")[begin:end])
                    pieces.append(np.full(end - begin, piece, np.int64))
            if digests:
                places = np.stack([np.concatenate(pieces), np.concatenate(lines)], axis=1)
                again = find_duplicates(np.concatenate(digests), self.bloom_capacity, self.bloom_error_rate)
                found.append(places[again])
        places = np.concatenate(found) if found else np.zeros((0, 2), np.int64)
        places = places[np.lexsort((places[:, 1], places[:, 0]))]
        content = {"pieces": np.ascontiguousarray(places[:, 0]), "lines": np.ascontiguousarray(places[:, 1])}
        write_atomic(self.output, save_safetensors(content))
        return Result({self.output: None}, {"duplicates": len(places)})


def find_duplicates(digests: np.ndarray, bloom_capacity: int, bloom_error_rate: float) -> np.ndarray:
    """Indices of all but the first of each group of equal digests.

    Args:
        digests: (N, 32) uint8.
        bloom_capacity: documents that the pre-filter is sized for; 0: no pre-filter.
        bloom_error_rate: share of unique documents that the pre-filter lets through at that size.

    Returns:
        int64 indices, in no particular order. Exact, whatever the pre-filter's size.
    """
    words = np.ascontiguousarray(digests).view("<u8")
    rows = np.arange(len(words))
    if bloom_capacity and len(words) > 1:
        rows = rows[_may_repeat(words, bloom_capacity, bloom_error_rate)]
    candidates = words[rows]
    # Sorted by digest, then by place: within a group of equals the first is the one that stays.
    order = np.lexsort((rows, candidates[:, 3], candidates[:, 2], candidates[:, 1], candidates[:, 0]))
    ordered = candidates[order]
    again = np.zeros(len(order), bool)
    again[1:] = (ordered[1:] == ordered[:-1]).all(axis=1)
    return rows[order[again]]


def _may_repeat(words: np.ndarray, capacity: int, error_rate: float) -> np.ndarray:
    """Counting Bloom filter: True where every cell of a digest is counted twice or more; (N,) bool."""
    size = min(capacity, len(words))
    n_cells = min(MAX_CELLS, max(64, math.ceil(size * math.log(1 / error_rate) / math.log(2) ** 2)))
    n_hashes = max(1, round(math.log2(1 / error_rate)))
    counts = np.zeros(n_cells, np.uint32)
    # A digest is random already: two of its words give all positions (Kirsch and Mitzenmacher, 2006).
    first, step = words[:, 2], words[:, 3] | np.uint64(1)
    hashes = [((first + np.uint64(i) * step) % np.uint64(n_cells)).astype(np.int64) for i in range(n_hashes)]
    for cells in hashes:
        counts += np.bincount(cells, minlength=n_cells).astype(np.uint32)
    result = np.ones(len(words), bool)
    for cells in hashes:
        result &= counts[cells] >= 2
    return result


def duplicates_by_piece(paths: Sequence[Path], n_pieces: int) -> list[np.ndarray]:
    """Sorted line numbers of the duplicates of each piece."""
    pieces, lines = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for path in paths:
        with safetensors.safe_open(path, framework="numpy") as file:
            pieces.append(file.get_tensor("pieces"))
            lines.append(file.get_tensor("lines"))
    piece, line = np.concatenate(pieces), np.concatenate(lines)
    order = np.lexsort((line, piece))
    bounds = np.searchsorted(piece[order], np.arange(n_pieces + 1))
    return [line[order[begin:end]] for begin, end in itertools.pairwise(bounds)]
