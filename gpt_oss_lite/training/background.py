"""Writing in the background: one thread, one piece of work at a time, tried again when it fails.

The training thread takes a snapshot (a copy, so training goes on and changes nothing of it) and hands it over. What
became of a write is read by the training thread, which alone writes the log; warnings are printed at once.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared_data.console import describe, say

# Seconds before the second and the third attempt: a full disk or a network file system often comes back.
PAUSES_S = (1.0, 10.0)


@dataclass(frozen=True)
class Outcome:
    """What became of a write."""

    step: int
    seconds: float
    """From the first attempt to the end."""
    attempts: int
    error: OSError | None
    """Of the last attempt; None: it is written."""


class BackgroundWriter:
    """Runs one write at a time in a thread.

    The thread is a daemon: a second Ctrl-C leaves without waiting for it, and what it had not finished has no marker.

    Args:
        pauses_s: seconds before each further attempt; their number is that of the further attempts.
    """

    def __init__(self, pauses_s: Sequence[float] = PAUSES_S) -> None:
        self._pauses_s = tuple(pauses_s)
        self._thread: threading.Thread | None = None
        self._finished: deque[Outcome] = deque()
        self._fault: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a write is going on."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, step: int, write: Callable[[], None]) -> None:
        """Start a write. An earlier one must have ended (`wait`)."""
        assert not self.busy, "one write at a time: its memory is in use"
        self._thread = threading.Thread(target=self._run, args=(step, write), name=f"write step {step}", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def outcomes(self) -> list[Outcome]:
        """What ended since the last call. An error that is not the disk's is a fault of ours, and raised."""
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def record(self, outcome: Outcome) -> None:
        """Take what became of a write that was not left to this thread."""
        self._finished.append(outcome)

    def _run(self, step: int, write: Callable[[], None]) -> None:
        started = time.perf_counter()
        error: OSError | None = None
        attempts = 0
        for pause_s in (*self._pauses_s, None):
            attempts += 1
            try:
                write()
                error = None
                break
            except OSError as failure:
                error = failure
                then = "given up" if pause_s is None else f"trying again in {pause_s:g} s"
                say(f"WARNING: CHECKPOINT OF STEP {step} NOT WRITTEN: {describe(failure)}; {then}")
            except BaseException as fault:  # for `outcomes` to raise: in this thread nobody would hear it
                self._fault = fault
                return
            if pause_s is not None:
                time.sleep(pause_s)
        self._finished.append(Outcome(step, time.perf_counter() - started, attempts, error))
