"""A rank that is killed or stands still ends the job within the time-out, and is named; torchrun starts the job again,
and it goes on from its newest checkpoint."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
import tiny_run

TIMEOUT_S = 20
STEPS = 40


def start(recipe, out, n_ranks=2):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}",
        "--max-restarts=1", "training/pretrain.py", "--config", recipe, "--out", out, "--seed", "1", "--auto-resume",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        list(map(str, command)), stderr=subprocess.PIPE, text=True, env=environment, cwd=tiny_run.ROOT
    )


def processes_by_rank(launcher):
    """The processes of a job's ranks."""
    children = psutil.Process(launcher.pid).children()
    return {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}


def wait_for_checkpoint(launcher, run, step):
    deadline = time.monotonic() + 120
    while not (run / "checkpoints" / f"meta_step_{step}.json").exists():
        assert launcher.poll() is None, launcher.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_a_missing_rank_is_named_within_the_time_out_and_the_job_goes_on(tmp_path, how):
    corpus = tiny_run.make_corpus(tmp_path / "corpus")
    recipe = tiny_run.write_recipe(
        tmp_path / "tiny.yaml", corpus, total_steps=STEPS, distributed_timeout_s=TIMEOUT_S, save_interval=5
    )
    run = tmp_path / "run"
    launcher = start(recipe, run)
    wait_for_checkpoint(launcher, run, 5)
    by_rank = processes_by_rank(launcher)
    by_rank[1].send_signal(how)
    sent = time.monotonic()
    _, alive = psutil.wait_procs(by_rank.values(), timeout=TIMEOUT_S)
    seconds = time.monotonic() - sent
    assert not alive
    _, stderr = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, stderr
    print(f"{how.name}: all ranks had ended {seconds:.1f} s after it (time-out {TIMEOUT_S} s)")
    named = rf"error: rank 1 \(pid {by_rank[1].pid} on \S+\) (was killed|gave no sign of life)"
    assert re.search(named, stderr), stderr
    (resumed,) = tiny_run.events(run, "resume")
    assert resumed["step"] >= 5
    rows = tiny_run.rows(run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    clean = tmp_path / "clean"
    code, stderr = tiny_run.finish(tiny_run.start_run(config=recipe, out=clean, seed=1))
    assert code == 0, stderr
    assert [row["ce"] for row in rows] == pytest.approx([row["ce"] for row in tiny_run.rows(clean)], rel=1e-5)
