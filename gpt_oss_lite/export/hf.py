"""Export: a checkpoint as a folder that Hugging Face transformers loads.

    OUT/config.json  generation_config.json  README.md (the model card)
    OUT/model.safetensors, or model-0000N-of-0000M.safetensors with model.safetensors.index.json
    OUT/modeling_gpt_oss_lite.py        where transformers' own gpt-oss classes cannot express the model
    OUT/tokenizer.json  tokenizer_config.json       for models of the LLaMA-3 vocabulary

Weights are bf16, in safetensors: nothing in the folder is pickled. The folder is whole or not there.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from gpt_oss_lite.export.card import model_card
from gpt_oss_lite.export.hf_config import MODELING_FILE, exported_context, generation_json, model_json
from gpt_oss_lite.export.layouts import Layout, layout_of, to_layout
from gpt_oss_lite.export.tokenizer_files import has_llama3_vocabulary, special_ids, write_tokenizer
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.checkpoint import CHECKPOINTS
from gpt_oss_lite.training.weights import load_model
from shared_data.console import progress
from shared_data.errors import UserError
from shared_data.files import TEMPORARY_SUFFIX, fsync_folder, write_atomic

MAX_SHARD_BYTES = 5_000_000_000
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    folder: Path
    layout: Layout
    """gpt_oss: stock classes, no remote code; gpt_oss_lite: with the modelling file."""
    n_bytes: int
    """Of the weights' files."""
    files: list[str]
    has_tokenizer: bool


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    step: int | None = None,
    rope_scale: float | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    document_start: bool = True,
) -> Exported:
    """Write a checkpoint as a Hugging Face folder.

    Args:
        checkpoint: a run's folder, or its checkpoints/.
        out: a folder that is not there yet.
        step: None: the newest complete checkpoint.
        rope_scale: YaRN scale that the exported model turns at; None: that of the checkpoint. Other programs do not
            choose it by the length of the context, as `generate` does.
        max_shard_bytes: largest file of weights; one tensor that is larger gets its own.
        document_start: whether the tokenizer puts the end-of-document id before a text, as `generate` does.

    Raises:
        UserError: no such checkpoint, out is there already, a scale out of range, or a missing package.
    """
    _check_out(out, max_shard_bytes)
    model, meta = load_model(checkpoint, step)
    config = model.config
    if rope_scale is not None:
        if not 1 <= rope_scale <= config.yarn_scale_factor:
            raise UserError(
                f"the RoPE scale is {rope_scale:g}: it must lie between 1 and model.yarn_scale_factor "
                f"({config.yarn_scale_factor:g})"
            )
        config = config.replace(rope_scale=float(rope_scale))
    run = checkpoint.parent if checkpoint.name == CHECKPOINTS else checkpoint
    layout, tokenizer = layout_of(config), has_llama3_vocabulary(config)
    counts = model.num_parameters(), model.num_active_parameters()
    with _whole_folder(out) as folder:
        _write_json(folder / "config.json", model_json(config, layout, special_ids(config)))
        _write_json(folder / "generation_config.json", generation_json(config, special_ids(config)))
        n_bytes = write_weights(folder, bf16_weights(model, layout), max_shard_bytes)
        for path in folder.glob("*.safetensors"):  # the library lets only their owner read them
            shutil.copymode(folder / "config.json", path)
        if layout == "gpt_oss_lite":
            shutil.copyfile(Path(__file__).with_name(MODELING_FILE), folder / MODELING_FILE)
        if tokenizer:
            write_tokenizer(folder, exported_context(config), document_start=document_start)
        write_atomic(folder / "README.md", model_card(config, layout, meta, run, counts, tokenizer))
        files = sorted(path.name for path in folder.iterdir())
    return Exported(out, layout, n_bytes, files, tokenizer)


def bf16_weights(model: GPTOSS, layout: Layout) -> dict[str, Tensor]:
    """The model's weights in a layout, rounded to bf16."""
    ours = {name: value.detach().bfloat16() for name, value in model.named_parameters(remove_duplicate=False)}
    return to_layout(model.config, layout, ours)


def write_weights(folder: Path, weights: dict[str, Tensor], max_shard_bytes: int) -> int:
    """Write tensors to one safetensors file, or to several with an index.

    Returns:
        The size of the files in bytes, index not counted.
    """
    shards = _split(weights, max_shard_bytes)
    names = [WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    total = sum(value.nbytes for value in weights.values())
    with progress("export weights", total, "B") as report:
        for name, shard in zip(names, shards, strict=True):
            save_file(shard, folder / name, metadata={"format": "pt"})
            report.advance(sum(value.nbytes for value in shard.values()))
    if len(shards) > 1:
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        _write_json(folder / f"{WEIGHTS}.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    return sum((folder / name).stat().st_size for name in names)


def _split(weights: dict[str, Tensor], max_shard_bytes: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, value in weights.items():
        if shards[-1] and filled + value.nbytes > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = value
        filled += value.nbytes
    return shards


def _check_out(out: Path, max_shard_bytes: int) -> None:
    if out.exists():
        raise UserError(f"{out} is there already: choose another --out, or remove it")
    if max_shard_bytes < 1:
        raise UserError(f"the largest file is {max_shard_bytes} bytes: it must be at least 1")


@contextmanager
def _whole_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `out` when the block ends without an error and is removed when it does not."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(out.name + TEMPORARY_SUFFIX)
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
    temporary.mkdir()
    try:
        yield temporary
        for path in temporary.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        fsync_folder(temporary)
        os.replace(temporary, out)
    except BaseException:  # whatever it was, nothing half-written stays
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_folder(out.parent)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(content, indent=2) + "\n")
