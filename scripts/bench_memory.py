"""The estimate of memory beside what a step takes on this machine's GPU, over settings of the 502M recipe.

    python scripts/bench_memory.py               micro-batches from 1 to 16, with and without recomputation
    python scripts/bench_memory.py --layouts     each of several ranks that share the model, or part of it

Each trains a few of the loop's own steps on random tokens. Ranks share the GPU (scripts/ranks_on_one_gpu.py): each
holds what it would hold on a GPU of its own. `gpt-oss-lite estimate` prints the items of any other setting.
"""

import gc
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import needs_packages  # noqa: F401
import torch
import typer
from bench_scaling import Row, RunFailed, TestBed
from microbench_a100 import measure

from gpt_oss_lite.config.recipe import load_recipe
from gpt_oss_lite.options import AsJson, print_json
from gpt_oss_lite.training.layout import layout_of
from gpt_oss_lite.training.memory import estimate_recipe
from shared_data.console import run_app, say
from shared_data.errors import UserError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
CONFIGS = Path(__file__).resolve().parents[1] / "configs"
BIG, SMOKE = CONFIGS / "pretrain_a100_502m.yaml", CONFIGS / "pretrain_gpu_smoke.yaml"
# Recipe, micro-batch, and every how many blocks one is recomputed (0: none).
SETTINGS = [(BIG, 1, 0), (BIG, 2, 1), (BIG, 4, 0), (BIG, 8, 3), (BIG, 8, 0), (BIG, 16, 1), (BIG, 16, 0), (SMOKE, 2, 0)]

# Recipe, ranks, micro-batch, and what lays the model out over them.
DDP, FSDP = "training.parallelism=ddp", "training.parallelism=fsdp"
RECOMPUTE = "training.grad_checkpoint=true training.grad_checkpoint_every=1"
LAYOUTS = [
    (BIG, 2, 8, DDP), (BIG, 2, 8, FSDP), (BIG, 4, 4, FSDP), (BIG, 2, 2, f"{FSDP} {RECOMPUTE}"),
    (BIG, 2, 4, "training.expert_parallel_size=2"), (CONFIGS / "pretrain_1_5b.yaml", 2, 4, FSDP),
]  # fmt: skip


@app.command()
def bench(
    layouts: Annotated[bool, typer.Option("--layouts", help="Measure several ranks, which share the GPU.")] = False,
    as_json: AsJson = False,
) -> int:
    """Measure every setting."""
    if layouts and not torch.cuda.is_available():
        raise UserError("--layouts needs a CUDA device; `gpt-oss-lite estimate --ranks N` prints the estimates")
    try:
        results = [layout_row(*one) for one in LAYOUTS] if layouts else [row(*setting) for setting in SETTINGS]
    except RunFailed as failure:
        say(f"a run failed: {failure}")
        return 1
    if as_json:
        print_json({"results": results})
        return 0
    for result in results:
        measured = f"{result['peak_gb']:8.3f} GB, {result['off']:+.1%}" if "peak_gb" in result else "not measured"
        print(f"{result['setting']:<72} estimate {result['estimate_gb']:8.3f} GB  peak {measured}")
    if not torch.cuda.is_available():
        say("no CUDA device: these are the estimates alone")
    return 0


def layout_row(config: Path, ranks: int, micro_batch: int, words: str) -> dict[str, Any]:
    """Estimate and peak of each of several ranks, two micro-batches a step each.

    Raises:
        RunFailed: the run did not end well.
    """
    cut = Row(words, ranks, micro_batch, 2 * ranks)
    sizes = [f"training.micro_batch_size={micro_batch}", f"training.gradient_accumulation_steps={cut.accumulation}"]
    recipe = load_recipe(config, [*words.split(), *sizes])
    estimate_gb = estimate_recipe(recipe, layout=layout_of(recipe.training, ranks)).total_gb
    with tempfile.TemporaryDirectory() as folder:
        bed = TestBed(config, words.split(), recipe, steps=1, folder=Path(folder), one_gpu=True)
        peak_gb = bed.measure(cut)["peak_gb"]
    return {
        "setting": f"{config.stem}, {ranks} ranks, micro-batch {micro_batch}, {words.replace('training.', '')}",
        "estimate_gb": estimate_gb,
        "peak_gb": peak_gb,
        "off": estimate_gb / peak_gb - 1,
    }


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
