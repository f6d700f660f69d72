"""What a person sees: a bar with rate and time left in a terminal, plain lines in a pipe; and errors as one line.

All of it goes to standard error, so that a command's result on standard output can be piped (`--json`).
"""

import errno
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

import typer
from pydantic import ValidationError
from rich.console import Console, ConsoleDimensions
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from shared_data.errors import UserError

PLAIN_LINE_INTERVAL_S = 10.0

# typer brings click, in its newer releases under a private name; by way of its own class it is found in both.
_ClickException: Any = typer.BadParameter.__mro__[2]

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_KEYBOARD = 130

# What a person can put right: a path that is not there, may not be written, or is no file.
_BAD_INPUT_ERRNOS = {
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EROFS, errno.EEXIST, errno.ENAMETOOLONG,
}  # fmt: skip


_muted_as: list[str] = []
"""The name of this process, where another one speaks for it."""


def mute(name: str) -> None:
    """Say nothing more in this process but errors, those with its name: another one says the same."""
    _muted_as[:] = [name]


def say(message: str) -> None:
    """Print one line to standard error; where its reader has gone (a closed terminal), work goes on without."""
    if not _muted_as:
        _print(message)


def complain(message: str) -> None:
    """Say what is wrong, in a muted process too."""
    _print(": ".join([*_muted_as, message]))


def _print(message: str) -> None:
    with _without_a_reader():
        print(message, file=sys.stderr, flush=True)


@contextmanager
def _without_a_reader() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EPIPE):
            raise


class _Screen:
    """Standard error as bars are written to it: as with `say`, work outlives the terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _without_a_reader():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with _without_a_reader():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _BarConsole(Console):
    """Leaves room beside a bar for the ^C^C of a terminal: on the next line it would keep the bar from being erased."""

    @property  # type: ignore[misc]  # nothing sets it
    def size(self) -> ConsoleDimensions:
        width, height = super().size
        return ConsoleDimensions(max(width - len("^C^C"), 1), height)


def count_with_unit(count: float, unit: str = "") -> str:
    """A count in three figures: 0.25, 950, 12.3k, 4.56M, 7.89G; with its unit: 12.3k tokens, but 4.56 MB."""
    prefix = ""
    for larger in ("k", "M", "G"):
        if abs(count) < 999.5:
            break
        count, prefix = count / 1000, larger
    if unit.split("/")[0] == "B":
        return f"{count:.3g} {prefix}{unit}"
    return f"{count:.3g}{prefix} {unit}".rstrip()


def count_of(count: int, noun: str) -> str:
    """A number of things: 1 shard, 2 shards."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


class ProgressReporter:
    """Progress of one piece of work with a known or unknown total. Make it with `progress`."""

    def __init__(self, label: str, total: float | None, unit: str, bar: Progress | None, lines: bool) -> None:
        self._label, self._total, self._unit, self._bar, self._lines = label, total, unit, bar, lines
        self._done = 0.0
        self.is_finished = not total
        """Whether the work is done."""
        self._started = self._last_line = time.monotonic()
        self._task = bar.add_task(label, total=total, rate="") if bar else None

    def _rate(self) -> float:
        return self._done / max(time.monotonic() - self._started, 1e-9)

    def advance(self, amount: float) -> None:
        """Count `amount` more units as done."""
        self._done += amount
        if self._total and self._done >= self._total:
            self.is_finished = True
        rate = count_with_unit(self._rate(), f"{self._unit}/s")
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=self._done, rate=rate)
        elif self._lines and time.monotonic() - self._last_line >= PLAIN_LINE_INTERVAL_S:
            self._last_line = time.monotonic()
            done, left = count_with_unit(self._done, self._unit), ""
            if self._total:
                done += f" of {count_with_unit(self._total, self._unit)} ({self._done / self._total:.0%})"
                left = f", {max(self._total - self._done, 0) / self._rate():.0f} s left"
            say(f"{self._label}: {done}, {rate}{left}")

    def finish(self) -> None:
        """Show the whole bar: the work is done, though it took fewer units than were foreseen."""
        self.is_finished = True
        if self._bar and self._task is not None:
            done = self._done or 1
            self._bar.update(self._task, total=done, completed=done)

    def remove(self) -> None:
        """Take the bar off the screen."""
        if self._bar and self._task is not None:
            self._bar.remove_task(self._task)


_shown: list[Progress] = []
"""The bars on the screen, at most one group: work within work gets a bar below the other's."""


@contextmanager
def progress(label: str, total: float | None, unit: str, *, lines: bool = True) -> Iterator[ProgressReporter]:
    """Report progress of work that may last over two seconds. The bar of work that stopped before it was done, by an
    error, Ctrl-C or in good order, leaves the screen: what is said of that end stands alone.

    Args:
        label: what is being done, e.g. "clean fineweb".
        total: units in all, None when unknown.
        unit: name of the unit, e.g. "documents", "B", "tokens".
        lines: whether to print lines where there is no terminal; False for work that logs its own.
    """
    console = _BarConsole(file=cast(TextIO, _Screen(sys.stderr)), soft_wrap=True)
    if not console.is_terminal or _muted_as:
        yield ProgressReporter(label, total, unit, None, lines)
        return
    if _shown:
        within = ProgressReporter(label, total, unit, _shown[0], lines)
        try:
            yield within
        finally:
            within.remove()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
               TextColumn("{task.fields[rate]}"), TimeRemainingColumn(elapsed_when_finished=True))  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        _shown.append(bar)
        reporter = ProgressReporter(label, total, unit, bar, lines)
        try:
            yield reporter
        finally:
            _shown.pop()
        bar.live.transient = not reporter.is_finished
        if not total:
            reporter.finish()


def run_app(
    app: typer.Typer, arguments: list[str] | None = None, prog_name: str | None = None, says_stopped: bool = True
) -> int:
    """Run a typer application and return its exit code: an error for the user is one line on standard error.

    `--debug` anywhere on the command line shows the traceback instead. After Ctrl-C a line says so, unless
    `says_stopped` is off, as in a process whose parent says it.
    """
    code = _exit_code(app, arguments, prog_name)
    if code == EXIT_KEYBOARD and says_stopped:
        say("stopped by the keyboard")
    return code


def _exit_code(app: typer.Typer, arguments: list[str] | None, prog_name: str | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    command = typer.main.get_command(app)
    try:
        result: Any = command.main(args=words, prog_name=prog_name, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except typer.Exit as leaving:
        return leaving.exit_code
    except _ClickException as usage:
        say(f"error: {_describe_usage(usage)}")
        return EXIT_BAD_INPUT
    except (KeyboardInterrupt, typer.Abort):  # newer typers return the code themselves
        return EXIT_KEYBOARD
    except BrokenPipeError:
        # The reader of our output has gone (`... | head`): nothing to report, and nothing more to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (UserError, OSError) as error:
        if debug:
            traceback.print_exc()
        complain(f"error: {describe(error)}")
        bad_input = isinstance(error, UserError) or error.errno in _BAD_INPUT_ERRNOS
        return EXIT_BAD_INPUT if bad_input else EXIT_FAILED


def _describe_usage(error: Any) -> str:
    """One line for wrong words on the command line, with the value; newer typers check values by pydantic, which
    leaves it out."""
    message = " ".join(error.format_message().split())
    if isinstance(error.__cause__, ValidationError):
        value = error.__cause__.errors()[0]["input"]
        message = message.replace("Value error, ", "").replace(": Input should", f": {value!r} should")
        message = message.split(", unable to parse")[0]
    return f"{message} See --help." if message.startswith("Missing ") else message


def describe(error: Exception) -> str:
    """One line for an error: the path and the system's words for an OSError, the message for any other."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split())
