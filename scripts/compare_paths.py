"""Does the fast path learn as the reference does? Runs from one seed on the same windows, on a GPU.

    python scripts/compare_paths.py --config configs/pretrain_a100_502m.yaml --data data/quickstart/pretrain_chinchilla

Steps of 16,384 tokens with a short schedule: the reference path, the fast one, and the fast one with Triton's grouped
products in place of PyTorch's. The last two differ in the order of additions alone, so how far they come apart is what
rounding does by itself. Prints differences of the losses over the last 50 steps.
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
RUNS = {"reference": ("reference", "reference"), "fast": ("auto", "auto"), "triton_grouped": ("auto", "triton_grouped")}
"""model.attention_backend and model.moe_dispatch of each run."""
MEASURES = ("mean absolute", "mean with sign", "largest of all")


@app.command()
def compare(
    config: Config,
    data: Annotated[Path, typer.Option(help="Folder with manifest.json and shards.", show_default=False)],
    steps: Annotated[int, typer.Option(min=LAST, help="Steps of each run.")] = 200,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Train three times and compare the losses."""
    if not torch.cuda.is_available():
        raise UserError("no CUDA device: the fast path is for CUDA, there is nothing to compare")
    losses = {}
    for name, (attention, dispatch) in RUNS.items():
        settings = [
            "training.micro_batch_size=4", "training.gradient_accumulation_steps=1", "training.log_interval=1",
            f"training.total_steps={steps}", "training.warmup_steps=20", "training.save_interval=1000000",
            f"data.train_data_path={data}", "data.data_mix=null", f"model.moe_dispatch={dispatch}",
            f"model.attention_backend={attention}", "training.compile=false", "training.eval_interval=0",
            *(overrides or ()),
        ]  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder, "run")
            code = pretrain(PretrainOptions(config=config, out=run, seed=0, overrides=settings))
            if code:
                return code
            rows = (run / "metrics.jsonl").read_text().splitlines()
            losses[name] = [json.loads(row)["ce"] for row in rows]
    compared = {
        f"{one} - {other}": differences(losses[one], losses[other])
        for one, other in (("fast", "reference"), ("triton_grouped", "reference"), ("triton_grouped", "fast"))
    }
    if as_json:
        print_json({"differences": compared, "losses": losses})
    else:
        print(f"{f'over the last {LAST} of {steps} steps':<36}" + "".join(f"{name:>16}" for name in MEASURES))
        for name, row in compared.items():
            print(f"{name:<36}" + "".join(f"{row[measure]:>16.5f}" for measure in MEASURES))
    return 0


def differences(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """How far two curves of losses lie apart, in nats."""
    apart = [a - b for a, b in zip(ours, theirs, strict=True)]
    last = apart[-LAST:]
    values = (sum(map(abs, last)) / LAST, sum(last) / LAST, max(map(abs, apart)))
    return dict(zip(MEASURES, values, strict=True))


if __name__ == "__main__":
    sys.exit(run_app(app, prog_name="compare_paths.py"))
