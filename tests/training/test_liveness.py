"""A rank that is killed or stands still ends the job within the time-out, and is named; torchrun starts the job again,
and it goes on from its newest checkpoint."""

import os
import re
import signal
import socket
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
# Else a node that comes later waits for an address that torchrun has told once (dynamic_rendezvous.py of 2.13).
ELASTIC = {**ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def start(*words, env=ENVIRONMENT):
    """Start torchrun with some words."""
    command = [sys.executable, "-m", "torch.distributed.run", *map(str, words)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env, cwd=tiny_run.ROOT)


def listens(port):
    with socket.socket() as place:
        return place.connect_ex(("127.0.0.1", port)) == 0


def kill_node(launcher):
    for process in (psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)):
        process.kill()


def processes_by_rank(*launchers):
    """The processes of a job's ranks, on one node or several."""
    children = [child for launcher in launchers for child in psutil.Process(launcher.pid).children()]
    return {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}


def wait_for_checkpoint(run, step, *launchers):
    wait_for((run / "checkpoints" / f"meta_step_{step}.json").exists, launchers)


def wait_for_resume(run, times, *launchers):
    """Wait until a run has been gone on with so many times; the step that it last went on from."""
    wait_for(lambda: len(tiny_run.events(run, "resume")) == times, launchers)
    return tiny_run.events(run, "resume")[-1]["step"]


def wait_for(done, launchers):
    deadline = time.monotonic() + 120
    while not done():
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


HOST_A_STORE = (
    "from torch.distributed import TCPStore; store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); "
    "print(store.port, flush=True); input()"
)


@pytest.mark.parametrize("host", ["rank 0", "launcher"])
def test_where_the_host_of_the_ranks_store_stands_still_all_ranks_end(tmp_path, host):
    """Rank 0 hosts it under a launcher that has none, as here: the ranks are started by their variables alone."""
    corpus = tiny_run.make_corpus(tmp_path / "corpus")
    recipe = tiny_run.write_recipe(
        tmp_path / "tiny.yaml", corpus, total_steps=5000, distributed_timeout_s=10, save_interval=5, log_interval=1000
    )
    run, port, hosts = tmp_path / "run", ranks_on_one_gpu.free_port(), []
    environment = ENVIRONMENT | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    if host == "launcher":
        words = [sys.executable, "-c", HOST_A_STORE]
        hosts.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        port = int(hosts[0].stdout.readline())
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    command = [sys.executable, "-m", "gpt_oss_lite", "pretrain", "--config", recipe, "--out", run, "--seed", "1"]
    two = [
        subprocess.Popen(
            list(map(str, command)), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=tiny_run.ROOT,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)},
        )
        for rank in range(2)
    ]  # fmt: skip
    wait_for_checkpoint(run, 5, *two)
    (*hosts, two[0])[0].send_signal(signal.SIGSTOP)
    try:
        _, said = two[1].communicate(timeout=10 + 5)  # 5 s for a machine that is busy with other tests
        two[0].wait(timeout=5)
    finally:
        for process in (*hosts, *two):
            process.kill()
            process.wait()
    named = f"rank 0 (pid {two[0].pid} on " if host == "rank 0" else "the launcher, which"
    assert f"error: {named}" in said
    assert "which hosts the ranks' store" in said
    assert [one.returncode for one in two] == ([-signal.SIGKILL, 1] if host == "rank 0" else [1, 1])


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


def test_a_node_is_lost_and_another_comes_and_the_job_goes_on_with_what_is_there(tmp_path):
    """From 2 ranks to 1 to 2, with shards: torchrun's elastic nodes."""
    corpus = tiny_run.make_corpus(tmp_path / "corpus")
    recipe = tiny_run.write_recipe(
        tmp_path / "tiny.yaml", corpus, total_steps=100_000, save_interval=25, keep_last_n=1000, parallelism="fsdp",
        distributed_timeout_s=TIMEOUT_S,
    )  # fmt: skip
    run, port = tmp_path / "run", ranks_on_one_gpu.free_port()
    words = [
        "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=job",
        f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=last_call_timeout=2",
        "training/pretrain.py", "--config", recipe, "--out", run, "--seed", 1, "--auto-resume",
    ]  # fmt: skip
    first = start(*words, env=ELASTIC)
    wait_for(lambda: listens(port), (first,))  # where the nodes meet
    lost = start(*words, env=ELASTIC)
    wait_for_checkpoint(run, 25, first, lost)
    kill_node(lost)
    lost.communicate()
    resumed = wait_for_resume(run, 1, first)
    wait_for_checkpoint(run, (resumed // 25 + 1) * 25, first)
    other = start(*words, env=ELASTIC)
    again = wait_for_resume(run, 2, first, other)
    wait_for_checkpoint(run, (again // 25 + 1) * 25, first, other)
    for node in (first, other):
        kill_node(node)
    (stop,) = tiny_run.events(run, "stop")  # torchrun asks the ranks to stop when a node comes, which saves
    assert again == stop["step"]
    steps = [row["step"] for row in tiny_run.rows(run)]
    assert steps == list(range(1, len(steps) + 1))
    outputs = [node.communicate()[1] for node in (first, other)]
    assert sum(output.count("[ranks] 2, fsdp") for output in outputs) == 2  # of three starts


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
