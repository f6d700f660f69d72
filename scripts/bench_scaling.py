"""How much faster several GPUs of this machine train a recipe than one, in one run.

    python scripts/bench_scaling.py                                      the H200 recipe on one GPU and on all
    python scripts/bench_scaling.py --ranks 2 --config FILE --json       on two, another recipe
    python scripts/bench_scaling.py --each                               against the mean of the GPUs, each alone

Each row is the command that one would type (training/pretrain.py, under torchrun where there are several ranks), on
random tokens: the recipe on one GPU; on N with as many tokens a step for each of them; on N with the recipe's tokens a
step, shared. A further run is profiled: how long the exchange of gradients takes, and how much of it runs beside
nothing else. Without CUDA a small recipe is run by processes on the CPU that talk through gloo, which shows that the
script works and nothing more; a large one is refused. Exit code 1 when the first ratio is below --at-least, or a run
fails.
"""

import gzip
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import needs_packages  # noqa: F401
import numpy as np
import torch
import typer

from gpt_oss_lite.config import Recipe, load_recipe
from gpt_oss_lite.options import AsJson, Overrides, print_json
from gpt_oss_lite.training.flops import device_peak_flops, flops_per_token, format_mfu, mfu
from gpt_oss_lite.training.layout import check_windows
from gpt_oss_lite.training.profiling import WARMUP_STEPS
from shared_data.console import run_app, say
from shared_data.errors import UserError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
ROOT = Path(__file__).resolve().parents[1]
READINGS = 3
PROFILED = 3
CPU_TFLOP = 1.0
"""Largest step of a recipe, in 10^12 operations, where there is no GPU: some seconds of a few cores."""

Interval = tuple[float, float]


class Row(NamedTuple):
    """One way to run the recipe."""

    name: str
    ranks: int
    micro_batch_size: int
    accumulation: int
    """Micro-batches of a step on all ranks."""
    gpu: int = 0
    """Which GPU of this machine, where there is one rank."""


class RunFailed(Exception):
    """A training command did not end well; its last words."""


@app.command()
def bench(
    config: Annotated[Path, typer.Option(help="Recipe, a YAML file.")] = ROOT / "configs/pretrain_h200_502m.yaml",
    ranks: Annotated[int | None, typer.Option(min=2, help="GPUs of the larger rows. Default: all.")] = None,
    steps: Annotated[int, typer.Option(min=1, help=f"Steps of one of {READINGS} readings, and before them.")] = 8,
    each: Annotated[bool, typer.Option("--each", help="Measure each GPU alone, not the first one only.")] = False,
    at_least: Annotated[float, typer.Option(min=0, help="Ratio to one GPU that the first row of several needs.")] = 0.0,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Measure one GPU and several."""
    on_cuda = torch.cuda.is_available()
    count = ranks_to_use(ranks)
    recipe = load_recipe(config, overrides or ())
    if not on_cuda:
        check_small(config, recipe)
        say("no CUDA device: the ranks are processes on the CPU, and the figures say nothing about GPUs")
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        bed = TestBed(config, list(overrides or ()), recipe, steps, Path(folder))
        try:
            for row in rows(recipe, count, each):
                results.append(bed.measure(row))
                alone = statistics.mean(one["tokens_per_s"] for one in results if one["ranks"] == 1)
                results[-1]["ratio"] = results[-1]["tokens_per_s"] / alone
                if not as_json:
                    print_row(results[-1])
            exchange = bed.profile(rows(recipe, count)[1])
        except RunFailed as failure:
            say(f"the run failed: {failure}")
            return 1
    if as_json:
        device = torch.cuda.get_device_name() if on_cuda else "cpu"
        print_json({"device": device, "rows": results, "exchange": exchange})
    else:
        print_exchange(exchange)
    shared = next(one for one in results if one["ranks"] > 1)
    return 0 if shared["ratio"] >= at_least else 1


def check_small(config: Path, recipe: Recipe) -> None:
    """See that processes on the CPU are done with a recipe in minutes.

    Raises:
        UserError: they are not.
    """
    tokens = recipe.training.windows_per_step * recipe.model.max_seq_len
    tflop = tokens * flops_per_token(recipe.model, recipe.model.max_seq_len) / 1e12
    if tflop > CPU_TFLOP:
        raise UserError(
            f"no CUDA device, and a step of {config} is {tflop:,.0f} TFLOP, hours of a CPU: name a recipe of at most "
            f"{CPU_TFLOP:g} TFLOP a step, such as --config quickstart"
        )


def ranks_to_use(asked: int | None) -> int:
    """GPUs of the larger rows.

    Raises:
        UserError: there are not so many, or only one.
    """
    if not torch.cuda.is_available():
        return asked or 2
    there = torch.cuda.device_count()
    if there < (asked or 2):
        raise UserError(f"--ranks is {asked or 2}: this machine has {there} GPU{'s' if there > 1 else ''}")
    return asked or there


def rows(recipe: Recipe, ranks: int, each: bool = False) -> list[Row]:
    """What is measured: one GPU, or with `each` every one of them alone, and then `ranks` together.

    Raises:
        UserError: the ranks cannot share a step's windows evenly.
    """
    micro, accumulation = recipe.training.micro_batch_size, recipe.training.gradient_accumulation_steps
    windows = recipe.training.windows_per_step
    check_windows(recipe.training, ranks)
    size = max(size for size in range(1, micro + 1) if windows // ranks % size == 0)
    alone = [Row(f"GPU {gpu} alone", 1, micro, accumulation, gpu) for gpu in range(ranks if each else 1)]
    return [
        *alone,
        Row("as many tokens for each", ranks, micro, accumulation * ranks),
        Row("as many tokens in all", ranks, size, windows // size),
    ]


class TestBed:
    """A recipe, random tokens for it, and a folder for runs."""

    def __init__(self, config: Path, overrides: list[str], recipe: Recipe, steps: int, folder: Path) -> None:
        self._config, self._overrides, self._recipe = config, overrides, recipe
        self._steps, self._folder = steps, folder
        self._runs = 0

    def measure(self, row: Row) -> dict[str, Any]:
        """Median speed of a row."""
        settings = [f"training.log_interval={self._steps}"]
        run = self._train(row, (1 + READINGS) * self._steps, settings, [])
        logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        speeds = [one["tokens_per_s"] for one in logged if one["step"] > self._steps]
        model, speed = self._recipe.model, statistics.median(speeds)
        peak = device_peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
        return {
            **row._asdict(),
            "tokens_per_step": row.micro_batch_size * row.accumulation * model.max_seq_len,
            "tokens_per_s": speed,
            "readings": speeds,
            "mfu": mfu(speed / row.ranks, model, model.max_seq_len, peak),
            "peak_gb": max(one["memory_gib"] for one in logged) * 2**30 / 1e9,
        }

    def profile(self, row: Row) -> dict[str, float]:
        """Exchange in the profiled steps of a row, on its first rank."""
        run = self._train(row, WARMUP_STEPS + PROFILED + 1, ["training.log_interval=1000"], ["--profile", PROFILED])
        with gzip.open(run / "profile/trace.json.gz") as file:
            return exchange_of(json.load(file)["traceEvents"])

    def _train(self, row: Row, max_steps: int, settings: list[str], words: list[object]) -> Path:
        """Run the command; the run's folder."""
        self._runs += 1
        run, corpus = self._folder / f"run-{self._runs}", self._folder / "tokens.bin"
        windows = max_steps * row.micro_batch_size * row.accumulation
        model = self._recipe.model
        ids = np.random.default_rng(0).integers(model.vocab_size, size=windows * model.max_seq_len + 1, dtype="<u4")
        ids.tofile(corpus)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", row.ranks] if row.ranks > 1 else []
        settings = [
            *self._overrides, *settings, f"training.micro_batch_size={row.micro_batch_size}",
            f"training.gradient_accumulation_steps={row.accumulation}", f"data.train_data_path={corpus}",
            "data.data_mix=null", "training.eval_interval=0", "training.save_interval=1000000",
        ]  # fmt: skip
        command = [
            sys.executable, *launch, ROOT / "training/pretrain.py", "--config", self._config, "--out", run, "--seed", 0,
            "--max-steps", max_steps, *words, *(word for setting in settings for word in ("--set", setting)),
        ]  # fmt: skip
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(row.gpu + 1)))).split(",")
        gpu = {"CUDA_VISIBLE_DEVICES": visible[row.gpu]} if row.ranks == 1 and torch.cuda.is_available() else {}
        done = subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, check=False, env={**os.environ, **gpu}
        )
        shutil.rmtree(run / "checkpoints", ignore_errors=True)  # the last step's, which every run saves
        if done.returncode:
            raise RunFailed(reason_of(done.returncode, done.stderr))
        return run


def reason_of(exit_code: int, stderr: str) -> str:
    """Why a run failed, in a line: its first error; without one, how it ended and what it said last."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    if said := [line for line in lines if "error" in line.lower()]:
        return said[0]
    ended = f"exit code {exit_code}" if exit_code >= 0 else f"killed by {signal.Signals(-exit_code).name}"
    hint = " (the kernel does so where memory runs out)" if exit_code == -signal.SIGKILL else ""
    return f"{ended}{hint}, after: {lines[-1] if lines else 'nothing'}"


def exchange_of(events: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of a step in a profiler's trace, and of its exchange between ranks.

    On CUDA the exchange are NCCL's kernels, which also last while they wait for another rank; elsewhere what gloo does
    in threads of its own. What of it runs while nothing else runs is exposed.
    """
    timed = [event for event in events if event.get("ph") == "X"]
    marks = [one for one in timed if one.get("cat") == "user_annotation" and one["name"].startswith("ProfilerStep#")]
    on_cuda = any(event.get("cat") == "kernel" for event in timed)
    if on_cuda:
        timed = [event for event in timed if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        exchange = [event for event in timed if "nccl" in event["name"].lower()]
        other = [event for event in timed if "nccl" not in event["name"].lower()]
    else:
        exchange = [event for event in timed if event["name"].startswith("gloo:")]
        talking = {event["tid"] for event in exchange}
        other = [event for event in timed if event.get("cat") == "cpu_op" and event["tid"] not in talking]
    # The host is ahead of a GPU, so its marks say how many steps there are, and not when.
    span = merged(intervals(timed if on_cuda else marks))
    exposed = length(merged(intervals(exchange + other))) - length(merged(intervals(other)))
    seconds = {
        "step_s": span[-1][1] - span[0][0],
        "exchange_s": length(merged(intervals(exchange))),
        "exposed_s": exposed,
    }
    return {name: value / len(marks) / 1e6 for name, value in seconds.items()}


def intervals(events: list[dict[str, Any]]) -> list[Interval]:
    """Start and end of events in microseconds."""
    return [(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in events]


def merged(parts: list[Interval]) -> list[Interval]:
    """The union of intervals, in order."""
    union: list[Interval] = []
    for start, end in sorted(parts):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def length(parts: list[Interval]) -> float:
    """Of intervals that do not overlap."""
    return sum(end - start for start, end in parts)


def print_row(result: dict[str, Any]) -> None:
    """One line."""
    split = f"{result['micro_batch_size']} x {result['accumulation']}"
    each = result["ratio"] / result["ranks"]
    print(
        f"{result['ranks']:>3} {result['name']:<24} {split:>9} {result['tokens_per_s']:>12,.0f} tok/s  "
        f"MFU {format_mfu(result['mfu']):>6}  {result['peak_gb']:6.2f} GB  {result['ratio']:5.2f} x  {each:6.1%} each",
        flush=True,
    )


def print_exchange(exchange: dict[str, float]) -> None:
    """One line about the profile."""
    step = exchange["step_s"]
    print(
        f"profiled: exchange {exchange['exchange_s'] * 1e3:.1f} ms of a step of {step * 1e3:.1f} "
        f"({exchange['exchange_s'] / step:.1%}), {exchange['exposed_s'] * 1e3:.1f} ms beside nothing else "
        f"({exchange['exposed_s'] / step:.1%})"
    )


if __name__ == "__main__":
    sys.exit(run_app(app, prog_name="bench_scaling.py"))
