"""Passkeys: a number told once in a long text and asked for at its end (Mohtashami and Jaggi, 2023, section 4.2).

Training's inserts and the evaluation use the same sentences but never the same number: the digits of a number that is
evaluated on add up to a multiple of ten. Every group of digits that the tokenizer makes into one token occurs on both
sides, so the evaluation asks for copying, not for tokens that training never showed.

A ground module: it knows of nobody, so that packing and evaluation can share it.
"""

import functools
from collections.abc import Sequence

import numpy as np

KEYS = range(10_000, 100_000)
"""Keys have five digits."""
EVALUATION_DIGIT_SUM = 10
"""Keys whose digits add up to a multiple of it are the evaluation's; all others are training's."""

NEEDLE = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
"""The sentences that tell the key."""
QUESTION = "\nWhat is the pass key? The pass key is "
"""What is asked at the end; the key follows at once."""
ANSWER = "{key}.\n"
"""What follows the question in training."""

FILLER = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""What surrounds a key where there is no other text; it may be repeated."""


def is_evaluation_key(key: int) -> bool:
    """Whether a key is the evaluation's, and not training's."""
    return sum(map(int, str(key))) % EVALUATION_DIGIT_SUM == 0


@functools.cache
def training_keys() -> Sequence[int]:
    """The keys that training's inserts may tell."""
    return tuple(key for key in KEYS if not is_evaluation_key(key))


@functools.cache
def evaluation_keys() -> Sequence[int]:
    """The keys that the evaluation may ask for."""
    return tuple(key for key in KEYS if is_evaluation_key(key))


def draw_evaluation_key(rng: np.random.Generator) -> int:
    """One of the evaluation's keys, each equally likely."""
    return int(rng.choice(evaluation_keys()))
