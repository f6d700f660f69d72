"""Does the fast path learn as the reference does? Two runs from one seed on the same windows, on a GPU.

    python scripts/compare_paths.py --config configs/pretrain_a100_502m.yaml --data data/quickstart/pretrain_chinchilla

Steps of 16,384 tokens with a short schedule; prints the mean absolute difference of the two losses over the last 50.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import needs_packages  # noqa: F401
import torch
import typer

from gpt_oss_lite.options import AsJson, Config, Overrides, print_json
from gpt_oss_lite.training.pretrain import PretrainOptions, pretrain
from shared_data.console import run_app
from shared_data.errors import UserError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
LAST = 50


@app.command()
def compare(
    config: Config,
    data: Annotated[Path, typer.Option(help="Folder with manifest.json and shards.", show_default=False)],
    steps: Annotated[int, typer.Option(min=LAST, help="Steps of each run.")] = 200,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Train twice and compare the losses."""
    if not torch.cuda.is_available():
        raise UserError("no CUDA device: the fast path is for CUDA, there is nothing to compare")
    losses = {}
    for name, backend in (("reference", "reference"), ("fast", "auto")):
        settings = [
            "training.micro_batch_size=4", "training.gradient_accumulation_steps=1", "training.log_interval=1",
            f"training.total_steps={steps}", "training.warmup_steps=20", "training.save_interval=1000000",
            f"data.train_data_path={data}", "data.data_mix=null", f"model.moe_dispatch={backend}",
            f"model.attention_backend={backend}", "training.compile=false", "training.eval_interval=0",
            *(overrides or ()),
        ]  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder, "run")
            code = pretrain(PretrainOptions(config=config, out=run, seed=0, overrides=settings))
            if code:
                return code
            rows = (run / "metrics.jsonl").read_text().splitlines()
            losses[name] = [json.loads(row)["ce"] for row in rows]
    differences = [abs(a - b) for a, b in zip(losses["reference"], losses["fast"], strict=True)]
    result = {
        "steps": steps,
        f"mean_difference_last_{LAST}": sum(differences[-LAST:]) / LAST,
        "largest_difference": max(differences),
        "last_reference": losses["reference"][-1],
        "last_fast": losses["fast"][-1],
    }
    if as_json:
        print_json(result | {"losses": losses})
    else:
        for name, value in result.items():
            print(f"{name:<28} {value:.5g}")
    return 0


if __name__ == "__main__":
    sys.exit(run_app(app, prog_name="compare_paths.py"))
