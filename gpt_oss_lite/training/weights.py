"""The weights of a checkpoint in either form, one file or shards, for all but the run that goes on from it."""

from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor, nn

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.checkpoint import CheckpointManager, checkpoint_folder
from gpt_oss_lite.training.checkpoint_names import file_name
from gpt_oss_lite.training.memory import meta_model
from gpt_oss_lite.training.snapshot import applying, check_shapes, shapes_in_file
from shared_data.errors import UserError

OF_A_WEIGHT = "model."
"""What a weight's name in shards begins with; the others are moments."""


def load_model(
    run_or_checkpoint_folder: str | Path, step: int | None = None, device: str | torch.device = "cpu"
) -> tuple[GPTOSS, dict[str, Any]]:
    """Build the model of a checkpoint, in evaluation mode.

    Args:
        run_or_checkpoint_folder: a run's folder, or its checkpoints/.
        step: None: the newest complete one.
        device: where the model goes.

    Returns:
        The model and the content of meta_step_N.json.

    Raises:
        UserError: no such checkpoint, a damaged one, or one of another program.
    """
    manager = CheckpointManager(checkpoint_folder(run_or_checkpoint_folder))
    step = manager.latest_step() if step is None else step
    if step is None:
        raise UserError(f"{manager.folder} {_why_no_checkpoint(manager.folder)}")
    try:
        config = ModelConfig(**manager.complete_meta(step)["model"])
    except (KeyError, TypeError, ValidationError) as error:
        raise UserError(
            f"{manager.folder}/meta_step_{step}.json: its model block is not a ModelConfig ({error})"
        ) from None
    _check_size_before_building(config, manager, step)
    model = GPTOSS(config)
    meta = manager.load(model, step)
    return model.to(device).eval(), meta


def check_weights_fit(model: nn.Module, manager: CheckpointManager, step: int) -> None:
    """Compare the names and shapes of a step's weights with a model's (which may be on the meta device), without
    reading weights.

    Raises:
        DamagedCheckpoint: a file cannot be read.
        UserError: names the first tensor that differs.
    """
    check_shapes(model, _shapes_of(manager, step), weights_path(manager, step))


def weights_path(manager: CheckpointManager, step: int) -> Path:
    """The file, or the folder of shards, in which a step's weights are."""
    return manager.shards(step) if manager.is_sharded(step) else manager.folder / file_name("model", step)


def read_weights(manager: CheckpointManager, step: int) -> dict[str, Tensor]:
    """A step's weights by name, each tied one once: mapped from the file, or read from the shards into memory."""
    path = weights_path(manager, step)
    if not manager.is_sharded(step):
        return load_file(path)
    from gpt_oss_lite.training.sharded import read_shards, tensors_in

    with applying(path):
        tensors = {
            name: torch.empty_like(tensor, device="cpu")
            for name, tensor in tensors_in(path).items()
            if name.startswith(OF_A_WEIGHT)
        }
        read_shards(path, tensors)
    return {name.removeprefix(OF_A_WEIGHT): tensor for name, tensor in tensors.items()}


def _shapes_of(manager: CheckpointManager, step: int) -> dict[str, tuple[int, ...]]:
    path = weights_path(manager, step)
    if not manager.is_sharded(step):
        return shapes_in_file(path)
    from gpt_oss_lite.training.sharded import tensors_in

    with applying(path):
        tensors = tensors_in(path)
    return {
        name.removeprefix(OF_A_WEIGHT): tuple(tensor.shape)
        for name, tensor in tensors.items()
        if name.startswith(OF_A_WEIGHT)
    }


def _check_size_before_building(config: ModelConfig, manager: CheckpointManager, step: int) -> None:
    """Hold a config's size against the files' headers, so that a forged one cannot ask for any amount of memory."""
    n_tensors = len(_shapes_of(manager, step))
    if config.n_layers * config.n_experts > n_tensors:
        raise UserError(
            f"{weights_path(manager, step)} is of another model: it has {n_tensors} tensors, but its meta says "
            f"{config.n_layers} layers of {config.n_experts} experts"
        )
    check_weights_fit(meta_model(config), manager, step)


def _why_no_checkpoint(folder: Path) -> str:
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return "is an export, which transformers loads; name the run that it was made of"
    return "has no complete checkpoint"
