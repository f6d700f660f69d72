"""Keys that are set and that nothing reads, since another key or the number of ranks switches off what they are for.

A recipe may hold such keys: `--set training.grad_checkpoint=false` must not also ask for another grad_checkpoint_every.
But whoever sets training.muon_momentum and forgets training.optimizer is told: where both stand in one file, and where
`--set` has the key. A file's key that `--set` leaves without effect has misled nobody.
"""

from collections.abc import Callable, Sequence
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


def unread_keys(recipe: Recipe, ranks: int, overrides: Sequence[str] = (), recorded: bool = False) -> list[str]:
    """A line for each key that differs from its default and has no effect in a run on so many ranks, though whoever set
    it may think so: what it is, and with what it would be read.

    Args:
        overrides: `block.key=value` each, what of the recipe was set beside its file.
        recorded: whether that file is a run's own, whose keys are there because a run writes them all.
    """
    lines: dict[str, str] = {}
    overridden = {override.partition("=")[0] for override in overrides}
    for key, switch, allowed, is_read in DEPENDENCES:
        value = _value(recipe, key)
        state = ranks if switch == RANKS else _value(recipe, switch)
        if value == _default(recipe, key) or is_read(state):
            continue
        if not overridden & _names(key) and (recorded or overridden & _names(switch)):
            continue
        reason = f"{switch} is {show(state)}, it would have to be {allowed}"
        lines.setdefault(key, f"{key} is {show(value)}, without effect: {reason}")
    return list(lines.values())


def _names(key: str) -> set[str]:
    """What `--set` may name to set a key: the key, or its whole block."""
    return {key, key.partition(".")[0]}


def _value(recipe: Recipe, key: str) -> Any:
    block, name = key.split(".")
    return getattr(getattr(recipe, block), name)


def _default(recipe: Recipe, key: str) -> Any:
    block, name = key.split(".")
    return type(getattr(recipe, block)).model_fields[name].default
