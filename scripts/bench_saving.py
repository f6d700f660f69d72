#!/usr/bin/env python3
"""How long a training step waits for a save, beside how long writing takes.

    python scripts/bench_saving.py --parameters 50e6 [--folder DIR] [--saves 3]

A model of about so many parameters is built with the shape of the shipped recipe (on the GPU where there is one), takes
one AdamW step, and is saved as the training loop saves it.
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import needs_packages  # noqa: F401
import torch
import typer

from gpt_oss_lite.config import ModelConfig, TrainingConfig
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.checkpoint import CheckpointManager
from gpt_oss_lite.training.disk import checkpoint_bytes
from gpt_oss_lite.training.memory import meta_model
from gpt_oss_lite.training.optimizer import make_optimizer, make_scheduler
from gpt_oss_lite.training.saving import Saver
from shared_data.console import run_app
from shared_data.errors import UserError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def config_of(parameters: float) -> ModelConfig:
    """The recipe's shape with as many layers as make about so many parameters, with a small vocabulary."""
    base: dict[str, Any] = {"vocab_size": 8192, "max_seq_len": 64, "yarn_original_max_seq_len": 64,
                            "yarn_target_seq_len": 2048, "eval_max_seq_len": 2048}  # fmt: skip
    one, two = (meta_model(ModelConfig(**base, n_layers=n)).num_parameters() for n in (1, 2))
    return ModelConfig(**base, n_layers=max(1, round((parameters - one) / (two - one)) + 1))


@app.command()
def bench(
    parameters: Annotated[float, typer.Option(min=1, max=1e12, help="Of the model, about.")] = 50e6,
    saves: Annotated[int, typer.Option(min=1, help="Saves to measure.")] = 4,
    folder: Annotated[Path | None, typer.Option(help="Where to write. Default: the system's temporary folder.")] = None,
) -> None:
    """Measure how long training waits for a checkpoint: one line a save, and the median."""
    if folder is not None and not folder.is_dir():
        raise UserError(f"--folder {folder}: there is no such folder")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPTOSS(config_of(parameters)).to(device)
    training = TrainingConfig(warmup_steps=1, total_steps=10)
    optimizer = make_optimizer(model, training)
    scheduler = make_scheduler(optimizer, training)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    size = checkpoint_bytes(model, training.optimizer)
    print(f"{model.num_parameters() / 1e6:.1f} M parameters on {device}, {size / 1e9:.3f} GB a checkpoint")
    shares = []
    with tempfile.TemporaryDirectory(dir=folder) as checkpoints:
        saver = Saver(CheckpointManager(checkpoints, keep=1))
        saver.reserve(model, optimizer)
        for save in range(saves):
            waited = saver.save(model, optimizer, save + 1, scheduler, {})
            (outcome,) = saver.drain()
            assert outcome.error is None, outcome.error
            shares.append(waited.for_copy / outcome.seconds)
            print(
                f"save {save}: the step waits {waited.for_copy:.3f} s, writing takes {outcome.seconds:.3f} s "
                f"({size / outcome.seconds / 1e6:.0f} MB/s): {shares[-1]:.1%}"
            )
    print(f"median share {statistics.median(shares):.1%}")


if __name__ == "__main__":
    sys.exit(run_app(app, prog_name="bench_saving.py"))
