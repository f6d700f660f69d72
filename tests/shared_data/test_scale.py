"""Beyond one process tree: tasks on Ray with a worker killed, and shares of an array of jobs."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from killing import begun, start_child, workers_killed
from pipeline_corpus import MANY_TASKS, STAGES, context_of, hashes, make_corpus, run_all

from shared_data.errors import UserError
from shared_data.executor import OthersNotDone, Result, Task, Workers, run_tasks
from shared_data.files import write_atomic
from shared_data.options import EXIT_OTHERS_NOT_DONE, StageOptions, run_stage


@pytest.fixture(scope="module")
def clean_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scale")
    make_corpus(folder, pipeline=MANY_TASKS)
    context = context_of(folder, root="whole")
    run_all(context)
    return folder, hashes(context.layout.root)


@pytest.fixture(scope="module", autouse=True)
def local_ray(tmp_path_factory):
    """Workers that Ray starts import this file and its helpers; the cluster that the first task starts ends with the
    tests."""
    import ray

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, Path(__file__).parents[:2]), *([before] if before else [])])
    yield ray
    ray.shutdown()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@dataclass(frozen=True)
class Write:
    """Writes a file; the first time, or always, it kills its own process instead."""

    output: Path
    kills: str = "never"

    def run(self) -> Result:
        marker = self.output.with_suffix(".was-here")
        if self.kills == "always" or (self.kills == "once" and not marker.exists()):
            marker.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        write_atomic(self.output, f"{self.output.name} by {Path.cwd().name}")
        return Result({self.output: None}, {"read": 1})


@dataclass(frozen=True)
class Fail:
    def run(self) -> Result:
        raise UserError("x.jsonl: this file is bad")


def tasks_of(folder: Path, works: dict) -> list[Task]:
    return [Task(folder / f"{name}.json", f"key of {name}", 1, work) for name, work in works.items()]


ON_RAY = Workers(2, "ray")


def test_a_task_whose_ray_worker_is_killed_is_done_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    works = {f"t{n}": Write(Path(f"out{n}")) for n in range(5)}
    works["killer"] = Write(Path("out-k"), "once")
    commits = run_tasks(tasks_of(tmp_path, works), workers=ON_RAY, label="x")
    assert [commit.outputs[0].path for commit in commits] == [*(f"out{n}" for n in range(5)), "out-k"]
    assert (tmp_path / "out-k").read_text() == f"out-k by {tmp_path.name}", "relative paths are the driver's"
    attempts = (tmp_path / "killer.attempts").read_text().splitlines()
    assert len(attempts) == 2


def test_a_worker_that_was_started_elsewhere_works_in_the_drivers_folder(tmp_path, monkeypatch):
    from shared_data.ray_executor import _execute_in

    monkeypatch.chdir("/")
    [task] = tasks_of(tmp_path, {"t": Write(Path("out"))})
    _execute_in(str(tmp_path), task)
    assert (tmp_path / "out").read_text() == f"out by {tmp_path.name}"


def test_errors_on_ray_reach_the_user(tmp_path):
    with pytest.raises(UserError, match=r"x\.jsonl: this file is bad"):
        run_tasks(tasks_of(tmp_path, {"bad": Fail()}), workers=ON_RAY, label="x")
    with pytest.raises(ChildProcessError, match="lost 4 times at the same task"):
        run_tasks(tasks_of(tmp_path, {"killer": Write(tmp_path / "out", "always")}), workers=ON_RAY, label="x")


def test_the_pipeline_on_ray_with_a_worker_killed_gives_the_bytes_of_one_process(clean_run, capsys):
    folder, expected = clean_run
    context = context_of(folder, root="ray", workers=ON_RAY)
    with workers_killed(context.layout.root, 2, (6, 20), seed=3) as killed:
        assert [run_stage(stage.run, context, True) for stage in STAGES] == [0] * len(STAGES)
    assert killed
    reports = capsys.readouterr().out
    while reports:
        report, end = json.JSONDecoder().raw_decode(reports)
        assert "stage" in report
        reports = reports[end:].lstrip()
    assert hashes(context.layout.root) == expected


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_d3_the_shares_of_an_array_are_disjoint_and_complete(tmp_path, count):
    tasks = tasks_of(tmp_path, {f"t{n}": Write(tmp_path / f"out{n}") for n in range(10)})
    seen: list[set[str]] = []
    for index in reversed(range(count)):
        before = {path.name for path in tmp_path.glob("out*")}
        share = Workers(1, task_index=index, task_count=count)
        if index == 0:
            assert len(run_tasks(tasks, workers=share, label="x")) == 10, "the last job sees all done"
        else:
            with pytest.raises(OthersNotDone, match=f"job {index} has done its share"):
                run_tasks(tasks, workers=share, label="x")
        seen.append({path.name for path in tmp_path.glob("out*")} - before)
    assert sorted(name for share in seen for name in share) == sorted(f"out{n}" for n in range(10))
    assert all(len(share) in (10 // count, -(-10 // count)) for share in seen)


def test_d3_index_and_count_cannot_be_taken_for_each_other():
    assert StageOptions(task_index=6, task_count=7).who().task_index == 6
    for index, count in ((7, 6), (3, 3), (1, 1)):
        with pytest.raises(UserError, match=rf"--task-index is {index}: it must be below --task-count \({count}\)"):
            StageOptions(task_index=index, task_count=count).who()


def run_job(folder: Path, index: int, count: int) -> None:
    """What a job of an array does, in a forked process: ends with 0 when all is done, 75 when others are not."""
    context = context_of(folder, root="array", workers=Workers(1, task_index=index, task_count=count))
    for stage in STAGES:
        if code := run_stage(stage.run, context, False):
            os._exit(code)
    os._exit(0)


def test_an_array_of_three_jobs_at_once_gives_the_bytes_of_one_process(clean_run):
    """All jobs start together and again until none has anything left to do, as a scheduler's dependencies have it."""
    folder, expected = clean_run
    history = []
    while not history or EXIT_OTHERS_NOT_DONE in history[-1]:
        jobs = [start_child(lambda index=index: run_job(folder, index, 3)) for index in range(3)]
        history.append([os.waitstatus_to_exitcode(os.waitpid(job, 0)[1]) for job in jobs])
        assert set(history[-1]) <= {0, EXIT_OTHERS_NOT_DONE}
        assert len(history) <= 8
    assert len(history) > 1
    assert hashes(folder / "array") == expected


def test_the_command_passes_its_share_on_and_says_when_to_come_again(clean_run):
    folder, _ = clean_run
    command = [sys.executable, "-m", "shared_data.prepare_data", "--workers", "1", "--data-root", str(folder / "job")]
    command += ["--mixture", str(folder / "mixture.yaml"), "--data-config", str(folder / "data_config.yaml")]
    ran = subprocess.run([*command, "--task-index", "1", "--task-count", "2"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "job 1 has done its share" in ran.stderr
    assert "job 1 of 2 has done its share for now; start it again when all have ended" in ran.stderr
    assert 0 < begun(folder / "job") < begun(folder / "whole") / 2
