"""Exact removal of duplicates."""

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_data.dedup import CompareBuckets, bucket_of, duplicates_by_piece, find_duplicates, write_digests


def digest(text: object) -> bytes:
    return hashlib.sha256(str(text).encode()).digest()


def as_array(digests: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)


def duplicates_the_plain_way(digests: list[bytes]) -> list[int]:
    seen: set[bytes] = set()
    return [index for index, own in enumerate(digests) if own in seen or seen.add(own)]  # type: ignore[func-returns-value]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=60), st.sampled_from([(0, 0.001), (1, 0.5), (5, 0.9), (200_000, 0.001)]))
def test_the_first_stays_whatever_the_prefilter(values, bloom):
    digests = [digest(value) for value in values]
    found = find_duplicates(as_array(digests), *bloom)
    assert sorted(found.tolist()) == duplicates_the_plain_way(digests)


def test_d20_two_million_unique_documents_lose_none():
    unique = np.random.default_rng(0).integers(0, 256, (2_000_000, 32), np.uint8)
    buckets = bucket_of(unique, 256)
    order = np.argsort(buckets, kind="stable")
    bounds = np.searchsorted(buckets[order], np.arange(257))
    dropped = sum(
        len(find_duplicates(unique[order[begin:end]], 200_000, 0.001)) for begin, end in itertools.pairwise(bounds)
    )
    assert dropped == 0


@pytest.mark.parametrize("n_buckets", [1, 7, 256, 65536])
def test_neither_buckets_nor_tasks_change_what_is_dropped(tmp_path, n_buckets):
    pieces = [[digest(value) for value in values] for values in ([1, 2, 3, 2], [], [3, 4, 1, 5, 5], [2, 6])]
    paths = []
    for index, digests in enumerate(pieces):
        paths.append(tmp_path / f"digests-{index}.idx")
        write_digests(paths[-1], digests, n_buckets)
    bounds = sorted({0, n_buckets // 3, n_buckets // 2, n_buckets})
    outputs = []
    for first, end in itertools.pairwise(bounds):
        outputs.append(tmp_path / f"duplicates-{first}.idx")
        CompareBuckets(tuple(paths), first, end, 100, 0.01, outputs[-1]).run()
    found = duplicates_by_piece(outputs, len(pieces))
    assert [lines.tolist() for lines in found] == [[3], [], [0, 2, 4], [0]]


def test_buckets_share_the_digests_evenly():
    digests = np.random.default_rng(1).integers(0, 256, (50_000, 32), np.uint8)
    for n_buckets in (1, 3, 256):
        counts = np.bincount(bucket_of(digests, n_buckets), minlength=n_buckets)
        assert len(counts) == n_buckets
        assert counts.max() < 1.5 * 50_000 / n_buckets
