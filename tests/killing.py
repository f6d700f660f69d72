"""Kills of a pipeline run: of the whole run at a call, or of a worker under it; and the account of what they cost."""

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

CALLS = ("replace", "unlink", "rmdir", "fsync", "link")
"""What changes the file system: between any two of these calls nothing that a kill could leave half done happens."""


def work_of(report: dict[str, Any]) -> list[dict[str, int]]:
    """The account of work of each source, or of the whole stage."""
    return [report["work"]] if "work" in report else [own["work"] for own in report["sources"].values()]


def sum_of_work(report: dict[str, Any]) -> tuple[int, int]:
    """Input bytes of a stage, and those that it processed, kills included."""
    works = work_of(report)
    return sum(work["input_bytes"] for work in works), sum(work["processed_bytes"] for work in works)


def begun(root: Path) -> int:
    """Attempts at tasks so far."""
    return sum(path.read_text().count("\n") for path in (root / "state").rglob("*.attempts"))


def start_child(work: Callable[[], object]) -> int:
    """Run in a forked process, quietly; returns its id."""
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def in_child(work: Callable[[], object]) -> int:
    """Run in a forked process; returns its wait status."""
    return os.waitpid(start_child(work), 0)[1]


def at_each_call(action: Callable[[int], object]) -> None:
    """From now on do something before each call that changes the file system; it is told the call's number, from 1."""
    count = 0

    def watched(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            count += 1
            action(count)
            return plain(*arguments, **keywords)

        return call

    for name in CALLS:
        setattr(os, name, watched(getattr(os, name)))


def die_at_call(number: int) -> None:
    """From now on the process is killed at that call that changes the file system."""
    at_each_call(lambda count: os.kill(os.getpid(), signal.SIGKILL) if count == number else None)


def busy_workers() -> list[psutil.Process]:
    """The workers below this process that may be at a task: of a pool, or of Ray."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended between the look and the question
            words = " ".join(process.cmdline())
            if "spawn_main" in words or (process.name().startswith("ray::") and "_execute_in" in words):
                found.append(process)
    return found


@contextlib.contextmanager
def workers_killed(root: Path, most: int, gaps: tuple[int, int], seed: int) -> Iterator[list[int]]:
    """Meanwhile kill a worker each time that some more attempts (a random number within `gaps`) have begun.

    Args:
        root: the data folder.
        most: kills at the most.
        gaps: least and most attempts between two kills.
        seed: of the numbers and of which worker it is.

    Yields:
        the attempts begun at each kill so far.
    """
    kills: list[int] = []
    rng, done = random.Random(seed), threading.Event()

    def killer() -> None:
        at = rng.randint(*gaps)
        while not done.wait(0.005) and len(kills) < most:
            if begun(root) >= at and (workers := busy_workers()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    rng.choice(workers).kill()
                    kills.append(at)
                    at = begun(root) + rng.randint(*gaps)

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        yield kills
    finally:
        done.set()
        thread.join()
