"""A corpus and a recipe so small that a run takes a second, and helpers that run it in its own process."""

import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from shared_data.manifest import CorpusInfo, SourceInfo
from shared_data.shard_writer import write_corpus

ROOT = Path(__file__).parents[1]
VOCAB, EOS, PAD, ROWS = 61, 62, 63, 64
WINDOW = 16

MODEL: dict[str, Any] = {
    "vocab_size": VOCAB, "padded_vocab_size": ROWS, "d_model": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1,
    "head_dim": 8, "max_seq_len": WINDOW, "window_size": 4, "yarn_scale_factor": 2.0, "yarn_original_max_seq_len":
    WINDOW, "yarn_target_seq_len": 2 * WINDOW, "eval_max_seq_len": 2 * WINDOW, "n_experts": 4, "expert_hidden_size": 16,
    "moe_dispatch": "reference",
}  # fmt: skip
TRAINING: dict[str, Any] = {
    "lr": 1e-2, "warmup_steps": 3, "total_steps": 20, "micro_batch_size": 2, "gradient_accumulation_steps": 2,
    "loss_chunk_size": 8, "num_workers": 0, "pin_memory": False, "log_interval": 1, "save_interval": 5, "keep_last_n":
    10,
}  # fmt: skip


def corpus_info(**changes: Any) -> CorpusInfo:
    """What holds for the tiny corpus: two sources, shards of 100 tokens."""
    fields: dict[str, Any] = {
        "corpus": "tiny", "mixture": "tiny", "tokenizer_name": "tiny", "vocab_size": VOCAB, "eos_token_id": EOS,
        "pad_token_id": PAD, "shard_size_tokens": 100,
        "sources": [SourceInfo(id="prose", weight=0.5), SourceInfo(id="code", weight=0.5)],
    }  # fmt: skip
    return CorpusInfo(**{**fields, **changes})


def make_corpus(folder: Path, n_documents: int = 60, seed: int = 0, **changes: Any) -> Path:
    """Write a corpus of short documents that can be learned (counting up), with validation/ beside it."""
    rng = np.random.default_rng(seed)

    def documents(count: int) -> list[tuple[np.ndarray, int, int]]:
        starts, lengths = rng.integers(0, VOCAB, count), rng.integers(5, 30, count)
        return [
            ((start + np.arange(length)) % VOCAB, index % 2, int(3 * length))
            for index, (start, length) in enumerate(zip(starts, lengths, strict=True))
        ]

    info = corpus_info(**changes)
    write_corpus(folder, info, documents(n_documents))
    write_corpus(folder / "validation", info, documents(12), split="validation")
    return folder


def write_recipe(path: Path, corpus: Path, **training: Any) -> Path:
    """Write the tiny recipe; keyword arguments replace training keys, `model` and `data` add to those blocks."""
    model, data = training.pop("model", {}), training.pop("data", {})
    recipe = {
        "model": {**MODEL, **model},
        "training": {**TRAINING, **training},
        "data": {"train_data_path": str(corpus), **data},
    }
    path.write_text(yaml.safe_dump(recipe))
    return path


CLOCK_FIELDS = {"tokens_per_s", "mfu", "memory_gib", "data_wait_s", "time"}


def rows(run: Path) -> list[Any]:
    """The rows of metrics.jsonl, without the fields that depend on the clock and the machine."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in CLOCK_FIELDS} for line in lines]


def events(run: Path, kind: str) -> list[Any]:
    """The events of one kind."""
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] == kind]


def digests(run: Path, step: int) -> dict[str, str]:
    """SHA-256 of each file of a checkpoint, from its meta."""
    meta = json.loads((run / "checkpoints" / f"meta_step_{step}.json").read_text())
    return {name: about["sha256"] for name, about in meta["files"].items()}


def replace_forward(run: Any, forward: Callable[..., Any]) -> None:
    """Let the loop call something else for its forward passes."""
    run.parallel = dataclasses.replace(run.parallel, forward=forward)


def blow_up(run: Any, calls: Iterable[int], factor: float = math.nan) -> None:
    """Multiply the hidden states of chosen forward passes, counted from 0, as a fault in the data or the machine
    would."""
    forward, chosen, count = run.parallel.forward, set(calls), itertools.count()

    def blown_up(*words: Any, **names: Any) -> Any:
        h, stats = forward(*words, **names)
        return (h * factor if next(count) in chosen else h), stats

    replace_forward(run, blown_up)


def _code_of(before: str, options: dict[str, Any]) -> str:
    call = ", ".join(f"{key}={value!r}" for key, value in options.items()).replace("PosixPath", "Path")
    code = (
        "import sys\nfrom pathlib import Path\nimport typer\nfrom gpt_oss_lite.training.pretrain import *\n"
        "from shared_data.console import run_app\napp = typer.Typer()\n"
        f"@app.command()\ndef go() -> None:\n    raise typer.Exit(pretrain(PretrainOptions({call})))\n"
        "sys.exit(run_app(app, []))"
    )
    return f"{before}\n{code}"


def _environment() -> dict[str, str]:
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def start_run(before: str = "", **options: Any) -> subprocess.Popen[str]:
    """Start `pretrain(PretrainOptions(**options))` in its own process, which exits with the code that it returns; the
    code in `before` runs first."""
    command = [sys.executable, "-c", _code_of(before, options)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=_environment())


class ForkedRun:
    """What `start_run` starts, forked from a process that has imported everything once, which saves the most of the
    time that starting takes. Not for a GPU. Of Popen it has what tests use."""

    def __init__(self, before: str = "", **options: Any) -> None:
        outer = dict(os.environ)
        os.environ.update(_environment())  # of the process that forks, which the first call starts
        try:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["gpt_oss_lite.training.pretrain", "torch._dynamo"])
            reader, writer = context.Pipe(duplex=False)
            self._process = context.Process(target=_execute, args=(_code_of(before, options), writer, dict(os.environ)))
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(outer)
        writer.close()
        self.stderr = os.fdopen(os.dup(reader.fileno()))
        reader.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int:
        """The exit code; minus the number of the signal that ended it."""
        assert self._process.exitcode is not None
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal; nothing where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[None, str]:
        """Wait for its end; what it wrote to standard error."""
        killer = threading.Timer(timeout, self._process.kill)
        killer.start()
        with self.stderr:
            said = self.stderr.read()
        self._process.join()
        killer.cancel()
        return None, said


def _execute(code: str, stderr: Connection, environment: dict[str, str]) -> None:
    os.dup2(stderr.fileno(), 2)
    stderr.close()
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method("fork", force=True)  # for loader workers, as in a process of another start
    exec(code, {"__name__": "__main__"})


def finish(process: subprocess.Popen[str] | ForkedRun) -> tuple[int, str]:
    """Wait for a process that runs: exit code and standard error."""
    _, stderr = process.communicate(timeout=120)
    return process.returncode, stderr


def kill_after_step(
    process: subprocess.Popen[str] | ForkedRun,
    run: Path,
    step: int,
    how: int = signal.SIGKILL,
    checkpoint: int | None = None,
) -> None:
    """Send a signal as soon as the log has the row of a step, and the checkpoint of a step is written."""
    deadline = time.monotonic() + 60
    metrics = run / "metrics.jsonl"
    marker = run / "checkpoints" / f"meta_step_{checkpoint}.json"
    while not (
        metrics.exists() and metrics.read_text().count("\n") >= step and (checkpoint is None or marker.exists())
    ):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(how)
