"""Killed at random points over all stages, and a disk that is full: the same bytes, little work lost, no hang."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from killing import die_at_call, in_child, sum_of_work, work_of, workers_killed
from pipeline_corpus import MANY_TASKS, STAGES, context_of, hashes, make_corpus, run_all

from shared_data.executor import execute

N_WORKER_KILLS = 6
N_PARENT_KILLS = 14


@pytest.fixture(scope="module")
def clean_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kills")
    make_corpus(folder, pipeline=MANY_TASKS, shard_size_tokens=1100)
    context = context_of(folder, root="whole")
    return folder, run_all(context), hashes(context.layout.root)


def test_d4_killed_at_20_random_points_over_all_stages(clean_run):
    """14 kills of the parent, 6 of a worker under a parent that goes on; each stage redoes under 15 % a kill."""
    folder, expected_reports, expected = clean_run
    rng = random.Random(20)
    root = folder / "killed"
    context = context_of(folder, root="killed")
    killed_in = []
    while len(killed_in) < N_PARENT_KILLS:
        number = rng.randint(1, 110)

        def attempt(number=number):
            die_at_call(number)
            run_all(context)

        status = in_child(attempt)
        if not os.WIFSIGNALED(status):
            break
        reports = sorted(path.stem for path in (root / "state" / "reports").glob("*.json"))
        killed_in.append(len(reports))
    assert len(killed_in) >= N_PARENT_KILLS - 2
    assert len(set(killed_in)) >= 3, "the kills fall into several stages"
    reports = run_all(context)
    assert hashes(root) == expected
    n = len(killed_in)
    for stage, report in reports.items():
        for work, whole in zip(work_of(report), work_of(expected_reports[stage]), strict=True):
            assert work["input_bytes"] == whole["input_bytes"] == whole["processed_bytes"]
        total, processed = sum_of_work(report)
        assert total <= processed <= (1 + 0.15 * n) * total
        assert json.loads((root / "state" / "reports" / f"{stage}.json").read_text()) == report


def test_d4_d16_workers_killed_at_random_points_are_replaced(clean_run):
    folder, _, expected = clean_run
    root = folder / "workers"
    context = context_of(folder, root="workers", workers=2)
    started = time.monotonic()
    with workers_killed(root, N_WORKER_KILLS, (6, 12), seed=5) as kills:
        reports = run_all(context)
    last = time.monotonic() - started
    assert len(kills) >= 3
    assert hashes(root) == expected
    for report in reports.values():
        total, processed = sum_of_work(report)
        # A kill takes the pool along: the tasks in flight in both workers and the one queued for each.
        assert total <= processed <= (1 + 0.15 * len(kills)) * total
    assert last < 60


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.STAGE)
def test_d4_killed_at_90_percent_a_stage_redoes_under_15(clean_run, tmp_path, stage):
    folder, expected_reports, _ = clean_run
    context = context_of(folder, root=str(tmp_path / "data"))
    for earlier in STAGES[: STAGES.index(stage)]:
        earlier.run(context)
    n_tasks = len(list((folder / "whole" / "state" / stage.STAGE).rglob("*.attempts")))
    assert n_tasks > 10
    count = 0

    def dying(task):
        nonlocal count
        count += 1
        commit = execute(task)
        if count == n_tasks * 9 // 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return commit

    def attempt():
        from shared_data import executor

        executor.execute = dying
        stage.run(context)

    assert os.WIFSIGNALED(in_child(attempt))
    report = stage.run(context)
    total, processed = sum_of_work(report)
    assert total == sum_of_work(expected_reports[stage.STAGE])[0]
    assert processed <= 1.15 * total


def test_a_disk_of_1_mb_is_one_line_and_with_more_room_the_run_goes_on(clean_run, tmp_path):
    """A real file system that fills up, in a mount name space of its own."""
    folder, _, expected = clean_run
    command = [
        sys.executable,
        "-m",
        "shared_data.prepare_data",
        "--workers",
        "1",
        "--data-root",
        str(tmp_path / "disk"),
    ]
    command += ["--mixture", str(folder / "mixture.yaml"), "--data-config", str(folder / "data_config.yaml")]
    script = """
    set -u
    mount -t tmpfs -o size=$1 tmpfs "$2"; shift
    disk=$1; shift
    "$@"; echo "exit code $?" >&2
    find "$disk" -name '*.tmp' >&2
    ls "$disk/state/reports" >&2
    mount -o remount,size=64m "$disk"
    "$@" 2>/dev/null || exit 1
    cp -r "$disk" "$disk.copy"
    """
    (tmp_path / "disk").mkdir()
    name_space = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", "1m"]
    ran = subprocess.run([*name_space, str(tmp_path / "disk"), *command], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    said = ran.stderr.splitlines()
    ended = said.index("exit code 1")
    assert said[ended - 1].startswith("error: ")
    assert said[ended - 1].endswith(": No space left on device")
    assert "pack.json" not in said[ended + 1 :]
    assert not [line for line in said[ended + 1 :] if line.endswith(".tmp")]
    assert hashes(tmp_path / "disk.copy") == expected
