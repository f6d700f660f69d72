"""A run that was killed or stands still: what monitor and report say of it, and what they do not know."""

import json
import signal
import time

import pytest
import tiny_run

from gpt_oss_lite import cli
from gpt_oss_lite.report.monitor import figures, standing
from gpt_oss_lite.report.run_log import read_run
from gpt_oss_lite.training.run_lock import locked, this_process, writer_lives
from shared_data.console import run_app

GONE = "no process writes here any more: killed, or failed"


@pytest.fixture
def started(tmp_path):
    """A run of 100,000 steps in a process of its own, after its second step; and its folder."""
    corpus = tiny_run.make_corpus(tmp_path / "corpus")
    recipe = tiny_run.write_recipe(tmp_path / "tiny.yaml", corpus, total_steps=100_000, save_interval=50_000)
    process = tiny_run.start_run(config=recipe, out=tmp_path / "run", seed=0)
    try:
        tiny_run.kill_after_step(process, tmp_path / "run", 2, how=signal.SIGSTOP)
        yield process, tmp_path / "run"
    finally:
        process.kill()
        process.communicate()


def set_boot(run, boot):
    """Make the run one of another machine, or of before this machine's last start."""
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    for event in lines:
        if event["event"] == "start":
            event["process"] |= {"boot": boot, "host": "node7"}
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in lines))


def test_a_killed_run_is_told_from_a_silent_one(started, capsys):
    process, run = started
    (start,) = tiny_run.events(run, "start")
    assert start["process"]["pid"] == process.pid
    log, later = read_run(run), time.time() + 1000
    assert log.writer_lives is True
    assert standing(log, time.time()).startswith("running, ")
    assert standing(log, later).endswith(" min, though its process lives: it hangs, or is stopped")
    assert "no process" not in log.status

    process.send_signal(signal.SIGKILL)
    process.wait()
    log = read_run(run)
    assert log.writer_lives is False
    assert standing(log, log.last_sign + 720) == f"{GONE}; last sign 12 min ago"
    assert figures(log, later)["seconds_left"] is None
    assert log.status.endswith(f" of 100,000, {GONE}")
    assert run_app(cli.app, ["monitor", str(run)]) == 0
    assert capsys.readouterr().out.startswith(f"run         run: {GONE}; last sign ")
    assert run_app(cli.app, ["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert GONE in page
    assert "last sign" in page

    set_boot(run, "another")  # from here on nothing is known of the process
    log = read_run(run)
    assert log.writer_lives is None
    assert standing(log, later).endswith(" min: killed, or it hangs on node7")
    assert "no process" not in log.status


def test_a_process_that_holds_the_run_lives_whatever_the_log_says(started):
    process, run = started
    set_boot(run, "another")
    assert read_run(run).writer_lives is True
    process.send_signal(signal.SIGCONT)


def test_what_is_known_of_a_folder(tmp_path):
    assert writer_lives(tmp_path, this_process()) is True
    assert writer_lives(tmp_path, this_process() | {"pid": 1}) is None  # no lock was ever there
    with locked(tmp_path):
        pass
    assert writer_lives(tmp_path, this_process() | {"pid": 1}) is False
    assert writer_lives(tmp_path, this_process() | {"pid": 1, "boot": None}) is None
    assert writer_lives(tmp_path, None) is None
