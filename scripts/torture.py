#!/usr/bin/env python3
"""Torture: runs that are killed at random, faults under their files, and fuzzed input. What comes out must be right.

    python scripts/torture.py --kills 100 --fuzz 10000

Kills: a training run on the CPU over real shards, in a process of its own, is killed with SIGKILL inside a save, a
rename, a deletion, a write of the log, a read of data, or at a random moment, and started again with --auto-resume
until it is done; then its weights, moments and log must be those of the unbroken run, bit for bit. Processes are forked
from this one, which has PyTorch loaded already, so that a hundred kills take minutes.

Faults and fuzzing are described in tests/training/test_faults.py and tests/training/fuzz.py, and run from there.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import needs_packages  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/training")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import fuzz  # noqa: E402
import tiny_run  # noqa: E402
import torch  # noqa: E402
import typer  # noqa: E402

from gpt_oss_lite.options import AsJson, print_json  # noqa: E402
from gpt_oss_lite.training import checkpoint, logger, pretrain  # noqa: E402
from gpt_oss_lite.training.dataset import PretrainDataset  # noqa: E402
from shared_data.console import run_app, say  # noqa: E402
from shared_data.errors import UserError  # noqa: E402

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
STEPS = 16
PLACES = ("save", "rename", "deletion", "log write", "data read", "any moment")
# Calls of each kind that a run of STEPS steps makes, about: a kill is aimed at one of them.
CALLS = {"save": 32, "rename": 40, "deletion": 33, "log write": 40, "data read": 80}


def die() -> None:
    """Leave like a process that the machine killed: no handler, no flush, no destructor."""
    os.kill(os.getpid(), signal.SIGKILL)


def aim(place: str, call: int, rng: random.Random) -> None:
    """Make this process die at the n-th call of a kind: before it, after it, or with it half done."""
    if place == "any moment":
        timer = threading.Timer(rng.uniform(0, 1.2), die)
        timer.daemon = True
        timer.start()
        return
    count, moment = iter(range(10**9)), rng.choice(["before", "half", "after"])

    def deadly(real: Callable[..., Any], half: Callable[..., None] | None = None) -> Callable[..., Any]:
        def run(*words: Any, **names: Any) -> Any:
            mine = next(count) == call
            if mine and moment == "before":
                die()
            if mine and moment == "half" and half is not None:
                half(*words, **names)
                die()
            result = real(*words, **names)
            if mine:
                die()
            return result

        return run

    def half_of_file(real: Callable[..., Any]) -> Callable[..., None]:
        def write(content: Any, path: Path, **names: Any) -> None:
            real(content, path, **names)
            os.truncate(path, rng.randrange(os.path.getsize(path)))

        return write

    if place == "save":
        checkpoint.save_file = deadly(checkpoint.save_file, half_of_file(checkpoint.save_file))
        torch.save = deadly(torch.save, half_of_file(torch.save))
    elif place == "rename":
        os.replace = deadly(os.replace)
    elif place == "deletion":
        Path.unlink = deadly(Path.unlink)  # type: ignore[method-assign]
    elif place == "log write":
        real = logger._append
        logger._append = deadly(real, lambda path, lines: _torn_append(path, lines, rng))
    elif place == "data read":
        PretrainDataset.tokens = deadly(PretrainDataset.tokens)  # type: ignore[method-assign]


def _torn_append(path: Path, lines: bytes, rng: random.Random) -> None:
    with open(path, "ab") as file:
        file.write(lines[: rng.randrange(len(lines))])


def in_a_fork(work: Callable[[], int], log: Path) -> int:
    """Run in a forked process; its exit code, or minus the signal that ended it."""
    sys.stdout.flush(), sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(descriptor, 1), os.dup2(descriptor, 2)
            code = work()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def train(recipe: Path, run: Path) -> int:
    """One process of the restart loop, as the command line starts it."""
    import typer

    app = typer.Typer()

    @app.command()
    def go() -> None:
        options = pretrain.PretrainOptions(config=recipe, out=run, seed=7, auto_resume=True)
        raise typer.Exit(pretrain.pretrain(options))

    return run_app(app, [])


def result_of(run: Path) -> tuple[Any, Any]:
    """What must be the same: the log without clock times, and the hashes of the last checkpoint."""
    digests = tiny_run.digests(run, STEPS)
    return tiny_run.rows(run), digests


def kills(wanted: int, seed: int, folder: Path) -> dict[str, Any]:
    """Kill runs `wanted` times; the counts by place, and every loss in words."""
    rng, done, losses, finished = random.Random(seed), Counter[str](), [], 0
    corpus = tiny_run.make_corpus(folder / "corpus", n_documents=40)
    recipe = tiny_run.write_recipe(
        folder / "tiny.yaml", corpus, total_steps=STEPS, save_interval=2, keep_last_n=2, keep_every=10, eval_interval=8
    )
    log = folder / "output.txt"
    unbroken = folder / "unbroken"
    if in_a_fork(lambda: train(recipe, unbroken), log) != 0:
        raise UserError(f"the unbroken run failed; see {log}")
    expected = result_of(unbroken)
    while done.total() < wanted:
        run = folder / f"run-{finished}"
        while True:
            place = PLACES[done.total() % len(PLACES)]
            call = rng.randrange(CALLS.get(place, 1))
            shot = random.Random(rng.random())

            def work(place: str = place, call: int = call, shot: random.Random = shot, run: Path = run) -> int:
                if done.total() < wanted:
                    aim(place, call, shot)
                return train(recipe, run)

            code = in_a_fork(work, log)
            if code == -signal.SIGKILL:
                done[place] += 1
                continue
            if code != 0:
                losses.append(f"{run.name}: exit code {code} after a kill; see {log}")
            elif result_of(run) != expected:
                losses.append(f"{run.name}: not the unbroken run")
            break
        finished += 1
        say(f"torture: {done.total()} of {wanted} kills, {finished} runs finished, {len(losses)} losses")
        if losses:
            break
        shutil.rmtree(run)
    return {"kills": done.total(), "by_place": dict(done), "runs": finished, "losses": losses}


@app.command()
def torture(
    kill_count: Annotated[int, typer.Option("--kills", min=0, help="SIGKILLs over training runs.")] = 100,
    fuzz_count: Annotated[int, typer.Option("--fuzz", min=0, help="Fuzzed cases.")] = 10_000,
    with_faults: Annotated[bool, typer.Option("--faults/--no-faults", help="Faults under the files.")] = True,
    seed: Annotated[int, typer.Option(help="Of the kills and of the fuzzed cases.")] = 0,
    folder: Annotated[Path | None, typer.Option(help="Where runs lie meanwhile. Default: the system's.")] = None,
    as_json: AsJson = False,
) -> int:
    """Kill, damage and fuzz training runs, and print what was lost; exit code 1 if anything was."""
    if folder is not None and not folder.is_dir():
        raise UserError(f"--folder {folder}: there is no such folder")
    torch.set_num_threads(1)
    started = time.monotonic()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="torture-", dir=folder) as name:
        here = Path(name)
        if kill_count:
            result["kills"] = kills(kill_count, seed, here)
        if fuzz_count:
            result["fuzz"] = fuzz.run_all(fuzz_count, seed, here)
        if with_faults:
            result["faults"] = faults(here)
    result["seconds"] = round(time.monotonic() - started)
    losses = [loss for part in result.values() if isinstance(part, dict) for loss in part["losses"]]
    if as_json:
        print_json(result)
    else:
        for name, part in result.items():
            print(f"{name:<8} {part}")
        print(f"losses   {len(losses)}")
    return 1 if losses else 0


def faults(folder: Path) -> dict[str, Any]:
    """Run the tests of faults and hostile files; how many cases passed, and the names of those that did not."""
    report = folder / "faults.xml"
    tests = [str(ROOT / "tests/training" / name) for name in ("test_faults.py", "test_hostile.py")]
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *tests]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    text = report.read_text() if report.exists() else ""
    failed = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return {"cases": text.count("<testcase"), "losses": failed or ([] if result.returncode == 0 else [result.stdout])}


if __name__ == "__main__":
    sys.exit(run_app(app, prog_name="torture.py"))
