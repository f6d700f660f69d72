"""The estimate of memory beside what a step takes on this machine's GPU, over settings of the 502M recipe.

    python scripts/bench_memory.py               micro-batches from 1 to 16, with and without recomputation
    python scripts/bench_memory.py --layouts     as the first of several ranks that share the model's state

Each trains a few of the loop's own steps on random tokens. For a layout this process is the first of N ranks, whose
exchanges PyTorch's "fake" backend leaves out: what arrives is not what others would send, but it is as large, so that
the peak is that of one of N GPUs. `gpt-oss-lite estimate` prints the items of any other setting.
"""

import gc
import sys
from pathlib import Path
from typing import Annotated, Any

import needs_packages  # noqa: F401
import torch
import typer
from microbench_a100 import measure
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpt_oss_lite.config.recipe import load_recipe
from gpt_oss_lite.options import AsJson, print_json
from gpt_oss_lite.training.distributed import Ranks
from gpt_oss_lite.training.layout import layout_of
from gpt_oss_lite.training.memory import estimate_recipe
from shared_data.console import run_app, say

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
CONFIGS = Path(__file__).resolve().parents[1] / "configs"
BIG, SMOKE = CONFIGS / "pretrain_a100_502m.yaml", CONFIGS / "pretrain_gpu_smoke.yaml"
# Recipe, micro-batch, and every how many blocks one is recomputed (0: none).
SETTINGS = [(BIG, 1, 0), (BIG, 2, 1), (BIG, 4, 0), (BIG, 8, 3), (BIG, 8, 0), (BIG, 16, 1), (BIG, 16, 0), (SMOKE, 2, 0)]

BIGGER = CONFIGS / "pretrain_1_5b.yaml"
# Recipe, ranks that share its state (fsdp), micro-batch, and every how many blocks one is recomputed.
LAYOUTS = [(BIG, 2, 8, 0), (BIG, 8, 8, 0), (BIG, 8, 8, 1), (BIGGER, 8, 4, 0), (BIGGER, 64, 4, 0), (BIGGER, 64, 4, 1)]


@app.command()
def bench(
    layouts: Annotated[bool, typer.Option("--layouts", help="Measure one of several ranks, for each layout.")] = False,
    as_json: AsJson = False,
) -> int:
    """Measure every setting."""
    if not torch.cuda.is_available():
        say("no CUDA device: these are the estimates alone")
    results = []
    for result in (layout_row(*one) for one in LAYOUTS) if layouts else (row(*one) for one in SETTINGS):
        results.append(result)
        if not as_json:
            measured = f"{result['peak_gb']:8.3f} GB, {result['off']:+.1%}" if "peak_gb" in result else "not measured"
            print(f"{result['setting']:<64} estimate {result['estimate_gb']:8.3f} GB  peak {measured}", flush=True)
    if as_json:
        print_json({"results": results})
    return 0


def row(config: Path, micro_batch: int, every: int) -> dict[str, Any]:
    """Estimate and peak of one setting on one GPU."""
    return compare(config, micro_batch, every, [], Ranks())


def layout_row(config: Path, size: int, micro_batch: int, every: int) -> dict[str, Any]:
    """Estimate and peak of the first of `size` ranks under FSDP."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        return compare(config, micro_batch, every, ["training.parallelism=fsdp"], Ranks(size=size))
    finally:
        distributed.destroy_process_group()


def compare(config: Path, micro_batch: int, every: int, words: list[str], ranks: Ranks) -> dict[str, Any]:
    """Estimate and peak of a rank that runs two micro-batches a step."""
    settings = [
        *words, f"training.micro_batch_size={micro_batch}", f"training.gradient_accumulation_steps={2 * ranks.size}",
        f"training.grad_checkpoint={'true' if every else 'false'}",
        *([f"training.grad_checkpoint_every={every}"] if every else []),
    ]  # fmt: skip
    recipe = load_recipe(config, settings)
    layout = layout_of(recipe.training, ranks.size)
    shared = [f"{layout.parallelism} of {layout.ranks}"] if layout.ranks > 1 else []
    recomputed = f"every {every} recomputed" if every else "none recomputed"
    result: dict[str, Any] = {
        "setting": ", ".join([config.stem, *shared, f"micro-batch {micro_batch}", recomputed]),
        "estimate_gb": estimate_recipe(recipe, layout=layout).total_gb,
    }
    if torch.cuda.is_available():
        result["peak_gb"] = measure(config, settings, recipe, steps=2, warmup=2, ranks=ranks)["peak_gb"]
        result["off"] = result["estimate_gb"] / result["peak_gb"] - 1
        gc.collect()
        torch.cuda.empty_cache()
    return result


if __name__ == "__main__":
    sys.exit(run_app(app, prog_name="bench_memory.py"))
