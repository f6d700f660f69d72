"""The lock on a run's folder: one process trains in it, and whether that process still lives can be seen.

The lock is POSIX's: it goes with the process, however that dies, and loader workers do not inherit it. What another
machine holds cannot be seen from here with certainty, so that is answered with "not known".
"""

import fcntl
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shared_data.errors import UserError

LOCK_NAME = ".lock"
LOOKS, LOOK_PAUSE_S = 20, 0.25
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# struct flock of 64-bit Linux: type, whence, start, length, process.
_FLOCK = "hhqqi4x"


@contextmanager
def locked(folder: Path) -> Iterator[str]:
    """Hold the run's folder: two processes in one run would tear its checkpoints. Gives a mark that no other holder
    leaves in it, by which others see that they see this folder (`is_marked`).

    Raises:
        UserError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Not emptied before it is held: the holder's mark is in it.
    with open(folder / LOCK_NAME, "a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{folder}: another process is training in this run") from None
        mark = f"{os.getpid()} {os.urandom(8).hex()}"
        file.truncate(0)
        file.write(mark)
        file.flush()
        os.fsync(file.fileno())
        yield mark


def is_marked(folder: Path, mark: str) -> bool:
    """Whether a folder is, as this process sees it, the one that another process holds with a mark of `locked`. A file
    system that several hosts share may be a moment behind. (The holder itself would lose its lock by looking.)"""
    for _ in range(LOOKS):
        with suppress(FileNotFoundError):
            if (folder / LOCK_NAME).read_text() == mark:
                return True
        time.sleep(LOOK_PAUSE_S)
    return False


def this_process() -> dict[str, Any]:
    """What the event of a start records of the process that writes: `host`, `pid`, and `boot`, the kernel's name for
    its own start (None where there is none), by which a machine knows itself."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "boot": _boot()}


def writer_lives(folder: Path, process: dict[str, Any] | None) -> bool | None:
    """Whether a process holds a run's folder.

    Args:
        process: what the newest start recorded with `this_process`; None where it did not.

    Returns:
        None where it cannot be known: the run is another machine's, or of before this machine's last start.
    """
    here = this_process()
    is_of_here = process is not None and here["boot"] is not None and process.get("boot") == here["boot"]
    if is_of_here and process is not None and process.get("pid") == here["pid"]:
        return True  # it would not see its own lock, and lose it by closing the file
    held = _is_held(folder / LOCK_NAME)
    return held if held or is_of_here else None


def _boot() -> str | None:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return None


def _is_held(path: Path) -> bool | None:
    """Whether another process holds the lock; None where that cannot be asked. Asking takes no lock, so that it cannot
    keep a run from starting."""
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return None
    try:
        with open(path, "rb") as file:
            asked = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
            answer = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except OSError:
        return None
    return bool(answer[0] != fcntl.F_UNLCK)
