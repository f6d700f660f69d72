"""The checkpoints of a run as its loop sees them: begun, recorded when they are written, and waited for at the end."""

from dataclasses import asdict
from functools import partial

from gpt_oss_lite.training.background import Outcome
from gpt_oss_lite.training.run import Run
from shared_data.console import describe, say


def save(run: Run) -> None:
    """Start writing the checkpoint of the last step; training stands still for the copy alone."""
    with run.throughput.paused():
        if run.parallel.sharded:
            run.ranks.from_main(partial(sync_log, run), share=False)
            words = run.optimizer, run.state.step, run.scheduler, run.meta(), run.ranks
            run.waits[run.state.step] = run.saver.save_in_shards(run.model, *words)
        else:
            run.ranks.from_main(partial(start_saving, run), share=False)


def start_saving(run: Run) -> None:
    """`save` of a whole model, on the rank that writes."""
    sync_log(run)
    waited = run.saver.save(run.model, run.optimizer, run.state.step, run.scheduler, run.meta())
    run.waits[run.state.step] = waited


def sync_log(run: Run) -> None:
    """Make the log durable, so that it never ends before its checkpoint."""
    try:
        run.logger.sync()
    except OSError as error:
        say(f"WARNING: the log could not be made durable: {describe(error)}")


def report_saves(run: Run, outcomes: list[Outcome]) -> None:
    """Record the checkpoints whose writing ended."""
    for outcome in outcomes:
        waited = run.waits.pop(outcome.step)
        details = {"seconds": outcome.seconds, "attempts": outcome.attempts, **asdict(waited)}
        if outcome.error is None:
            run.logger.event("save", outcome.step, **details)
        else:
            run.logger.event("save_failed", outcome.step, error=describe(outcome.error), **details)


def report_end_of_saving(run: Run) -> None:
    """Wait for the checkpoint that is being written, and record what became of it."""
    report_saves(run, run.saver.drain())


def wait_for_last_save(run: Run) -> None:
    """Wait for the checkpoint that the run ends with.

    Raises:
        OSError: it could not be written; on ranks that do not write, MainRankFailed.
    """
    run.ranks.from_main(partial(expect_last_save, run), share=False)


def expect_last_save(run: Run) -> None:
    """`wait_for_last_save`, on the rank that writes.

    Raises:
        OSError: it could not be written.
    """
    outcomes = run.saver.drain()
    report_saves(run, outcomes)
    if outcomes and outcomes[-1].error is not None:
        raise outcomes[-1].error
