"""What a checkpoint holds, taken from and put back into live objects."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gpt_oss_lite.training.seeding import capture_rng
from shared_data.errors import UserError


class DamagedCheckpoint(UserError):
    """A checkpoint that is incomplete, or does not match its own hashes."""


@dataclass(frozen=True)
class Snapshot:
    """All that a checkpoint holds, taken at one instant between two steps."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    rng: dict[str, Any]
    meta: dict[str, Any]


def take_snapshot(
    model: nn.Module,
    optimizer: Optimizer,
    step: int,
    scheduler: LambdaLR | None = None,
    extra_meta: Mapping[str, Any] | None = None,
) -> Snapshot:
    """What a checkpoint of this instant holds. Tensors on the CPU are the live ones, not copies: write before the
    next step."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state:
                state[names[id(parameter)]] = {
                    key: value.cpu() if isinstance(value, Tensor) else value
                    for key, value in optimizer.state[parameter].items()
                }
    return Snapshot(
        step=step,
        model={name: tensor.detach().cpu().contiguous() for name, tensor in _distinct_tensors(model).items()},
        optimizer={"state": state},
        scheduler={} if scheduler is None else scheduler.state_dict(),
        rng=capture_rng(),
        meta=dict(extra_meta or {}),
    )


def _distinct_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with each tied tensor once, under its first name."""
    distinct: dict[str, Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in model.state_dict().items():
        key = tensor.data_ptr(), tensor.shape
        if key not in seen:
            seen.add(key)
            distinct[name] = tensor
    return distinct


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Second names of tied parameters, with the first name of each."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied


def load_model_tensors(model: nn.Module, path: Path) -> None:
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}") from None
    for name, first in _tied_names(model).items():
        if first in tensors:
            tensors[name] = tensors[first]
    _check_shapes(model, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, path)
    model.load_state_dict(tensors, strict=True)


def check_weights_fit(model: nn.Module, path: Path) -> None:
    """Compare the names and shapes in a file with a model's (which may be on the meta device), without reading weights.

    Raises:
        UserError: names the first tensor that differs.
    """
    try:
        with safe_open(path, "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no dict)
    except SafetensorError as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}") from None
    for name, first in _tied_names(model).items():
        if first in shapes:
            shapes[name] = shapes[first]
    _check_shapes(model, shapes, path)


def _check_shapes(model: nn.Module, shapes: dict[str, tuple[int, ...]], path: Path) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in sorted(expected.keys() | shapes.keys()):
        there, here = shapes.get(name, "missing"), expected.get(name, "missing")
        if there != here:
            raise UserError(f"{path} is of another model: {name} is {there} in the file and {here} in the model")


def load_optimizer(model: nn.Module, optimizer: Optimizer, content: dict[str, Any]) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ordered = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    by_index = {index: content["state"][name] for index, name in enumerate(ordered) if name in content["state"]}
    # Hyperparameters come from the recipe and rates from the schedule: only the moments and counts are loaded.
    optimizer.load_state_dict({"state": by_index, "param_groups": optimizer.state_dict()["param_groups"]})


def load_scheduler(scheduler: LambdaLR, content: dict[str, Any]) -> None:
    """Set a schedule to where it was. Base rates stay the recipe's."""
    scheduler.load_state_dict({**content, "base_lrs": scheduler.base_lrs})
    scheduler._last_lr = [
        base * multiplier(scheduler.last_epoch)
        for base, multiplier in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, lr in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = lr
