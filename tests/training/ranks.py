"""Runs on several ranks for tests, over gloo on 127.0.0.1.

This file as a program imports everything once, and forks the ranks of one job after another for as long as the tests
last, which saves most of the time that starting them would take. It has a single thread and runs nothing of PyTorch
itself, so that a fork of it is whole.
"""

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT_S = 300


@dataclass
class Job:
    """One `pretrain` on some ranks."""

    n_ranks: int
    config: str
    out: str
    overrides: list[str] = field(default_factory=list)
    max_steps: int | None = None
    resume_latest: bool = False
    seed: int | None = None
    float64: bool = False
    bf16: bool = False
    """Whether forward passes are in bf16, which the loop leaves to GPUs, and experts' biases are drawn, not zeros."""
    poison: dict[int, list[int]] = field(default_factory=dict)
    """Forward passes, counted from 0, whose output is NaN, by rank."""
    signal_after: dict[int, int] = field(default_factory=dict)
    """Forward passes after which a rank sends itself SIGTERM."""
    overrides_of: dict[int, list[str]] = field(default_factory=dict)
    """Further overrides of a rank alone."""
    kill_after: int | None = None
    """Forward passes after which every rank kills itself."""
    blocked: str | None = None
    """A path in the run that is a folder with something in it before the first step, where a file is to come."""
    dump: str | None = None
    """Where the first rank writes whole weights and moments as they are before the first step, and with .again behind
    it, as they are when a rollback has put them back to that."""

    def __post_init__(self) -> None:
        self.poison = {int(rank): calls for rank, calls in self.poison.items()}  # JSON's keys are strings
        self.overrides_of = {int(rank): words for rank, words in self.overrides_of.items()}
        self.signal_after = {int(rank): passes for rank, passes in self.signal_after.items()}


def run(*jobs: Job) -> list[list[int]]:
    """Run jobs one after another; each one's exit codes by rank. What they say goes to standard error."""
    server = _server()
    assert server.stdin
    assert server.stdout
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "said")
        print(json.dumps({"jobs": [asdict(job) for job in jobs], "said": str(said)}), file=server.stdin, flush=True)
        answered = select.select([server.stdout], [], [], LIMIT_S)[0]
        if not answered:
            os.killpg(server.pid, signal.SIGKILL)
            _server.cache_clear()
        text = said.read_text() if said.exists() else ""
        codes = server.stdout.readline()
        assert codes, f"no answer within {LIMIT_S} s\n{text[-4000:]}"
    sys.stderr.write(text)
    return json.loads(codes)


@functools.cache
def _server() -> subprocess.Popen[str]:
    """This file as a program, started when it is first needed, until the tests end."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip
    assert server.stdin
    atexit.register(server.stdin.close)
    return server


def _free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


def _fork_ranks(job: Job, said: str) -> list[int]:
    port, children = _free_port(), []
    for rank in range(job.n_ranks):
        child = os.fork()
        if child == 0:
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.n_ranks, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in variables.items()}, MASTER_ADDR="127.0.0.1")
            code = 99
            try:
                for number in (1, 2):
                    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
                code = _pretrain(job, rank)
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _pretrain(job: Job, rank: int) -> int:
    import tiny_run
    import torch
    import typer

    from gpt_oss_lite.training import pretrain as loop
    from shared_data.console import run_app

    if job.float64:
        torch.set_default_dtype(torch.float64)
    real, real_start = loop.open_run, loop.restore_start

    def restore_start(run: Any) -> None:
        real_start(run)
        if job.dump is not None:
            dump_state(run, f"{job.dump}.again")

    def open_run(plan: Any) -> Any:
        opened = real(plan)
        if job.dump is not None:
            dump_state(opened, job.dump)
        if job.blocked is not None and rank == 0:
            (opened.folder / job.blocked / "in the way").mkdir(parents=True)
        if job.bf16:
            draw_biases(opened.model)
        tiny_run.blow_up(opened, job.poison.get(rank, []))
        forward, count = opened.parallel.forward, 0

        def signalling(*words: Any, **names: Any) -> Any:
            nonlocal count
            with torch.autocast("cpu", torch.bfloat16, enabled=job.bf16):
                hidden, stats = forward(*words, **names)
            count += 1
            if count == job.kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
            if count == job.signal_after.get(rank):
                signal.raise_signal(signal.SIGTERM)
            return hidden.to(torch.get_default_dtype()), stats

        tiny_run.replace_forward(opened, signalling)
        return opened

    loop.open_run, loop.restore_start = open_run, restore_start
    app = typer.Typer()

    @app.command()
    def go() -> None:
        options = loop.PretrainOptions(
            config=Path(job.config), out=Path(job.out), overrides=[*job.overrides, *job.overrides_of.get(rank, [])],
            max_steps=job.max_steps, resume_latest=job.resume_latest, seed=job.seed,
        )  # fmt: skip
        raise typer.Exit(loop.pretrain(options))

    return run_app(app, [])


def dump_state(run: Any, path: str) -> None:
    """Write a run's weights and moments, gathered over the ranks."""
    import torch

    from gpt_oss_lite.training.distributed import whole

    state = {}
    for name, parameter in run.model.named_parameters():
        moments = run.optimizer.state.get(parameter, {})
        state[name] = [whole(tensor).clone() for tensor in (parameter.detach(), *moments.values())]
    parts = run.ranks.gather(state)
    if run.ranks.is_main:
        torch.save({name: tensors for part in parts for name, tensors in part.items()}, path)


def draw_biases(model: Any) -> None:
    """Normal numbers for the biases of the routed experts, by their names: the same on whichever rank they are."""
    import torch

    for name, parameter in model.named_parameters():
        if ".experts." in name and name.endswith("bias"):
            numbers = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.data.normal_(generator=numbers)


def import_before_the_fork() -> None:
    """Import what every rank would import for itself: an optimizer or a sharded model takes seconds for it."""
    import importlib

    for name in ("gpt_oss_lite.training.pretrain", "gpt_oss_lite.training.sharded", "torch._dynamo",
                 "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"):  # fmt: skip
        importlib.import_module(name)


if __name__ == "__main__":
    import_before_the_fork()
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps([_fork_ranks(Job(**job), request["said"]) for job in request["jobs"]]), flush=True)
