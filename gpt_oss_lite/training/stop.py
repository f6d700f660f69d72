"""Stopping in good order: SIGTERM, SIGINT, SIGHUP or a time limit end the run after the step in progress."""

import signal
import threading
import time
from collections import deque
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from gpt_oss_lite.training.distributed import Ranks
from gpt_oss_lite.training.late import LAG_STEPS, HostCopy

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TIME_IS_UP = 1000


class StopRequest:
    """A context in which a signal asks for a stop instead of killing; a second SIGINT leaves at once.

    Args:
        max_hours: ask for a stop after so long; None: never.
    """

    def __init__(self, max_hours: float | None = None) -> None:
        self._deadline = None if max_hours is None else time.monotonic() + max_hours * 3600
        self._max_hours = max_hours
        self._signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def code(self) -> int:
        """`reason` as a number, for the ranks of a job to agree on: a signal's, TIME_IS_UP, or 0 to go on."""
        if self._signal is not None:
            return int(self._signal)
        return TIME_IS_UP if self._deadline is not None and time.monotonic() >= self._deadline else 0

    def describe(self, code: int) -> str:
        """The reason behind a `code` of any rank."""
        return f"--max-hours {self._max_hours:g}" if code == TIME_IS_UP else signal.Signals(code).name

    @property
    def reason(self) -> str | None:
        """Why to stop; None: go on."""
        code = self.code
        return self.describe(code) if code else None

    def __enter__(self) -> Self:
        # Python delivers signals to the main thread only; elsewhere (a notebook's worker) there is nothing to install.
        if threading.current_thread() is threading.main_thread():
            # What is ignored stays so: nohup asks for a run that outlives its terminal.
            heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._on_signal) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = signal.Signals(number)


class AgreedStop:
    """The ranks of a job stop after the same step: what one of them is asked for is known to all a few steps later.

    Args:
        request: this rank's.
        ranks: of the job; one alone stops at once.
    """

    def __init__(self, request: StopRequest, ranks: Ranks) -> None:
        self._request, self._ranks = request, ranks
        self._pending: deque[HostCopy] = deque()

    def reason(self) -> str | None:
        """Why to stop; None: go on. Every rank calls it after each step."""
        if self._ranks.size == 1:
            return self._request.reason
        code = torch.tensor(self._request.code, device=self._ranks.device)
        self._pending.append(HostCopy(self._ranks.max(code)))
        if len(self._pending) <= LAG_STEPS:
            return None
        agreed = self._pending.popleft().tolist()
        return self._request.describe(agreed) if agreed else None


def ignore_stop_signals(worker: int) -> None:
    """For loader workers: a Ctrl-C or a scheduler's SIGTERM reaches the whole group, and the run still needs its
    data."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
