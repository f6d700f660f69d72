"""Passkeys: a number hidden in a long text, to be found again (Mohtashami and Jaggi, 2023).

Training inserts and the evaluation use the same sentences but never the same number: the digits of a number that is
evaluated on add up to a multiple of ten. Every group of digits that the tokenizer makes into one token occurs on both
sides, so the evaluation asks for copying, not for tokens that training never showed.
"""

import numpy as np

KEY_MIN, KEY_MAX = 10_000, 99_999
"""Keys have five digits."""
EVALUATION_DIGIT_SUM = 10
"""Keys whose digits add up to a multiple of it are the evaluation's; all others are training's."""

NEEDLE = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is "
"""The key follows at once."""


def is_evaluation_key(key: int) -> bool:
    """Whether a key is the evaluation's, and not training's."""
    return sum(map(int, str(key))) % EVALUATION_DIGIT_SUM == 0


def draw_key(rng: np.random.Generator, *, evaluation: bool) -> int:
    """Draw a key of one side; every one of them is equally likely."""
    while True:
        key = int(rng.integers(KEY_MIN, KEY_MAX + 1))
        if is_evaluation_key(key) == evaluation:
            return key
