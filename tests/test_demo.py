"""`make demo` in miniature: the same commands on less text and fewer steps. `.ci/run` runs the real one."""

import fcntl
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import termios
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import command_line
import pytest

ROOT = Path(__file__).parents[1]
SMALL = ["--source-bytes", "60000", "--total-tokens", "12000"]
RECIPE = command_line.settings() + [
    word
    for setting in ("total_steps=24", "lr=0.1", "micro_batch_size=4", "eval_windows=8")
    for word in ("--set", f"training.{setting}")
]


def demo(folder: Path, *more: str):
    return command_line.run("python", ROOT / "scripts/demo.py", *SMALL, *RECIPE, *more, cwd=folder)


def times(folder: Path) -> dict[str, int]:
    """When each result of the demo was last written; locks and logs are no results."""
    kept = [*folder.glob("data/quickstart/sources/*"), *folder.glob("data/quickstart/pretrain_chinchilla/**/*")]
    kept += [folder / "runs/demo" / name for name in ("loss.svg", "samples.txt", "config.yaml")]
    kept += (folder / "runs/demo/checkpoints").iterdir()
    return {str(path): path.stat().st_mtime_ns for path in kept if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return folder, demo(folder)


def test_the_demo_walks_the_whole_road(finished):
    folder, result = finished
    assert result.returncode == 0, result.stderr
    first, last = map(float, re.search(r"^val_bpb +first=(\S+) last=(\S+)$", result.stdout, re.MULTILINE).groups())
    assert last <= 0.85 * first
    peak_gb = float(re.search(r"peak RSS of all processes (\S+) GB", result.stdout)[1])
    assert 0.3 < peak_gb < 6
    assert "stopped on purpose" in result.stderr
    assert "[resume] from step 12" in result.stderr
    rows = [json.loads(line) for line in (folder / "runs/demo/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 25))
    samples = (folder / "runs/demo/samples.txt").read_text()
    assert samples.count("--- temperature ") == 3
    assert samples in result.stdout
    plot = ElementTree.parse(folder / "runs/demo/loss.svg").getroot()
    assert plot.tag.endswith("svg")


def test_in_a_pipe_there_are_plain_lines_only(finished):
    _, result = finished
    for output in (result.stdout, result.stderr):
        assert "\r" not in output
        assert "\x1b" not in output


def test_a_second_demo_redoes_nothing_and_says_the_same(finished):
    folder, first = finished
    before = times(folder)
    again = demo(folder)
    assert again.returncode == 0, again.stderr
    assert times(folder) == before
    assert again.stdout.splitlines()[-1] == first.stdout.splitlines()[-1]
    commands = [line for line in again.stderr.splitlines() if line.startswith("$ ")]
    assert [command.split()[2] for command in commands] == ["pretrain"]
    assert again.stderr.count("already") == 3  # the corpus, the run's steps, the samples
    assert "for what an earlier demo had left to do" in again.stdout
    assert "left to do" not in first.stdout


def test_the_command_under_again_is_the_run_that_was_made(finished):
    folder, first = finished
    again = re.search(r"^again +gpt-oss-lite (.*)$", first.stdout, re.MULTILINE)[1].split()
    made = json.loads((folder / "runs/demo/metrics.jsonl").read_text().splitlines()[-1])
    result = command_line.run("gpt-oss-lite", *again, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert f"step {made['step']} is done already" in result.stderr


def test_a_command_that_fails_ends_the_demo_with_its_exit_code(finished):
    folder, _ = finished
    result = demo(folder, "--set", "training.lr=0.2")
    assert result.returncode == 2
    assert "training.lr was 0.1, is 0.2" in result.stderr
    assert "val_bpb" not in result.stdout


class Terminal:
    """The demo as the leader of a terminal's session, as a shell starts it."""

    def __init__(self, folder: Path) -> None:
        self.master, end = pty.openpty()
        words = [sys.executable, str(ROOT / "scripts/demo.py"), *SMALL, *RECIPE, "--set", "training.total_steps=4000",
                 "--set", "training.save_interval=4000"]  # fmt: skip
        streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), end)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            words, cwd=folder, env=environment, start_new_session=True, **streams,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(end)
        self.shown = b""

    def read(self) -> bool:
        """Take what is there within a moment; False at the end."""
        try:
            if select.select([self.master], [], [], 0.05)[0]:
                self.shown += os.read(self.master, 65536)
        except OSError:
            return False
        return True


@pytest.mark.parametrize("how", ["Ctrl-C", "hang-up"])
def test_a_stop_from_the_terminal_is_saved_and_gone_on_from(how, finished, tmp_path):
    shutil.copytree(finished[0] / "data", tmp_path / "data")
    terminal, log = Terminal(tmp_path), tmp_path / "runs/demo/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_text().count("\n") >= 3):
        assert terminal.read(), terminal.shown.decode()
        assert time.monotonic() < deadline, terminal.shown.decode()
    if how == "Ctrl-C":
        os.write(terminal.master, b"\x03")
        while terminal.read():
            pass
        last = terminal.shown.decode().splitlines()[-1]
        assert last.endswith("stopped; what is done is kept: run `make demo` again to go on")
    os.close(terminal.master)
    assert terminal.process.wait(timeout=60) == 3
    (saved,) = (tmp_path / "runs/demo/checkpoints").glob("meta_step_*.json")
    assert int(saved.stem.split("_")[-1]) >= 3
    events = [json.loads(line) for line in (tmp_path / "runs/demo/events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "stop"
    assert events[-1]["reason"] == ("SIGINT" if how == "Ctrl-C" else "SIGTERM")
