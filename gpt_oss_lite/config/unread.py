"""Keys that are set and that nothing reads, since another key or the number of ranks switches off what they are for.

A recipe may hold such keys: `--set training.grad_checkpoint=false` must not also ask for another grad_checkpoint_every.
But whoever sets training.muon_momentum and forgets training.optimizer is told.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from gpt_oss_lite.config.training import Recipe
from shared_data.yaml_files import show


class Dependence(NamedTuple):
    """A key that is read only where another has certain values; both as block.key."""

    key: str
    switch: str
    """The other key; RANKS for the number of ranks."""
    allowed: str
    """Values of the other key with which this one is read, in words."""
    is_read: Callable[[Any], bool]


RANKS = "the number of ranks"


def _several(key: str) -> Dependence:
    return Dependence(f"training.{key}", RANKS, "2 or more", lambda ranks: ranks > 1)


def _guarded(key: str) -> Dependence:
    return Dependence(f"training.{key}", "training.nan_guard", "true", bool)


DEPENDENCES = (
    Dependence("training.muon_momentum", "training.optimizer", "muon", lambda optimizer: optimizer == "muon"),
    Dependence("training.min_lr_ratio", "training.schedule", "cosine or wsd", lambda name: name != "constant"),
    _several("aux_loss_scope"),
    _several("parallelism"),
    _several("expert_parallel_size"),
    _several("gradient_bucket_mb"),
    Dependence("training.gradient_bucket_mb", "training.parallelism", "ddp", lambda how: how == "ddp"),
    _several("distributed_timeout_s"),
    Dependence("training.compile_mode", "training.compile", "true", bool),
    Dependence("training.grad_checkpoint_every", "training.grad_checkpoint", "true", bool),
    _guarded("nan_guard_max_consecutive"),
    _guarded("nan_guard_max_rollbacks"),
    _guarded("nan_guard_lr_factor"),
    Dependence("training.nan_guard_lr_factor", "training.nan_guard_max_rollbacks", "greater than 0", bool),
    Dependence("training.nan_guard_lr_steps", "training.nan_guard_lr_factor", "less than 1", lambda by: by < 1),
    Dependence("training.spike_window", "training.spike_zscore", "greater than 0", bool),
    Dependence("training.eval_windows", "training.eval_interval", "greater than 0", bool),
    Dependence("data.validation_data_path", "training.eval_interval", "greater than 0", bool),
    Dependence("training.wandb_project", "training.wandb", "offline or online", lambda mode: mode != "off"),
)


def unread_keys(recipe: Recipe, ranks: int) -> list[str]:
    """A line for each key that differs from its default and has no effect in a run on so many ranks: what it is, and
    with what it would be read."""
    lines: dict[str, str] = {}
    for key, switch, allowed, is_read in DEPENDENCES:
        value = _value(recipe, key)
        state = ranks if switch == RANKS else _value(recipe, switch)
        if key not in lines and value != _default(recipe, key) and not is_read(state):
            reason = f"{switch} is {show(state)}, it would have to be {allowed}"
            lines[key] = f"{key} is {show(value)}, without effect: {reason}"
    return list(lines.values())


def _value(recipe: Recipe, key: str) -> Any:
    block, name = key.split(".")
    return getattr(getattr(recipe, block), name)


def _default(recipe: Recipe, key: str) -> Any:
    block, name = key.split(".")
    return type(getattr(recipe, block)).model_fields[name].default
