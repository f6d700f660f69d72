"""Learning-rate multipliers: closed forms of the step, so that a resumed run needs nothing but its step."""

import math
from collections.abc import Callable

from gpt_oss_lite.config import TrainingConfig

Multiplier = Callable[[int], float]


def make_warmup_cosine_lambda(warmup_steps: int, total_steps: int, min_lr_ratio: float) -> Multiplier:
    """Linear warm-up from 0, a cosine from 1 to the floor at total_steps, then the floor.

    The multiplier at step 0 is 0 when there is a warm-up: the first update moves nothing.

    Args:
        warmup_steps: W; the multiplier at step s < W is s / W.
        total_steps: S; from here on the multiplier is min_lr_ratio.
        min_lr_ratio: the floor.
    """

    def multiplier(step: int) -> float:
        if step < warmup_steps:
            return step / warmup_steps
        if step >= total_steps:
            return min_lr_ratio
        progress = (step - warmup_steps) / (total_steps - warmup_steps)
        return min_lr_ratio + (1.0 - min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return multiplier


def make_warmup_constant_lambda(warmup_steps: int) -> Multiplier:
    """Linear warm-up from 0, then 1 for ever."""
    return lambda step: step / warmup_steps if step < warmup_steps else 1.0


def make_warmup_stable_decay_lambda(
    warmup_steps: int, total_steps: int, decay_steps: int, min_lr_ratio: float
) -> Multiplier:
    """Linear warm-up from 0, 1, and a linear decay to the floor over the last decay_steps (Hu et al., 2024,
    MiniCPM)."""

    def multiplier(step: int) -> float:
        if step < warmup_steps:
            return step / warmup_steps
        remaining = min(max(total_steps - step, 0) / decay_steps, 1.0)
        return min_lr_ratio + (1.0 - min_lr_ratio) * remaining

    return multiplier


def make_multiplier(config: TrainingConfig) -> Multiplier:
    """The multiplier that a recipe asks for."""
    if config.schedule == "constant":
        return make_warmup_constant_lambda(config.warmup_steps)
    if config.schedule == "wsd":
        return make_warmup_stable_decay_lambda(
            config.warmup_steps, config.total_steps, config.resolved_decay_steps, config.min_lr_ratio
        )
    return make_warmup_cosine_lambda(config.warmup_steps, config.total_steps, config.min_lr_ratio)
