"""Runs the commands of `make demo` one after another, and hands signals on to the one that runs."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import typer

from shared_data.console import say

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def words_of(command: Sequence[str | Path]) -> str:
    """A command as one types it: paths below the working folder are relative to it."""
    here = Path.cwd()
    shown = [str(word.relative_to(here)) if isinstance(word, Path) and word.is_relative_to(here) else str(word)
             for word in command]  # fmt: skip
    return " ".join(["gpt-oss-lite", *(repr(word) if " " in word else word for word in shown)])


class Commands:
    """The `gpt-oss-lite` commands of one demo.

    A command runs in a process group of its own, so that a Ctrl-C or a closed terminal reaches it once, by way of us:
    as the signal that it saves on. We wait for it, and then end too.
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._starting = False
        self._stopped_by: int | None = None
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def run(self, *command: str | Path, keep_output: bool = False) -> str:
        """Run one; its standard output is returned, or goes where ours goes.

        Raises:
            typer.Exit: it failed, or a signal stopped it; with its exit code.
        """
        say(f"\n$ {words_of(command)}")
        output, code = self._wait([str(word) for word in command], subprocess.PIPE if keep_output else None)
        if self._stopped_by is not None:
            raise self._stop(code)
        if code:
            say(f"the command above ended with exit code {code}")
            raise typer.Exit(code)
        return output

    def _wait(self, words: list[str], output: int | None) -> tuple[str, int]:
        self._starting = True
        with subprocess.Popen([sys.executable, "-m", "gpt_oss_lite", *words], stdout=output, stdin=subprocess.DEVNULL,
                              text=True, errors="replace", process_group=0) as child:  # fmt: skip
            self._child, self._starting = child, False
            if self._stopped_by is not None:  # while it started
                os.killpg(child.pid, signal.SIGTERM)
            try:
                text, _ = child.communicate()
            finally:
                self._child = None
        return text or "", child.returncode

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopped_by = number
        if self._child is not None and self._child.returncode is None:
            # The loop knows SIGINT, of which a second one leaves at once, and SIGTERM.
            os.killpg(self._child.pid, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        elif not self._starting:
            raise self._stop(128 + number)

    def _stop(self, code: int) -> typer.Exit:
        assert self._stopped_by is not None
        say("stopped; what is done is kept: run `make demo` again to go on")
        return typer.Exit(code if code > 0 else 128 + self._stopped_by)
