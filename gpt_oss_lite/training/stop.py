"""Stopping in good order: SIGTERM, SIGINT or a time limit end the run after the step in progress."""

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """A context in which a signal asks for a stop instead of killing; a second SIGINT leaves at once.

    Args:
        max_hours: ask for a stop after so long; None: never.
    """

    def __init__(self, max_hours: float | None = None) -> None:
        self._deadline = None if max_hours is None else time.monotonic() + max_hours * 3600
        self._max_hours = max_hours
        self._signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    @property
    def reason(self) -> str | None:
        """Why to stop; None: go on."""
        if self._signal is not None:
            return self._signal.name
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return f"--max-hours {self._max_hours:g}"
        return None

    def __enter__(self) -> Self:
        # Python delivers signals to the main thread only; elsewhere (a notebook's worker) there is nothing to install.
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = signal.Signals(number)


def ignore_stop_signals(worker: int) -> None:
    """For loader workers: a Ctrl-C or a scheduler's SIGTERM reaches the whole group, and the run still needs its
    data."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
