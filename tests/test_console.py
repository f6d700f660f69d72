"""What a person sees of work that goes on: counts, bars, lines; and a reader that has gone."""

import contextlib
import os
import pty
import re
import sys

import pytest
import typer

from shared_data import console
from shared_data.console import count_of, count_with_unit, progress, run_app, say


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


def lines_on(width: int, output: str) -> list[str]:
    """What a terminal of some columns shows of an output: text, line ends and the control sequences of a bar."""
    rows, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|.", output, re.DOTALL):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, column
        elif part == "\x1b[2K":
            rows[row] = ""
        elif part.endswith("A"):
            row -= int(part[2:-1])
        elif not part.startswith("\x1b"):
            if column == width:
                row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
            rows[row] = rows[row][:column].ljust(column) + part + rows[row][column + 1 :]
            column += 1
        rows += [""] * (row + 1 - len(rows))
    return [line.rstrip() for line in rows if line.strip()]


@pytest.fixture
def on_terminal(monkeypatch):
    """Runs a function whose standard error is a terminal of some columns; the lines that stand there at the end."""

    def run(width, work):
        master, terminal = pty.openpty()
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", str(width))
        with os.fdopen(terminal, "w") as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            work(stream)
        return lines_on(width, all_of(master))

    return run


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("how", ["an error", "Ctrl-C", "in good order"])
def test_a_bar_of_work_that_stopped_early_leaves_the_screen(on_terminal, width, how):
    def work(stream):
        say("before")
        with contextlib.suppress(KeyError, KeyboardInterrupt), progress("some work", 10, "steps") as report:
            report.advance(7)
            if how == "an error":
                raise KeyError
            if how == "Ctrl-C":
                stream.write("^C")  # as the terminal itself does
                raise KeyboardInterrupt
        say("after")

    assert [line for line in on_terminal(width, work) if line != "^C"] == ["before", "after"]


def test_a_finished_bar_stays_on_the_screen(on_terminal):
    def work(_):
        with progress("some work", 10, "steps") as report:
            report.advance(10)

    (line,) = on_terminal(60, work)
    assert line.startswith("some work ")
    assert " 100%" in line


def test_a_long_line_above_a_bar_is_broken_by_the_terminal_alone(on_terminal):
    """So that a command on it can be copied whole."""
    long = "go on with: " + "gpt-oss-lite pretrain --config runs/a/config.yaml " * 4

    def work(_):
        with progress("some work", 10, "steps"):
            say(long)

    assert "".join(line.ljust(60) for line in on_terminal(60, work)).rstrip() == long.rstrip()


def interrupted() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("says_stopped", [True, False])
def test_a_command_that_the_keyboard_stops_says_so(capsys, says_stopped):
    app = typer.Typer()
    app.command()(interrupted)
    assert run_app(app, [], says_stopped=says_stopped) == 130
    assert capsys.readouterr().err.strip() == "stopped by the keyboard" * says_stopped


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
            shown = ""
            while "work" not in shown:  # a bar comes in pieces, and again ten times a second
                shown += os.read(master, 1 << 16).decode()
            os.close(master)
            with pytest.raises(OSError, match="Input/output"):
                os.write(terminal, b"x")
            say("nobody reads this")
            report.advance(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), terminal)
