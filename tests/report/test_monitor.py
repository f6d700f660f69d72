"""A run in the terminal: what stands there, in a pipe, in a real terminal, while the run goes on."""

import dataclasses
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
import tiny_run
from rich.console import Console

from gpt_oss_lite import cli
from gpt_oss_lite.report.monitor import lines, screen, seconds_left, sparkline, standing
from gpt_oss_lite.report.run_log import RunLog, read_run
from shared_data.console import run_app

LOAD = [[0.25, 0.25, 0.25, 0.25], [0.05, 0.20, 0.25, 0.50]]


def log_of(times, events=(), **figures):
    """A run of 1,000 tokens a step that logged a row at each of some times."""
    rows = [
        {"step": 10 * n, "tokens": 10_000 * n, "time": at, "ce": 3.0 / n, "tokens_per_s": 500.0, "lr": 1e-3,
         "grad_norm": 0.5, "aux": 1.0, "mfu": None, "memory_gib": 1.0, "data_wait_s": 0.002, "expert_load": LOAD,
         "router_entropy": [1.0, 1.2], **figures}
        for n, at in enumerate(times, 1)
    ]  # fmt: skip
    return RunLog("r", tiny_run.ROOT, rows, [{"event": "start", "step": 0, "stop_step": 100}, *events], [], {}, {})


def test_time_left_is_the_steps_left_at_the_newest_speed():
    assert seconds_left(log_of([0.0, 20.0])) == 80 * 1000 / 500
    assert seconds_left(log_of([0.0], tokens_per_s=None)) is None
    assert seconds_left(log_of([0.0], [{"event": "done", "step": 10}])) is None


def test_a_run_that_logs_no_more_is_called_silent():
    log = log_of([0.0, 100.0, 200.0])
    assert standing(log, 260.0) == "running, last sign 60 s ago"
    assert standing(log, 699.0).startswith("running")
    assert standing(log, 1400.0) == "silent for 20 min: killed, or it hangs"
    saving = log_of([0.0, 100.0, 200.0], [{"event": "save", "step": 30, "time": 1300.0}])
    assert standing(saving, 1400.0).startswith("running")
    stopped = log_of([0.0], [{"event": "stop", "step": 10, "reason": "SIGTERM"}])
    assert standing(stopped, 1e6) == "stopped at step 10 (SIGTERM)"


def test_sparklines():
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7, float("nan")], 2) == "▁█"
    assert sparkline([6.9, 7.0], 2, floor=0.0) == "██"
    assert sparkline([5, 5], 9) == "▁▁"
    assert sparkline([], 9) == ""


def test_each_line_says_what_the_log_says():
    shown = dict(line for line in lines(log_of([0.0, 20.0]), 25.0, 10) if line[0])
    assert shown["progress"] == "step 20 of 100 (20.0%) | 20 k tokens | 3 min left"
    assert shown["loss"].startswith("1.5000 | smoothed ")
    assert shown["speed"] == "500 tok/s | MFU n/a | 1.00 GiB | data wait 2.0 ms a step"
    assert shown["layer 0"] == "1.00 1.00 1.00 1.00 | busiest 1.00"
    assert shown["layer 1"] == "0.20 0.80 1.00 2.00 | busiest 2.00"


def test_uneven_experts_stand_out_in_colour():
    console = Console(width=100, force_terminal=True, color_system="standard", file=io.StringIO(), record=True)
    console.print(screen(log_of([0.0, 20.0]), 25.0, 100))
    styled = console.export_text(styles=True)
    assert re.search(r"\x1b\[1;31m0\.20 ", styled)
    assert re.search(r"\x1b\[1;31m2\.00 ", styled)
    assert not re.search(r"\x1b\[1;31m1\.00 ", styled)


def shown_in(width, height, log, now=25.0):
    """The lines that a terminal shows."""
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(screen(log, now, width, height))
    return console.file.getvalue().splitlines()


def deep(n_layers=12, n_experts=8, events=()):
    """A run of many layers, whose expert 0 in layer n has (1 + n / 10) of its share."""
    share = 1 / n_experts
    load = [
        [share * (1 + n / 10), *[share * (1 - n / 10 / (n_experts - 1))] * (n_experts - 1)] for n in range(n_layers)
    ]
    skip = {"event": "skip", "step": 15, "time": 1.0, "micro_batches": [11, 22, 33, 44]}
    return log_of([0.0, 20.0], [skip, *events], expert_load=load)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_terminal_breaks_lines_between_words_and_shows_every_layer(width):
    lines_shown = shown_in(width, None, deep())
    assert {len(line) for line in lines_shown} == {width}
    text = " ".join(" ".join(line.strip("│ ") for line in lines_shown).split())
    assert "step 15 skipped: non-finite in micro-batches [11, 22, 33, 44]" in text
    assert "…" not in text
    assert sum("layer " in line for line in lines_shown) == 12
    assert any(line.strip("│ ").endswith("MFU n/a | 1.00 GiB") for line in lines_shown) == (width == 60)


def test_a_short_terminal_keeps_the_events_and_the_least_even_layers():
    lines_shown = shown_in(60, 24, deep())
    assert len(lines_shown) <= 24
    text = " ".join(" ".join(line.strip("│ ") for line in lines_shown).split())
    assert "step 15 skipped: non-finite in micro-batches [11, 22, 33, 44]" in text
    layers = [int(line.split()[2]) for line in lines_shown if line.startswith("│ layer")]
    assert layers == list(range(12 - len(layers), 12))
    assert 2 <= len(layers) < 12
    assert lines_shown[-2].strip("│ ") == f"{12 - len(layers)} layers more, more even"
    assert lines_shown[-1].startswith("╰")


def test_more_experts_than_a_line_holds_are_their_least_and_largest_load():
    assert any("layer 3     0.98 to 1.30 over 16 experts | " in line for line in shown_in(60, None, deep(4, 16)))


def test_where_a_run_stands_has_a_line_where_the_title_has_no_room():
    log = dataclasses.replace(deep(), writer_lives=False)
    assert (
        "no process writes here any more: killed, or failed; last sign 3 min ago" in shown_in(120, None, log, 200.0)[0]
    )
    lines_shown = shown_in(60, None, log, 200.0)
    assert lines_shown[0].strip("╭╮─ ") == "r"
    assert [line.strip("│ ") for line in lines_shown[1:3]] == [
        "run         no process writes here any more: killed, or", "failed; last sign 3 min ago"
    ]  # fmt: skip


def monitor(*words):
    return run_app(cli.app, ["monitor", *map(str, words)])


def test_in_a_pipe_it_says_once_where_the_run_stands(run_folders, capsys):
    assert monitor(run_folders[1]) == 0
    output = capsys.readouterr().out
    assert output.startswith("run         rough: done at step 40\nprogress    step 40 of 40 (100.0%) | ")
    assert "\x1b" not in output
    assert "rolled back from step" in output
    assert output.count("saved step") == 1


def test_json(run_folders, capsys):
    assert monitor(run_folders[0], "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["row"]["step"] == 60
    assert (result["status"], result["stop_step"], result["seconds_left"]) == ("done at step 60", 60, None)
    assert result["evaluation"]["step"] == 60


def test_a_run_without_a_row_yet(tmp_path, capsys):
    (tmp_path / "events.jsonl").write_text('{"event": "start", "step": 0, "time": 5.0}\n')
    assert monitor(tmp_path) == 0
    assert "no step logged yet" in capsys.readouterr().out
    assert monitor(tmp_path / "nowhere") == 2


def test_an_evaluation_before_the_first_save():
    shown = lines(log_of([0.0], [{"event": "eval", "step": 0, "loss": 4.0}]), 1.0, 10)
    assert dict(line for line in shown if line[0])["validation"] == "4.0000 at step 0"


class Terminal:
    """`monitor` in a terminal of its own. Use it as a context manager, which leaves no process behind."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.ours)

    def __init__(self, run):
        self.ours, theirs = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": str(tiny_run.ROOT), "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
        command = [sys.executable, "-m", "gpt_oss_lite", "monitor", str(run), "--interval", "0.1"]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        self.text = ""

    def read_until(self, words):
        deadline = time.monotonic() + 60
        while words not in self.text:
            assert time.monotonic() < deadline, self.text[-2000:]
            if select.select([self.ours], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self.ours, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    assert words in self.text, self.text[-2000:]
        self.text = self.text[self.text.rindex(words) :]


@pytest.fixture
def growing(tmp_path, run_folders):
    """A run's folder with its first 20 rows, and a function that adds what follows."""
    rows, events = ((run_folders[0] / f"{name}.jsonl").read_text().splitlines(True) for name in ("metrics", "events"))
    (tmp_path / "metrics.jsonl").write_text("".join(rows[:20]))
    start = json.loads(events[0]) | {"stop_step": 60}
    (tmp_path / "events.jsonl").write_text(json.dumps(start) + "\n")

    def grow(rows_until, done=False):
        (tmp_path / "metrics.jsonl").write_text("".join(rows[:rows_until]))
        if done:
            with open(tmp_path / "events.jsonl", "a") as file:
                file.write('{"event": "done", "step": 60, "time": 1.0}\n')

    return tmp_path, grow


def test_in_a_terminal_it_follows_the_run_and_ends_with_it(growing):
    folder, grow = growing
    with Terminal(folder) as terminal:
        terminal.read_until("step 20 of 60")
        grow(35)
        terminal.read_until("step 35 of 60")
        grow(60, done=True)
        terminal.read_until("done at step 60")
        terminal.read_until("step 60 of 60")
        assert terminal.process.wait(20) == 0


def test_ctrl_c_leaves_without_an_error(growing):
    with Terminal(growing[0]) as terminal:
        terminal.read_until("step 20 of 60")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(20) == 0
    assert read_run(growing[0]).ending is None
