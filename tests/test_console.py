"""What a person sees of work that goes on: counts, bars, lines; and a reader that has gone."""

import contextlib
import os
import pty
import re
import sys

import pytest

from shared_data import console
from shared_data.console import count_of, count_with_unit, progress, say


@pytest.mark.parametrize(
    ("count", "unit", "text"),
    [
        (0.25, "windows/s", "0.25 windows/s"), (950, "", "950"), (999.6, "", "1k"), (12_345, "tokens", "12.3k tokens"),
        (1_551_000, "B/s", "1.55 MB/s"), (999, "B", "999 B"), (7_890_000_000, "B", "7.89 GB"), (0, "steps", "0 steps"),
    ],
)  # fmt: skip
def test_counts_have_three_figures_and_their_unit(count, unit, text):
    assert count_with_unit(count, unit) == text


def test_one_thing_is_not_several():
    assert [count_of(number, "shard") for number in (0, 1, 1200)] == ["0 shards", "1 shard", "1,200 shards"]


def test_a_line_in_a_pipe_has_done_of_all_rate_and_time_left(monkeypatch, capsys):
    times = iter([0.0, 20.0, 20.0, 20.0, 20.0, 20.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(times))
    with progress("copy", 4_000_000, "B") as report:
        report.advance(1_000_000)
    assert capsys.readouterr().err == "copy: 1 MB of 4 MB (25%), 50 kB/s, 60 s left\n"


def all_of(master: int) -> str:
    """What a terminal was shown until it was closed at the other end."""
    shown = b""
    with contextlib.suppress(OSError):
        while chunk := os.read(master, 1 << 16):
            shown += chunk
    os.close(master)
    return shown.decode()


@pytest.mark.parametrize(("total", "done", "early"), [(10, 10, False), (10, 7, True), (None, 3, False), (0, 0, False)])
def test_a_bar_that_is_finished_looks_finished(total, done, early, monkeypatch):
    master, terminal = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with os.fdopen(terminal, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with progress("work", total, "steps") as report:
            for _ in range(done):
                report.advance(1)
            if early:
                report.finish()
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", all_of(master)).strip().splitlines()[-1]
    assert last.startswith("work ")
    assert " 100%" in last


def test_a_bar_of_work_that_stopped_early_does_not(monkeypatch):
    master, terminal = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(terminal, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with contextlib.suppress(KeyError), progress("work", 10, "steps") as report:
            report.advance(7)
            raise KeyError
    shown = all_of(master)
    assert "70%" in shown
    assert "100%" not in shown


def test_work_goes_on_where_the_terminal_has_gone(monkeypatch):
    master, terminal = pty.openpty()
    with os.fdopen(terminal, "w", buffering=1) as stream:
        os.close(master)
        monkeypatch.setattr(sys, "stderr", stream)
        with pytest.raises(OSError, match="Input/output"):
            os.write(terminal, b"x")
        with progress("work", 2, "steps") as report:  # no terminal any more: plain lines
            report.advance(1)
        say("nobody reads this")
        os.dup2(os.open(os.devnull, os.O_WRONLY), terminal)  # for what the stream still holds


def test_a_bar_goes_on_where_its_terminal_goes(monkeypatch):
    master, terminal = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(terminal, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with progress("work", 2, "steps") as report:
            report.advance(1)
            shown = os.read(master, 1 << 16).decode()
            os.close(master)
            with pytest.raises(OSError, match="Input/output"):
                os.write(terminal, b"x")
            say("nobody reads this")
            report.advance(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), terminal)
    assert "work" in shown, "there was a bar before"
