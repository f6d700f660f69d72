"""Runs a stage's tasks: in this process, in a pool of spawned ones, on Ray, or a share of them in each job of an array.

Which one makes no difference to the result.

A task is idempotent: it writes whole files and then its commit record (see `commits`), so it may be killed, retried,
or run twice. Workers are spawned, never forked: a fork in a process that has threads (the tokenizer's) can deadlock.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from shared_data.commits import Commit, note_attempt, read_commit, write_commit
from shared_data.console import progress, say
from shared_data.layout import TurnLock

MAX_POOL_FAILURES = 3
PARENT_PIPE_VARIABLE = "SHARED_DATA_PARENT_PIPE"


@dataclass(frozen=True)
class Result:
    """What a task wrote and counted."""

    outputs: Mapping[Path, str | None]
    """Files, with their SHA-256 where it is known."""
    counts: Mapping[str, int]


class Work(Protocol):
    """What a task does: a picklable value, made of plain data."""

    def run(self) -> Result:
        """Write the outputs whole; overwrite what an earlier run left."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """Work that goes on from what a killed attempt left."""

    def resumed_bytes(self) -> int:
        """Input bytes that need not be done again."""
        ...


@dataclass(frozen=True)
class Task:
    """A unit of work that is redone as a whole after a kill."""

    record: Path
    key: str
    """Fingerprint of everything that the outputs depend on."""
    n_bytes: int
    """Input bytes, for progress and for the account of what kills cost."""
    work: Work


@dataclass(frozen=True)
class Workers:
    """Who does the tasks."""

    count: int = 1
    """Processes; on a Ray cluster that was there before, tasks at a time."""
    executor: Literal["pool", "ray"] = "pool"
    ray_address: str | None = None
    """Cluster to use; None: one on this machine, for this process alone."""
    task_index: int = 0
    """Which share of the tasks is ours, of task_count."""
    task_count: int = 1
    turn: TurnLock | None = None
    """With task_count > 1: held but while tasks run, so that the jobs of an array plan one after another."""


class OthersNotDone(Exception):
    """Our share of the tasks is done, but not those of the array's other jobs."""


def execute(task: Task) -> Commit:
    """Do a task and commit it, unless that was done before."""
    commit = read_commit(task.record, task.key)
    if commit is None:
        task.record.unlink(missing_ok=True)
        resumed = task.work.resumed_bytes() if isinstance(task.work, Resumable) else 0
        note_attempt(task.record, task.key, task.n_bytes - resumed)
        result = task.work.run()
        commit = write_commit(task.record, task.key, result.outputs, result.counts, task.n_bytes)
    return commit


def run_tasks(tasks: Sequence[Task], *, workers: int | Workers, label: str) -> list[Commit]:
    """Do what is not done yet; returns the commits of all tasks, in the tasks' order.

    Raises:
        UserError: a task found bad input.
        ChildProcessError: workers were killed again and again.
        OthersNotDone: there are several jobs, and others have not done their share yet.
    """
    who = Workers(workers) if isinstance(workers, int) else workers
    commits = _known_commits(tasks)
    mine = range(who.task_index, len(tasks), who.task_count)
    pending = {index: tasks[index] for index in mine if index not in commits}
    if pending:
        with who.turn.given() if who.turn else nullcontext():
            total = sum(task.n_bytes for task in pending.values())
            with progress(label, total=total, unit="B") as bar:
                for index, commit in _run(pending, who):
                    commits[index] = commit
                    bar.advance(tasks[index].n_bytes)
    if who.task_count > 1 and len(commits) < len(tasks):
        commits = _known_commits(tasks)
        if left := len(tasks) - len(commits):
            raise OthersNotDone(f"{label}: job {who.task_index} has done its share; {left} tasks of others are left")
    return [commits[index] for index in range(len(tasks))]


def _known_commits(tasks: Sequence[Task]) -> dict[int, Commit]:
    return {index: commit for index, task in enumerate(tasks) if (commit := read_commit(task.record, task.key))}


def _run(pending: Mapping[int, Task], who: Workers) -> Iterator[tuple[int, Commit]]:
    if who.executor == "ray":
        from shared_data.ray_executor import run_on_ray

        return run_on_ray(pending, who.count, who.ray_address)
    if who.count == 1 or len(pending) == 1:
        return _inline(pending)
    return _pool(pending, min(who.count, len(pending)))


def run_by_source(
    plans: Mapping[str, Sequence[Task]], *, workers: int | Workers, label: str
) -> dict[str, list[Commit]]:
    """Do the tasks of several sources together; returns the commits of each."""
    commits = iter(run_tasks([task for tasks in plans.values() for task in tasks], workers=workers, label=label))
    return {source: [next(commits) for _ in tasks] for source, tasks in plans.items()}


def _inline(pending: Mapping[int, Task]) -> Iterator[tuple[int, Commit]]:
    for index, task in pending.items():
        yield index, execute(task)


def _pool(pending: Mapping[int, Task], workers: int) -> Iterator[tuple[int, Commit]]:
    """Run in spawned processes; when one is killed, start a new pool for what is left."""
    left, failures = dict(pending), 0
    while left:
        others = set(multiprocessing.active_children())
        pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker)
        try:
            futures = {pool.submit(execute, task): index for index, task in left.items()}
            for future in as_completed(futures):
                commit = future.result()
                failures = 0
                del left[futures[future]]
                yield futures[future], commit
        except BrokenProcessPool:
            failures += 1
            if failures == MAX_POOL_FAILURES:
                raise ChildProcessError(
                    f"a worker process was killed {failures} times in a row without finishing a task (out of "
                    "memory?); what is finished is kept, so run the command again, with fewer --workers"
                ) from None
            say(f"a worker process was killed: {len(left)} tasks start again")
        finally:
            # A worker that was killed while it took a task from the queue holds the queue's lock for ever: its fellows
            # never see the word to end, and a pool that waits for them hangs. Tasks may be killed at any time.
            for worker in set(multiprocessing.active_children()) - others:
                worker.kill()
            pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Leave the keyboard to the parent, and end with it even when it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_exit_when_ready, args=(parent.sentinel,), daemon=True).start()


def end_with_parent() -> None:
    """End this process when the one that started it ends (see `prepare_data`), even when that one is killed."""
    if pipe := os.environ.pop(PARENT_PIPE_VARIABLE, None):
        threading.Thread(target=_exit_when_ready, args=(int(pipe),), daemon=True).start()


def _exit_when_ready(handle: int) -> None:
    wait([handle])
    os._exit(1)
