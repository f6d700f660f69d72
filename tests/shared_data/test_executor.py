"""Tasks in processes: the same result, killed workers, the parent's death, commits."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared_data.commits import read_commit
from shared_data.errors import UserError
from shared_data.executor import Result, Task, execute, run_tasks
from shared_data.files import write_atomic
from shared_data.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Write:
    output: Path
    content: str
    log: Path | None = None

    def run(self) -> Result:
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{self.output.name}\n")
        write_atomic(self.output, self.content)
        return Result({self.output: None}, {"read": 1})


@dataclass(frozen=True)
class KillOnce:
    """Kills its own worker the first time (or always)."""

    output: Path
    always: bool = False

    def run(self) -> Result:
        marker = self.output.with_suffix(".was-here")
        if self.always or not marker.exists():
            marker.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        return Write(self.output, "survived").run()


@dataclass(frozen=True)
class Fail:
    def run(self) -> Result:
        raise UserError("x.jsonl: this file is bad")


@dataclass(frozen=True)
class Encode:
    output: Path

    def run(self) -> Result:
        return Write(self.output, str(load_tokenizer().encode("Hello world"))).run()


def task(folder: Path, name: str, work) -> Task:
    return Task(folder / f"{name}.json", f"key of {name}", 1, work)


@pytest.mark.parametrize("workers", [1, 3])
def test_commits_come_in_the_order_of_the_tasks_and_are_not_done_again(tmp_path, workers):
    log = tmp_path / "log"
    tasks = [task(tmp_path, f"t{n}", Write(tmp_path / f"out{n}", str(n), log)) for n in range(7)]
    first = run_tasks(tasks, workers=workers, label="x")
    assert [commit.outputs[0].path for commit in first] == [f"out{n}" for n in range(7)]
    (tmp_path / "out3").unlink()
    (tmp_path / "out5").write_text("longer than it was")
    assert run_tasks(tasks, workers=workers, label="x")[0] == first[0]
    assert sorted(log.read_text().split()) == sorted([f"out{n}" for n in range(7)] + ["out3", "out5"])
    assert (tmp_path / "out5").read_text() == "5"


def test_a_changed_key_is_done_again(tmp_path):
    execute(task(tmp_path, "t", Write(tmp_path / "out", "old")))
    execute(Task(tmp_path / "t.json", "another key", 1, Write(tmp_path / "out", "new")))
    assert (tmp_path / "out").read_text() == "new"
    assert read_commit(tmp_path / "t.json", "key of t") is None


def test_d26_killed_between_the_write_and_the_commit_leaves_one_copy(tmp_path, monkeypatch):
    own = task(tmp_path, "t", Write(tmp_path / "out", "content"))
    with monkeypatch.context() as patch:
        patch.setattr("shared_data.executor.write_commit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            execute(own)
    assert read_commit(own.record, own.key) is None
    execute(own)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "t.attempts", "t.json"]
    assert len((tmp_path / "t.attempts").read_text().splitlines()) == 2
    assert (tmp_path / "out").read_text() == "content"


def test_d5_a_torn_record_is_not_a_commit(tmp_path):
    own = task(tmp_path, "t", Write(tmp_path / "out", "content"))
    execute(own)
    own.record.write_bytes(own.record.read_bytes()[:-9])
    assert read_commit(own.record, own.key) is None
    execute(own)
    assert read_commit(own.record, own.key) is not None


def test_d16_a_killed_worker_is_replaced_and_its_task_retried(tmp_path, capsys):
    tasks = [task(tmp_path, f"t{n}", Write(tmp_path / f"out{n}", str(n))) for n in range(4)]
    tasks.append(task(tmp_path, "killer", KillOnce(tmp_path / "out-k")))
    started = time.monotonic()
    run_tasks(tasks, workers=2, label="x")
    assert time.monotonic() - started < 20
    assert (tmp_path / "out-k").read_text() == "survived"
    assert all((tmp_path / f"out{n}").read_text() == str(n) for n in range(4))
    assert "a worker process was killed" in capsys.readouterr().err


def test_d16_a_task_that_always_kills_its_worker_ends_in_an_error(tmp_path):
    tasks = [task(tmp_path, f"t{n}", KillOnce(tmp_path / f"out{n}", always=True)) for n in range(2)]
    with pytest.raises(ChildProcessError, match="killed 3 times in a row"):
        run_tasks(tasks, workers=2, label="x")


def test_an_error_of_a_task_reaches_the_user(tmp_path):
    tasks = [task(tmp_path, "bad", Fail()), task(tmp_path, "t", Write(tmp_path / "out", ""))]
    for workers in (1, 2):
        with pytest.raises(UserError, match=r"x\.jsonl: this file is bad"):
            run_tasks(tasks, workers=workers, label="x")
    assert not (tmp_path / "bad.json").exists()


def test_d17_encoding_in_the_parent_does_not_hang_the_workers(tmp_path):
    load_tokenizer().encode("the parent's encoder has started its threads")
    run_tasks([task(tmp_path, f"t{n}", Encode(tmp_path / f"out{n}")) for n in range(2)], workers=2, label="x")
    assert (tmp_path / "out1").read_text() == "[9906, 1917]"


PARENT = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_executor import Sleep, task
from shared_data.executor import run_tasks
if __name__ == "__main__":
    folder = Path(sys.argv[2])
    run_tasks([task(folder, f"t{n}", Sleep(folder / f"pid{n}")) for n in range(2)], workers=2, label="x")
"""


@dataclass(frozen=True)
class Sleep:
    output: Path

    def run(self) -> Result:
        write_atomic(self.output, str(os.getpid()))
        time.sleep(60)
        return Result({}, {})


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_workers_end_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    command = [sys.executable, str(script), str(Path(__file__).parent), str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as parent:
        files = [tmp_path / "pid0", tmp_path / "pid1"]
        deadline = time.monotonic() + 30
        while not all(path.exists() for path in files) and time.monotonic() < deadline:
            time.sleep(0.05)
        pids = [int(path.read_text()) for path in files]
        assert all(alive(pid) for pid in pids)
        parent.kill()
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)
