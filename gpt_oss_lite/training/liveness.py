"""Who is still there: each rank leaves a sign of life every second, and watches the next rank's.

An operation between ranks waits for all of them; when one was killed or stands still, the others would wait for as long
as its time-out says, and then not know for whom. Here the rank before the missing one notices it, names it and ends the
job. The watching goes round in a ring: a sign and a look for each rank and second, however many there are.
"""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed

from shared_data.console import EXIT_FAILED, complain

LONGEST_TICK_S = 1.0
# Of the time-out: what is left is for the launcher to notice, and for what the system delays.
SILENCE_SHARE = 0.6
# Of /proc/PID/stat: starttime, the 22nd field, where the 3rd is the first here.
_START_FIELD = 22 - 3
# A rank that fails says why and leaves first, so that the launcher takes it for the cause.
PAUSE_FOR_THE_FAILED_S = 5.0
# What a first rank that failed gives the others to read so.
LAST_WAIT_S = 3.0
GO_ON = "Its newest checkpoint is whole: go on with --auto-resume, which torchrun --max-restarts does by itself"


class Liveness:
    """The signs of life of this rank, and its look at the next one's, in a thread of their own.

    A rank that is found missing is named on standard error, killed where it lies stopped on this host, and this process
    ends at once with exit code 1, as every other rank's does; the launcher starts them again or ends the job.

    Args:
        store: the ranks' store, for this thread alone.
        rank: of this process.
        size: number of ranks.
        timeout_s: a missing rank ends the job within so many seconds.
        store_of_launcher: whether the launcher hosts the store; else rank 0 does.
    """

    def __init__(
        self, store: "distributed.Store", rank: int, size: int, timeout_s: float, store_of_launcher: bool
    ) -> None:
        self._store, self._rank, self._size, self._watched = store, rank, size, (rank + 1) % size
        self._store_of_launcher = store_of_launcher
        self._first: dict[str, Any] = {}
        """Rank 0, as soon as it is known."""
        self._tick_s = min(LONGEST_TICK_S, timeout_s / 20)
        self._silence_s = SILENCE_SHARE * timeout_s
        self._answered_at = time.monotonic()
        """When the store last answered all that was asked of it, or may be silent until."""
        self._over, self._left = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
        self._guard = threading.Thread(target=self._guard_the_store, name="liveness of the store", daemon=True)

    def start(self) -> None:
        """Give the first sign of life, and begin to watch."""
        self._store.set(f"who/{self._rank}", json.dumps(_myself()))
        self._thread.start()
        self._guard.start()

    def leave(self, failed: bool = False) -> None:
        """This rank is done: its silence means nothing from now on. The first rank, which may host the store, leaves
        last. A second call does nothing.

        Args:
            failed: whether it leaves because of an error of its own, which the other ranks cannot go on after.
        """
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join()
        self._answered_at = time.monotonic() + self._silence_s  # the first rank may wait as long for the others
        # A store that has gone with its launcher has no reader left, and ranks that do not leave are ended by others.
        with contextlib.suppress(RuntimeError):
            if failed:
                self._accuse({})
            else:
                self._store.set(f"left/{self._rank}", "1")
            if self._rank == 0:
                others = [f"left/{rank}" for rank in range(1, self._size)]
                self._store.wait(others, timedelta(seconds=LAST_WAIT_S if failed else self._silence_s))
        self._left.set()

    def wait_for_verdict(self) -> None:
        """An operation broke, so some rank is missing: give the watchers the time to name it, which ends this
        process."""
        time.sleep(self._silence_s + 5 * self._tick_s)

    def _run(self) -> None:
        beat, seen, seen_at, last_tick = 0, b"", time.monotonic(), time.monotonic()
        who: dict[str, Any] | None = None
        while not self._over.wait(self._tick_s):
            try:
                beat += 1
                self._store.set(f"beat/{self._rank}", str(beat))
                self._end_if_accused()
                self._answered_at = time.monotonic()
                if not self._first and self._store.check(["who/0"]):
                    self._first = json.loads(self._store.get("who/0"))
                if self._store.check([f"left/{self._watched}"]):
                    continue
                if who is None and self._store.check([f"who/{self._watched}", f"beat/{self._watched}"]):
                    who = json.loads(self._store.get(f"who/{self._watched}"))
                now = time.monotonic()
                sign = b"" if who is None else self._store.get(f"beat/{self._watched}")
                if sign != seen or now - last_tick > self._silence_s / 2:  # after a pause of our own, look again
                    seen, seen_at = sign, now
                last_tick = now
                if who is not None and _is_gone(who):
                    if not self._store.check([f"left/{self._watched}"]):
                        self._end_the_job(who, "was killed or died")
                elif now - seen_at > self._silence_s:
                    self._end_the_job(who or {}, f"gave no sign of life for {now - seen_at:.0f} s: stopped or hung")
            except RuntimeError as error:  # of the store
                if self._over.is_set():
                    return
                self._end_without_the_store(str(error).splitlines()[0][:200])

    def _guard_the_store(self) -> None:
        """PyTorch's store waits for its host without a time-out in most of what it does, so another thread does not."""
        last_tick = time.monotonic()
        while not self._left.wait(self._tick_s):
            now = time.monotonic()
            if now - last_tick > self._silence_s / 2:  # after a pause of our own, ask again
                self._answered_at = now
            last_tick = now
            if now - self._answered_at > self._silence_s:
                self._end_without_the_store(f"no answer for {now - self._answered_at:.0f} s")

    def _end_without_the_store(self, reason: str) -> None:
        """The store's host is gone or stands still: every rank finds that by itself, and can tell no other."""
        host = "the launcher" if self._store_of_launcher else f"rank 0{_place(self._first)}"
        complain(
            f"error: {host}, which hosts the ranks' store, was killed, died or hangs ({reason}); the job ends. {GO_ON}"
        )
        if not self._store_of_launcher:
            _kill(self._first)
        os._exit(EXIT_FAILED)

    def _end_if_accused(self) -> None:
        """End this process when another rank has been found missing; kill that one if it lies stopped on this host."""
        if not self._store.check(["missing"]):
            return
        who = json.loads(self._store.get("missing"))
        if not who:
            time.sleep(PAUSE_FOR_THE_FAILED_S)
        _kill(who)
        os._exit(EXIT_FAILED)

    def _end_the_job(self, who: dict[str, Any], what: str) -> None:
        complain(f"error: rank {self._watched}{_place(who)} {what}; the job ends. {GO_ON}")
        self._accuse(who)
        _kill(who)
        time.sleep(2 * self._tick_s)  # for the others to read it
        os._exit(EXIT_FAILED)

    def _accuse(self, who: dict[str, Any]) -> None:
        """Let all ranks end: a process is missing, or, where it is unknown, one has failed and said so itself."""
        self._store.set("missing", json.dumps(who))


def _place(who: dict[str, Any]) -> str:
    return f" (pid {who['pid']} on {who['host']})" if who else ""


def _myself() -> dict[str, Any]:
    """How this process is known to the other ranks."""
    return {"pid": os.getpid(), "started": _start_of(os.getpid()), **_where()}


def _where() -> dict[str, str]:
    """What tells this host's processes from another's; a container has numbers of its own for them."""
    numbering = Path("/proc/self/ns/pid")
    return {"host": socket.gethostname(), "numbering": os.readlink(numbering) if numbering.exists() else ""}


def _is_on_this_host(who: dict[str, Any]) -> bool:
    return bool(who) and all(who[key] == value for key, value in _where().items())


def _stat(pid: int) -> list[str]:
    """The fields of a process after its name, from its state on (proc_pid_stat(5)); none: there is no such process, or
    this system tells nothing of its processes."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _start_of(pid: int) -> str | None:
    """When a process started, in ticks since the system did: with its number this tells it from a later one of the same
    number. None: unknown."""
    return stat[_START_FIELD] if (stat := _stat(pid)) else None


def _is_gone(who: dict[str, Any]) -> bool:
    """Whether a process of this host has ended, its number taken by another or not; False for one elsewhere."""
    if not _is_on_this_host(who) or who["started"] is None:
        return False
    stat = _stat(who["pid"])
    return not stat or stat[0] in ("Z", "X") or stat[_START_FIELD] != who["started"]


def _kill(who: dict[str, Any]) -> None:
    """Kill a process of this host, which may be stopped and so not hear the launcher. Where nobody can say whether the
    number still is that process's, nothing is killed: the launcher ends its ranks itself, only later."""
    if not _is_on_this_host(who) or who["pid"] == os.getpid() or not hasattr(os, "pidfd_open"):
        return
    with contextlib.suppress(OSError):  # it has ended, or the kernel (before Linux 5.3) has no such descriptors
        process = os.pidfd_open(who["pid"])
        try:
            # The descriptor stays with the process it was opened for: the number cannot change hands from here on.
            if who["started"] is not None and _start_of(who["pid"]) == who["started"]:
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)
