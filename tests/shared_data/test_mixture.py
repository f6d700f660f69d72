"""The order of documents: shares by tokens at every document, shuffled within a source, stated ends."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_data.errors import UserError
from shared_data.mixture import Supply, check_supply, interleave, is_validation, shuffled

SHARES = ["0.5", "0.2", "0.15", "0.1", "0.05"]


def supplies(lengths, shares):
    weights = [Fraction(share) for share in shares]
    return [
        Supply(f"s{index}", weight, np.array(own, np.int64))
        for index, (weight, own) in enumerate(zip(weights, lengths, strict=True))
    ]


def largest_deviation(own, chosen) -> float:
    """Distance from the shares in tokens, after each document, over all sources."""
    positions, tokens, worst = [0] * len(own), [0] * len(own), Fraction(0)
    for source in chosen.tolist():
        tokens[source] += int(own[source].lengths[positions[source]])
        positions[source] += 1
        worst = max(worst, *(abs(t - supply.weight * sum(tokens)) for t, supply in zip(tokens, own, strict=True)))
    return worst


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([1, 2, 3, 50, 99, 100]), min_size=1, max_size=5), min_size=5, max_size=5),
    st.sampled_from([SHARES, ["0.96", "0.01", "0.01", "0.01", "0.01"], ["0.2"] * 5]),
)
def test_d22_the_mixture_holds_within_the_longest_document_at_every_document(patterns, shares):
    own = supplies([pattern * (4000 // sum(pattern) + 1) for pattern in patterns], shares)
    chosen = interleave(own, 3000, "stop")
    longest = max(int(supply.lengths.max()) for supply in own)
    assert largest_deviation(own, chosen) <= longest
    if min(float(supply.lengths.sum()) / float(supply.weight) for supply in own) > 3000 + 100:
        used = np.bincount(chosen, minlength=5)
        assert sum(int(supply.lengths[:n].sum()) for supply, n in zip(own, used, strict=True)) >= 3000


def test_d22_the_recipes_mixture_of_documents_of_any_length():
    rng = np.random.default_rng(0)
    own = supplies([rng.lognormal(6, 1.2, 3000).astype(np.int64) + 1 for _ in SHARES], SHARES)
    chosen = interleave(own, 2_000_000, "stop")
    tokens = [int(own[s].lengths[: (chosen == s).sum()].sum()) for s in range(5)]
    longest = max(int(supply.lengths.max()) for supply in own)
    assert 2_000_000 <= sum(tokens) < 2_000_000 + longest
    for share, got in zip(SHARES, tokens, strict=True):
        assert abs(got - float(share) * sum(tokens)) <= longest
    assert largest_deviation(own, chosen) <= longest


def test_d23_a_source_that_is_short_is_named_with_what_it_lacks():
    own = supplies([[10] * 100, [10] * 20], ["0.5", "0.5"])
    with pytest.raises(UserError, match=r"s1 needs 500 tokens and has 200 \(short by 300\)"):
        check_supply(own, 1000)
    check_supply(own, 400)


def test_d23_stop_ends_where_the_shares_no_longer_hold():
    own = supplies([[10] * 100, [10] * 20], ["0.5", "0.5"])
    chosen = interleave(own, 1000, "stop")
    assert largest_deviation(own, chosen) <= 10
    assert 400 <= 10 * len(chosen) <= 420


def test_going_on_uses_everything_there_is():
    own = supplies([[10] * 3, [], [5] * 2], ["0.5", "0.25", "0.25"])
    assert np.bincount(interleave(own, 10**9, "go_on"), minlength=3).tolist() == [3, 0, 2]


def test_a_source_that_is_behind_comes_first_and_the_whole_holds_the_mixture():
    own = supplies([[10] * 1000, [10] * 1000], ["0.75", "0.25"])
    chosen = interleave(own, 4000, "stop", charged=[800, 0])
    tokens = [800 + 10 * int((chosen == 0).sum()), 10 * int((chosen == 1).sum())]
    assert tokens == [3000, 1000]
    assert (chosen[:26] == 1).all(), "800 of 0.75 and 0 of 0.25: even after 267 tokens"
    after = np.cumsum(np.where(chosen == 1, 10, 0))[27:]
    assert np.abs(after - 0.25 * (800 + 10 * np.arange(28, len(chosen) + 1))).max() <= 10


def test_the_order_depends_on_seed_source_and_epoch_only():
    hashes = np.random.default_rng(0).integers(0, 2**64, 1000, np.uint64)
    first = shuffled(hashes, 42, "web", 0)
    assert sorted(first.tolist()) == list(range(1000))
    assert (first == shuffled(hashes, 42, "web", 0)).all()
    for other in (shuffled(hashes, 43, "web", 0), shuffled(hashes, 42, "code", 0), shuffled(hashes, 42, "web", 1)):
        assert (first != other).mean() > 0.9
    permuted = np.random.default_rng(1).permutation(1000)
    again = shuffled(hashes[permuted], 42, "web", 0)
    assert (hashes[permuted][again] == hashes[first]).all(), "the order in the files does not matter"
    assert abs(np.corrcoef(first, np.arange(1000))[0, 1]) < 0.1, "it is a shuffle"


def test_validation_takes_its_share_by_hash():
    hashes = np.random.default_rng(0).integers(0, 2**64, 200_000, np.uint64)
    assert is_validation(hashes, 0.01).mean() == pytest.approx(0.01, abs=0.001)
    assert not is_validation(hashes, 0.0).any()
    assert is_validation(np.array([0, 2**63 - 1, 2**63, 2**64 - 1], np.uint64), 0.5).tolist() == [
        True,
        True,
        False,
        False,
    ]
