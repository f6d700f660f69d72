"""What a checkpoint holds, taken from and put back into live objects."""

import copy
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.memory import meta_model
from gpt_oss_lite.training.optimizer import moments_of
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

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensors of weights and moments."""
        moments = (value for entry in self.optimizer["state"].values() for value in entry.values())
        return sum(t.nbytes for t in (*self.model.values(), *moments) if isinstance(t, Tensor))


class HostBuffers:
    """Memory of the host that snapshots are copied into, kept from one save to the next.

    Beside a GPU it is page-locked: copies then run at the full speed of the bus, and all of them are waited for once.
    (PyTorch rounds each page-locked block up to a power of two.)
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def reserve(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Take the memory now, so that the first save is no slower than the others: weights and moments."""
        for name, tensor in _distinct_tensors(model).items():
            self._buffer(name, tensor).zero_()  # a page is the process's when it is first written
        moments = moments_of(optimizer)
        for name, parameter in model.named_parameters():
            for key in moments[id(parameter)]:
                self._buffer(f"{key} of {name}", parameter.detach()).zero_()

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """A copy of a tensor on the host. From a GPU it is under way until the device is synchronised."""
        return self._buffer(name, tensor).copy_(tensor.detach(), non_blocking=True)

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer


def take_snapshot(
    model: nn.Module,
    optimizer: Optimizer,
    step: int,
    scheduler: LambdaLR | None = None,
    extra_meta: Mapping[str, Any] | None = None,
    buffers: HostBuffers | None = None,
) -> Snapshot:
    """A copy of what a checkpoint of this instant holds; training may go on while it is written.

    Args:
        model, optimizer, scheduler: as they stand between two steps.
        step: finished steps.
        extra_meta: JSON values for meta_step_N.json.
        buffers: where the copy goes; an earlier snapshot in them must have been written. None: new memory.
    """
    buffers = buffers or HostBuffers()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state:
                name = names[id(parameter)]
                state[name] = {
                    key: buffers.copy(f"{key} of {name}", value) if isinstance(value, Tensor) else value
                    for key, value in optimizer.state[parameter].items()
                }
    snapshot = Snapshot(
        step=step,
        model={name: buffers.copy(name, tensor) for name, tensor in _distinct_tensors(model).items()},
        optimizer={"state": state},
        scheduler={} if scheduler is None else copy.deepcopy(scheduler.state_dict()),
        rng=capture_rng(),
        meta=copy.deepcopy(dict(extra_meta or {})),
    )
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return snapshot


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


def read_tensors(path: Path) -> dict[str, Any]:
    """The content of a .pt file of ours: tensors, numbers and strings, onto the CPU. Nothing of it is executed.

    Raises:
        DamagedCheckpoint: it is no such file, or holds anything else.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            # torch.save stores; a deflated member could unpack to any size.
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise DamagedCheckpoint(f"{path} does not hold tensors, numbers and strings (it is compressed)")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, DamagedCheckpoint):
        raise
    except Exception as error:  # a forged file makes the reader fail in any way
        raise DamagedCheckpoint(f"{path} does not hold tensors, numbers and strings ({type(error).__name__})") from None
    if not isinstance(content, dict):
        raise DamagedCheckpoint(f"{path} does not hold tensors, numbers and strings ({type(content).__name__})")
    return content


def load_model_tensors(model: nn.Module, path: Path) -> None:
    """Put a file's weights into a model, a tied head by its first name.

    Raises:
        DamagedCheckpoint: the file cannot be read.
        UserError: names or shapes are not the model's.
    """
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}") from None
    check_shapes(model, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, path)
    tied = {name: tensors[first] for name, first in _tied_names(model).items()}
    set_weights(model, tensors | tied)


def set_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors, whole or in shards as the model has them, into a model of which a rank may hold only a part; all it
    has must be among them."""
    here = model.state_dict()
    mine = {name: placed_like(here[name], tensor) for name, tensor in tensors.items() if name in here}
    model.load_state_dict(mine, strict=True)


def whole_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of all of a model's tensors by name, also of those that other ranks hold."""
    whole = meta_model(model.config) if isinstance(model, GPTOSS) else model
    return {name: tuple(tensor.shape) for name, tensor in whole.state_dict().items()}


def placed_like(target: Tensor, value: Tensor) -> Tensor:
    """A tensor as another one of its shape lies: itself, or this rank's shard of it."""
    if not hasattr(target, "device_mesh") or hasattr(value, "device_mesh"):  # asked so, plain ones cost no import
        return value
    from torch.distributed.tensor import DTensor, Shard

    placed = torch.zeros_like(target, dtype=value.dtype)
    assert isinstance(target, DTensor)
    assert isinstance(placed, DTensor)
    (placement,), mesh = target.placements, target.device_mesh
    assert isinstance(placement, Shard)
    dim = placement.dim
    # Shards are as torch.chunk makes them: all of one length but the last ones.
    start = min(-(-target.shape[dim] // mesh.size()) * mesh.get_local_rank(), target.shape[dim])
    local = placed.to_local()
    local.copy_(value.narrow(dim, start, local.shape[dim]))
    return placed


def shapes_in_file(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of a safetensors file's tensors by name, from its header.

    Raises:
        DamagedCheckpoint: the file cannot be read.
    """
    try:
        with safe_open(path, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no dict)
    except SafetensorError as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}") from None


def check_shapes(model: nn.Module, shapes: dict[str, tuple[int, ...]], path: Path) -> None:
    """Compare shapes by name, a tied tensor's once, with those of all of a model, which may be on the meta device.

    Raises:
        UserError: names the first tensor that differs, and where they are from.
    """
    expected = whole_shapes(model)
    shapes = shapes | {name: shapes[first] for name, first in _tied_names(model).items() if first in shapes}
    for name in sorted(expected.keys() | shapes.keys()):
        there, here = shapes.get(name, "missing"), expected.get(name, "missing")
        if there != here:
            raise UserError(f"{path} is of another model: {name} is {there} there and {here} in the model")


@contextmanager
def applying(path: Path) -> Iterator[None]:
    """What a file of ours holds is put to use inside; if it does not fit, the file is named."""
    try:
        yield
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError,
            SafetensorError) as error:  # fmt: skip
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DamagedCheckpoint(f"{path} does not hold what a checkpoint of this model holds ({text})") from None


def load_optimizer(model: nn.Module, optimizer: Optimizer, content: dict[str, Any]) -> None:
    """Put moments and step counts, which the file has by parameter name, back into an optimizer.

    Raises:
        ValueError: a moment has not its parameter's shape.
    """
    parameters, moments = dict(model.named_parameters()), moments_of(optimizer)
    elsewhere = whole_shapes(model).keys() - parameters.keys()
    for name, entry in content["state"].items():
        if name in elsewhere:
            continue
        for key in moments[id(parameters[name])]:
            if entry[key].shape != parameters[name].shape or not entry[key].is_floating_point():
                raise ValueError(f"{key} of {name} is {tuple(entry[key].shape)}")
    state = {
        name: {
            key: placed_like(parameters[name], value) if key in moments[id(parameters[name])] else value
            for key, value in entry.items()
        }
        for name, entry in content["state"].items()
        if name not in elsewhere
    }
    set_optimizer_state(model, optimizer, state)


def set_optimizer_state(model: nn.Module, optimizer: Optimizer, state: Mapping[str, dict[str, Tensor]]) -> None:
    """Put state by parameter name into an optimizer, for exactly these parameters. Hyperparameters come from the recipe
    and rates from the schedule: only moments and counts are set."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ordered = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    by_index = {index: state[name] for index, name in enumerate(ordered) if name in state}
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
