"""Passkeys: a number told once in a long text and asked for at its end, in training and in evaluation.

The sentences are those of Mohtashami and Jaggi (2023, "Landmark Attention", section 4.2). Training and evaluation draw
their keys from ranges without a common element, so that an answer right in evaluation was never seen in training.

A ground module: it knows of nobody, so that packing and evaluation can share it.
"""

TRAINING_KEYS = range(10_000, 100_000, 2)
"""Keys that the long-context shards hold: the even numbers of five digits."""
EVALUATION_KEYS = range(10_001, 100_000, 2)
"""Keys that evaluation asks for: the odd ones."""

FILLER = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""What surrounds a key where there is no other text; it may be repeated."""


def statement(key: int) -> str:
    """The sentences that tell the key."""
    return f" The pass key is {key}. Remember it. {key} is the pass key."


def question() -> str:
    """What is asked at the end; the answer follows at once."""
    return " What is the pass key? The pass key is"


def answer(key: int) -> str:
    """What should follow the question."""
    return f" {key}."
