"""The stream of micro-batches as loader workers bring it, and what happens when one of them is killed."""

import signal
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from gpt_oss_lite.config import Recipe
from gpt_oss_lite.training.data_order import DataOrder, MicroBatchSampler
from gpt_oss_lite.training.dataset import PretrainDataset
from gpt_oss_lite.training.distributed import Ranks
from gpt_oss_lite.training.stop import ignore_stop_signals
from shared_data.console import say
from shared_data.errors import UserError

if TYPE_CHECKING:
    from gpt_oss_lite.training.run import Run

MicroBatch = tuple[Tensor, Tensor]


class WorkerDied(Exception):
    """A loader worker was killed."""


def open_stream(
    dataset: PretrainDataset, order: DataOrder, position: int, recipe: Recipe, device: torch.device, ranks: Ranks
) -> Iterator[MicroBatch]:
    """This rank's micro-batches of (input, target), each (B, T) int64 on the CPU, from a position of the stream on, for
    ever."""
    training = recipe.training
    with warnings.catch_warnings():
        # Of more workers than cores, where PyTorch prints its own source line; `doctor` says it better.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader: DataLoader[MicroBatch] = DataLoader(
            dataset,
            batch_sampler=MicroBatchSampler(order, position, training.micro_batch_size, ranks.rank, ranks.size),
            num_workers=training.num_workers,
            pin_memory=training.pin_memory and device.type == "cuda",
            worker_init_fn=ignore_stop_signals,
            # The loader draws a seed for its workers from this generator, not from the one whose state is saved.
            generator=torch.Generator(),
        )
        stream = iter(loader)
    # torch raises from a SIGCHLD handler when a worker dies, at any point of a step, also in the middle of an update.
    # Without the handler the death is noticed where the next batch is asked for, and the state is a step's.
    if training.num_workers and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return stream


def next_micro_batches(run: "Run") -> list[MicroBatch]:
    """This rank's micro-batches of the coming step, on the CPU. Workers that died are replaced once: the stream is a
    function of the position.

    Raises:
        UserError: the corpus is damaged.
        OSError: it cannot be read.
        ChildProcessError: the workers died again.
    """
    try:
        return _load(run)
    except WorkerDied as death:
        say(f"warning: {death}; loading step {run.state.step + 1} again")
        run.logger.event("worker_died", run.state.step, position=run.position)
    run.open_stream()
    try:
        return _load(run)
    except WorkerDied as death:
        raise ChildProcessError(
            f"{death}, twice at step {run.state.step + 1}: memory may be short (training.num_workers), or a shard of "
            f"{run.dataset.path} unreadable (gpt-oss-lite verify); go on with --resume latest"
        ) from None


def _load(run: "Run") -> list[MicroBatch]:
    try:
        with run.throughput.waiting():
            return [next(run.batches) for _ in range(run.recipe.training.gradient_accumulation_steps // run.ranks.size)]
    except (UserError, OSError, EOFError, RuntimeError) as error:
        text = str(error).strip()
        if "in DataLoader worker process" in text:
            # An error that a worker met comes with its traceback; the last line is the error's own.
            kind, _, message = text.splitlines()[-1].partition(": ")
            raise (UserError if isinstance(error, UserError) else OSError)(message or kind) from None
        # A batch is fetched from its worker's memory: with the worker gone, that fails in one of several ways.
        fetching = isinstance(error, (ConnectionError, EOFError, FileNotFoundError))
        if run.recipe.training.num_workers and (fetching or "DataLoader worker" in text):
            reason = text.splitlines()[0] if text else type(error).__name__
            raise WorkerDied(f"a loader worker was killed ({reason})") from None
        raise
