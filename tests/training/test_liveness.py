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
import ranks_on_one_gpu
import tiny_run

from gpt_oss_lite.training import liveness
from gpt_oss_lite.training.checkpoint import CheckpointManager
from gpt_oss_lite.training.pretrain import PretrainOptions, pretrain

TIMEOUT_S = 20
STEPS = 60
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tiny_run.ROOT)}


def start(*words):
    """Start torchrun with some words."""
    command = [sys.executable, "-m", "torch.distributed.run", *map(str, words)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=tiny_run.ROOT)


def processes_by_rank(*launchers):
    """The processes of a job's ranks, on one node or several."""
    children = [child for launcher in launchers for child in psutil.Process(launcher.pid).children()]
    return {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}


def wait_for_checkpoint(run, step, *launchers):
    deadline = time.monotonic() + 120
    while not (run / "checkpoints" / f"meta_step_{step}.json").exists():
        assert all(launcher.poll() is None for launcher in launchers), [
            one.stderr and one.stderr.read() for one in launchers
        ]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_missing_rank_is_named_within_the_time_out_and_the_job_goes_on(tmp_path):
    """One is killed, and another one is stopped when the job has been started again."""
    corpus = tiny_run.make_corpus(tmp_path / "corpus")
    recipe = tiny_run.write_recipe(
        tmp_path / "tiny.yaml", corpus, total_steps=STEPS, distributed_timeout_s=TIMEOUT_S, save_interval=5
    )
    run, missing = tmp_path / "run", []
    launcher = start(
        "--standalone", "--nproc-per-node=2", "--max-restarts=2",
        "training/pretrain.py", "--config", recipe, "--out", run, "--seed", 1, "--auto-resume",
    )  # fmt: skip
    for how in (signal.SIGKILL, signal.SIGSTOP):
        saved = CheckpointManager(run / "checkpoints").latest_step() or 0
        wait_for_checkpoint(run, saved + 5, launcher)
        by_rank = processes_by_rank(launcher)
        by_rank[1].send_signal(how)
        sent = time.monotonic()
        _, alive = psutil.wait_procs(by_rank.values(), timeout=TIMEOUT_S)
        print(f"{how.name}: all ranks had ended {time.monotonic() - sent:.1f} s after it (time-out {TIMEOUT_S} s)")
        assert not alive
        missing.append(by_rank[1].pid)
    _, stderr = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, stderr
    for pid, what in zip(missing, ("was killed or died", "gave no sign of life"), strict=True):
        assert re.search(rf"error: rank 1 \(pid {pid} on \S+\) {what}", stderr), stderr
    assert [event["step"] >= 5 for event in tiny_run.events(run, "resume")] == [True, True]
    rows = tiny_run.rows(run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert pretrain(PretrainOptions(config=recipe, out=tmp_path / "clean", seed=1)) == 0
    clean = tiny_run.rows(tmp_path / "clean")
    assert [row["ce"] for row in rows] == pytest.approx([row["ce"] for row in clean], rel=1e-5)


def test_two_nodes_meet_by_torchruns_rendezvous_and_agree_on_the_folder(tmp_path):
    corpus = tiny_run.make_corpus(tmp_path / "corpus")
    recipe = tiny_run.write_recipe(tmp_path / "tiny.yaml", corpus, total_steps=5)
    nodes = ranks_on_one_gpu.start(
        2, ["-m", "gpt_oss_lite", "pretrain", "--config", str(recipe)], stderr=subprocess.PIPE, cwd=tmp_path,
        env=ENVIRONMENT,
    )  # fmt: skip
    outputs = [node.communicate(timeout=180)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny-001"]
    assert [row["step"] for row in tiny_run.rows(tmp_path / "runs" / "tiny-001")] == [1, 2, 3, 4, 5]
    assert sum("[ranks] 2, ddp" in output for output in outputs) == 1  # one rank speaks


@pytest.fixture
def stopped():
    """A process that lies stopped, as one that does not hear its launcher."""
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                time.sleep(0.001)
            yield process
        finally:
            process.kill()


def known_as(process, **changes):
    """What a process would have told of itself before it was stopped; the start from its second source, psutil."""
    ticks = round((psutil.Process(process.pid).create_time() - psutil.boot_time()) * os.sysconf("SC_CLK_TCK"))
    assert abs(ticks - int(liveness._start_of(process.pid))) <= os.sysconf("SC_CLK_TCK")  # the clock may be set
    return {**liveness._myself(), "pid": process.pid, "started": liveness._start_of(process.pid), **changes}


def test_a_stopped_rank_is_killed(stopped):
    assert not liveness._is_gone(known_as(stopped))
    liveness._kill(known_as(stopped))
    assert stopped.wait(timeout=10) == -signal.SIGKILL


@pytest.mark.parametrize(
    "changes", [{"started": "1"}, {"started": None}, {"host": "elsewhere"}, {"numbering": "pid:[1]"}]
)
def test_a_process_that_took_the_number_of_a_rank_is_left_alone(stopped, changes):
    who = known_as(stopped, **changes)
    liveness._kill(who)
    # A rank whose number is another's by now has ended; of one elsewhere, or of unknown start, that cannot be said.
    assert liveness._is_gone(who) == (changes == {"started": "1"})
    time.sleep(0.05)
    assert stopped.poll() is None
    assert psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED


def test_a_rank_that_has_ended_is_gone_and_there_is_nothing_to_kill(stopped):
    who = known_as(stopped)
    stopped.kill()
    while psutil.Process(stopped.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.001)
    assert liveness._is_gone(who)
    liveness._kill(who)
    assert stopped.wait(timeout=10) == -signal.SIGKILL
    assert liveness._is_gone(who)
    liveness._kill(who)
