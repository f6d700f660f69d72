"""Speed and peak memory of a recipe's training step on this machine's GPU, beside the estimate.

    python scripts/microbench_a100.py --config configs/pretrain_a100_502m.yaml --batch-size 8 --seq-len 4096

It runs the real loop's steps (gpt_oss_lite.training.pretrain.train_step) on random tokens, so that the figures are
those of a run: tokens per second, MFU, and the allocator's peak, held against --threshold-gb (10^9 bytes). Exit code 1
when the peak is above it. Without CUDA the estimate and the bytes of the shapes are all there is to say.
"""

import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import needs_packages  # noqa: F401
import numpy as np
import torch
import typer
from timing import time_steps

from gpt_oss_lite.config import Recipe, load_recipe
from gpt_oss_lite.options import AsJson, Config, Overrides, print_json
from gpt_oss_lite.training.disk import checkpoint_bytes
from gpt_oss_lite.training.distributed import Ranks
from gpt_oss_lite.training.flops import device_peak_flops, format_mfu, mfu
from gpt_oss_lite.training.memory import estimate_recipe, meta_model
from gpt_oss_lite.training.pretrain import PretrainOptions, train_step
from gpt_oss_lite.training.profiling import WARMUP_STEPS, StepProfiler
from gpt_oss_lite.training.run import open_run, plan_run
from shared_data.console import progress, run_app, say

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
PROFILED_STEPS = 2


@app.command()
def bench(
    config: Config,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Windows of a micro-batch. Default: the recipe's.")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens of a window. Default: the recipe's.")] = None,
    threshold_gb: Annotated[float, typer.Option(min=0, help="Largest peak in GB of 10^9 bytes.")] = 25.0,
    steps: Annotated[int, typer.Option(min=1, help="Steps to time.")] = 6,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before them, for compilation and caches.")] = 3,
    profile: Annotated[
        Path | None, typer.Option(help="After the timing, record two steps and write kernels.txt and a trace here.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Measure a recipe's training step."""
    settings = list(overrides or ())
    settings += [f"training.micro_batch_size={batch_size}"] if batch_size else []
    settings += [f"model.max_seq_len={seq_len}"] if seq_len else []
    recipe = load_recipe(config, settings)
    result = byte_counts(recipe)
    if torch.cuda.is_available():
        result |= measure(config, settings, recipe, steps, warmup, profile)
    else:
        say("no CUDA device: the step is not measured; here are the estimate and the bytes of its shapes")
    result["threshold_gb"] = threshold_gb
    peak_gb = result.get("peak_gb", result["estimate_gb"])
    result["within_threshold"] = peak_gb <= threshold_gb
    print_json(result) if as_json else print_table(result)
    return 0 if result["within_threshold"] or "peak_gb" not in result else 1


def byte_counts(recipe: Recipe) -> dict[str, Any]:
    """What is known without a device: the estimate by item and the bytes of a step's largest shapes."""
    model, training = recipe.model, recipe.training
    tokens = training.micro_batch_size * model.max_seq_len
    estimate = estimate_recipe(recipe)
    counted = meta_model(model)
    parameters = counted.num_parameters()
    return {
        "batch_size": training.micro_batch_size,
        "seq_len": model.max_seq_len,
        "parameters": parameters,
        "estimate_gb": estimate.total_gb,
        "estimate_bytes": estimate.items,
        "checkpoint_bytes": checkpoint_bytes(counted, training.optimizer),
        "whole_logits_bytes": 2 * tokens * model.embedding_rows,
        "logits_chunk_bytes": 2 * min(tokens, training.loss_chunk_size) * model.embedding_rows,
    }


def measure(
    config: Path,
    settings: list[str],
    recipe: Recipe,
    steps: int,
    warmup: int,
    profile: Path | None = None,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Time the loop's own steps on random tokens; medians over `steps`. A profile is of further steps, and what is
    measured of this process alone where it is one of several `ranks`."""
    model, training = recipe.model, recipe.training
    profiled = 0 if profile is None else WARMUP_STEPS + PROFILED_STEPS
    windows = (warmup + steps + profiled) * training.windows_per_step
    ids = np.random.default_rng(0).integers(model.vocab_size, size=windows * model.max_seq_len + 1, dtype="<u4")
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "tokens.bin")
        ids.tofile(corpus)
        settings = [*settings, f"data.train_data_path={corpus}", "data.data_mix=null", "training.eval_interval=0"]
        options = PretrainOptions(config=config, out=Path(folder, "run"), seed=0, overrides=settings)
        run = open_run(plan_run(options, ranks))
        with progress("steps", warmup + steps, "steps") as report:

            def step() -> None:
                train_step(run)
                report.advance(1)

            seconds, peak = time_steps(step, warmup, steps)
        if profile is not None:
            profiler = StepProfiler(profile, PROFILED_STEPS)
            for _ in range(profiled):
                train_step(run)
                profiler.step()
    tokens = training.windows_per_step * model.max_seq_len
    tokens_per_s = tokens / seconds
    name = torch.cuda.get_device_name()
    return {
        "device": name,
        "tokens_per_s": tokens_per_s,
        "mfu": mfu(tokens_per_s, model, model.max_seq_len, device_peak_flops(name)),
        "peak_gb": peak / 1e9,
        "seconds_per_step": seconds,
    }


def print_table(result: dict[str, Any]) -> None:
    """The figures for a person."""
    print(f"micro-batch {result['batch_size']} x {result['seq_len']} tokens, {result['parameters']:,} parameters")
    rows = [(f"  {name}", size) for name, size in result["estimate_bytes"].items()]
    rows += [
        ("estimate", result["estimate_gb"] * 1e9),
        ("one chunk of logits, in 16 bits", result["logits_chunk_bytes"]),
        ("all logits in 16 bits, never held", result["whole_logits_bytes"]),
        ("checkpoint on disk", result["checkpoint_bytes"]),
    ]
    if "peak_gb" in result:
        rows.append(("measured peak", result["peak_gb"] * 1e9))
    for name, size in rows:
        print(f"{name:<50} {size / 1e9:9.3f} GB")
    if "peak_gb" in result:
        print(f"{result['device']}: {result['seconds_per_step'] * 1e3:.1f} ms a step, "
              f"{result['tokens_per_s']:,.0f} tok/s, MFU {format_mfu(result['mfu'])}")  # fmt: skip
    what = "peak" if "peak_gb" in result else "estimate"
    verdict = "within" if result["within_threshold"] else "ABOVE"
    print(f"the {what} is {verdict} the threshold of {result['threshold_gb']:g} GB")


if __name__ == "__main__":
    sys.exit(run_app(app, prog_name="microbench_a100.py"))
