"""Which document comes next: sources mixed by tokens, documents shuffled within a source.

The rule is weighted fair queueing in the form WF2Q (Bennett and Zhang, INFOCOM 1996), with documents for packets and
tokens for time: of the sources that are not ahead of their share, take the one whose next document would end first if
every source ran at exactly its share. It is serial, exact (integers only) and deterministic, and keeps each source
within the longest document of its share after every document.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from shared_data.errors import UserError

_HASH_RANGE = 2**64


@dataclass(frozen=True)
class Supply:
    """What a source can give."""

    id: str
    weight: Fraction
    lengths: np.ndarray
    """Tokens of its documents in the order of their use (epoch after epoch where they are repeated), int64."""


def is_validation(hashes: np.ndarray, share: float) -> np.ndarray:
    """Which documents are kept for validation: those whose hash (uint64) lies in the first `share` of the range."""
    limit = int(Fraction(str(share)) * _HASH_RANGE)
    return hashes < np.uint64(min(limit, _HASH_RANGE - 1))


def shuffled(hashes: np.ndarray, seed: int, source: str, epoch: int) -> np.ndarray:
    """Order of a source's documents in an epoch: a permutation that depends on nothing but the arguments.

    Sorted by a mix of each document's hash with the seed, so that it is the same however the documents lie in files.
    """
    digest = hashlib.sha256(f"{seed}/{epoch}/{source}".encode()).digest()
    return np.argsort(_mix(hashes ^ np.frombuffer(digest, "<u8", count=1)), kind="stable")


def _mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's output function (Steele, Lea and Flood, 2014), modulo 2^64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def check_supply(supplies: Sequence[Supply], total_tokens: int) -> None:
    """Refuse a mixture that cannot hold to its end.

    Raises:
        UserError: names each source that is short, and by how many tokens.
    """
    longest = _longest(supplies)
    short = []
    for supply in supplies:
        needed, there = math.ceil(supply.weight * total_tokens), int(supply.lengths.sum())
        if there + longest < needed:
            short.append(f"{supply.id} needs {needed:,} tokens and has {there:,} (short by {needed - there:,})")
    if short:
        raise UserError(
            f"the mixture cannot hold for {total_tokens:,} training tokens: {'; '.join(short)}. Give more text, a "
            "smaller --total-tokens, or on_shortage: stop or repeat in the mixture file"
        )


def interleave(
    supplies: Sequence[Supply],
    total_tokens: int,
    when_short: Literal["stop", "go_on"],
    charged: Sequence[int] | None = None,
) -> np.ndarray:
    """Choose the source of each document until `total_tokens` are reached.

    Args:
        supplies: the sources, in the mixture's order, weights adding up to 1.
        total_tokens: the first document to reach it is the last.
        when_short: where a source has run out and the shares no longer hold within the longest document, stop; or go on
            with the others.
        charged: tokens that each source has given before, part of total_tokens. One that is behind comes first.

    Returns:
        int32 index of the source of each document; a source's documents are used in their order.
    """
    lengths = [supply.lengths.tolist() for supply in supplies]
    # Time in units in which each source's cost of a token is an integer: cost = unit / weight.
    unit = math.lcm(*(supply.weight.numerator for supply in supplies))
    costs = [int(unit / supply.weight) for supply in supplies]
    longest = _longest(supplies)
    charged = charged or [0] * len(supplies)
    starts, used = [own * cost for own, cost in zip(charged, costs, strict=True)], [0] * len(supplies)
    active = [index for index, own in enumerate(lengths) if own]
    chosen: list[int] = []
    total = sum(charged)
    while total < total_tokens and active:
        now = total * unit
        due = [index for index in active if starts[index] <= now] or [min(active, key=lambda index: starts[index])]
        source = min(due, key=lambda index: starts[index] + lengths[index][used[index]] * costs[index])
        length = lengths[source][used[source]]
        after = now + length * unit
        if when_short == "stop" and len(active) < len(supplies):
            ends = [start + (length * costs[source] if index == source else 0) for index, start in enumerate(starts)]
            if any(abs(end - after) > longest * cost for end, cost in zip(ends, costs, strict=True)):
                break
        chosen.append(source)
        total += length
        starts[source] += length * costs[source]
        used[source] += 1
        if used[source] == len(lengths[source]):
            active.remove(source)
    return np.array(chosen, np.int32)


def _longest(supplies: Sequence[Supply]) -> int:
    return max((int(supply.lengths.max()) for supply in supplies if len(supply.lengths)), default=0)
