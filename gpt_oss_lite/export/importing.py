"""Import: a stock gpt-oss folder, as transformers saves it, as a checkpoint of ours."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gpt_oss_lite.config import DataConfig, ModelConfig, Recipe, TrainingConfig, dump_recipe
from gpt_oss_lite.export.hf_config import config_from_stock
from gpt_oss_lite.export.layouts import from_stock
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.checkpoint import CHECKPOINTS, CheckpointManager
from gpt_oss_lite.training.run_folder import CONFIG_NAME, versions
from shared_data.errors import UserError
from shared_data.files import write_atomic

CORPUS = "data/pretrain_chinchilla"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def import_checkpoint(folder: Path, out: Path, *, vocab_size: int | None = None) -> GPTOSS:
    """Write the weights of a stock gpt-oss folder as step 0 of a run, for generate, eval, export and --init-from.

    Args:
        folder: with config.json and safetensors, unquantised.
        out: the run's folder, not there yet. Its config.yaml is a recipe for training on from these weights.
        vocab_size: ids that may be generated, if the table has rows above them for padding. None: every row.

    Raises:
        UserError: missing or damaged files, or a model that ours cannot compute.
    """
    if out.exists():
        raise UserError(f"{out} is there already: choose another --out, or remove it")
    config, tensors = read_stock(folder, vocab_size)
    model = GPTOSS(config)
    model.load_state_dict(from_stock(config, tensors), strict=True)
    optimizer = torch.optim.AdamW(model.parameters())  # without state: a run starts its own
    meta = {
        "model": config.model_dump(mode="json"),
        "rope_scale": config.rope_scale,
        "imported_from": str(folder),
        "versions": versions(),
    }
    CheckpointManager(out / CHECKPOINTS).save(model, optimizer, 0, extra_meta=meta)
    training, data = TrainingConfig.model_validate({}), DataConfig.model_validate({"train_data_path": CORPUS})
    write_atomic(out / CONFIG_NAME, dump_recipe(Recipe(model=config, training=training, data=data)))
    return model


def read_stock(folder: Path, vocab_size: int | None = None) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Config and tensors, by their names there, of a stock gpt-oss folder.

    Raises:
        UserError: as `import_checkpoint`.
    """
    path = folder / "config.json"
    config = config_from_stock(_read_json(path), str(path), vocab_size)
    names = [WEIGHTS]
    if (folder / INDEX).is_file():
        weight_map = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError(f"{folder / INDEX}: weight_map is missing")
        names = sorted(set(weight_map.values()))
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            tensors |= load_file(folder / name)
        except SafetensorError as error:
            raise UserError(f"{folder / name}: not a whole safetensors file ({error})") from None
    return config, tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object")
    return content
