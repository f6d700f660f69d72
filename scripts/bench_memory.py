"""The estimate of memory beside what a step takes on this machine's GPU, over settings of the 502M recipe.

    python scripts/bench_memory.py

Micro-batches from 1 to 16, with and without recomputation, and the smoke recipe; each trains a few of the loop's own
steps on random tokens. `gpt-oss-lite estimate` prints the items of any other setting.
"""

import gc
import sys
from pathlib import Path
from typing import Any

import needs_packages  # noqa: F401
import torch
import typer
from microbench_a100 import measure

from gpt_oss_lite.config.recipe import load_recipe
from gpt_oss_lite.options import AsJson, print_json
from gpt_oss_lite.training.memory import estimate_recipe
from shared_data.console import run_app, say

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
CONFIGS = Path(__file__).resolve().parents[1] / "configs"
BIG, SMOKE = CONFIGS / "pretrain_a100_502m.yaml", CONFIGS / "pretrain_gpu_smoke.yaml"
# Recipe, micro-batch, and every how many blocks one is recomputed (0: none).
SETTINGS = [(BIG, 1, 0), (BIG, 2, 1), (BIG, 4, 0), (BIG, 8, 3), (BIG, 8, 0), (BIG, 16, 1), (BIG, 16, 0), (SMOKE, 2, 0)]


@app.command()
def bench(as_json: AsJson = False) -> int:
    """Measure every setting."""
    results = [row(*setting) for setting in SETTINGS]
    if as_json:
        print_json({"results": results})
        return 0
    for result in results:
        measured = f"{result['peak_gb']:8.3f} GB, {result['off']:+.1%}" if "peak_gb" in result else "not measured"
        print(f"{result['setting']:<48} estimate {result['estimate_gb']:8.3f} GB  peak {measured}")
    if not torch.cuda.is_available():
        say("no CUDA device: these are the estimates alone")
    return 0


def row(config: Path, micro_batch: int, every: int) -> dict[str, Any]:
    """Estimate and peak of one setting."""
    settings = [
        f"training.micro_batch_size={micro_batch}", "training.gradient_accumulation_steps=2",
        f"training.grad_checkpoint={'true' if every else 'false'}", f"training.grad_checkpoint_every={every or 1}",
    ]  # fmt: skip
    recipe = load_recipe(config, settings)
    recomputed = f"every {every} recomputed" if every else "none recomputed"
    result: dict[str, Any] = {
        "setting": f"{config.stem}, micro-batch {micro_batch}, {recomputed}",
        "estimate_gb": estimate_recipe(recipe).total_gb,
    }
    if torch.cuda.is_available():
        result["peak_gb"] = measure(config, settings, recipe, steps=2, warmup=2)["peak_gb"]
        result["off"] = result["estimate_gb"] / result["peak_gb"] - 1
        gc.collect()
        torch.cuda.empty_cache()
    return result


if __name__ == "__main__":
    sys.exit(run_app(app, prog_name="bench_memory.py"))
