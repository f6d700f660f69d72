"""Does every part of the stack work on this machine's GPU? Minutes at most, a small model, random tokens.

    python scripts/e2e_gpu_smoke.py

For each way of dispatching tokens to experts that this machine has: forward, backward, three optimizer steps whose loss
must fall, a checkpoint saved and loaded again with equal logits, and decoding with the cache, which must give what
decoding without it gives. Without CUDA the same runs on the CPU in miniature.
"""

import logging
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import numpy as np
import torch
import typer

from gpt_oss_lite.cli import AsJson, Overrides, print_json
from gpt_oss_lite.config import ModelConfig, load_recipe
from gpt_oss_lite.inference.generate import generate
from gpt_oss_lite.model.backends import reference, select_dispatch
from gpt_oss_lite.training.checkpoint import load_model
from gpt_oss_lite.training.knobs import autocast
from gpt_oss_lite.training.pretrain import PretrainOptions, save, train_step
from gpt_oss_lite.training.run import Run, open_run, plan_run
from shared_data.console import run_app, say
from shared_data.errors import UserError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

RECIPE = Path(__file__).resolve().parents[1] / "configs" / "pretrain_gpu_smoke.yaml"
STEPS = 3
# bf16 keeps 8 bits: a logit of the small model may differ in the last ones between two orders of summation.
LOGITS_TOLERANCE = {"cuda": 5e-2, "cpu": 1e-4}
# On the CPU only the full vocabulary is cut: everything else of the recipe is a miniature already.
CPU_SETTINGS = ["model.vocab_size=2000", "model.padded_vocab_size=null", "model.d_model=64"]


@app.command()
def smoke(overrides: Overrides = None, as_json: AsJson = False) -> int:
    """Run every check on every backend that this machine has."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = [] if device == "cuda" else list(CPU_SETTINGS)
    if device == "cpu":
        say("no CUDA device: the same checks run on the CPU in miniature")
    rows = []
    for dispatch in backends(device):
        with tempfile.TemporaryDirectory() as folder:
            rows += check_backend(dispatch, device, [*settings, *(overrides or ())], Path(folder))
    if as_json:
        print_json({"device": device, "checks": rows})
    failed = [row for row in rows if not row["passed"]]
    say(f"{len(rows) - len(failed)} of {len(rows)} checks passed on {device}")
    return 1 if failed else 0
