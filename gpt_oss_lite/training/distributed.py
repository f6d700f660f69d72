"""The ranks of a job: who this process is among those that torchrun started, and what they do together.

Outside torchrun there is one rank, and everything here is a plain local operation. All decisions of the loop are made
from numbers that every rank has alike; only the first rank writes and speaks.

Shapes: A micro-batches of a step, a of them on this rank (A / ranks), F figures of a micro-batch.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from gpt_oss_lite.config import TrainingConfig
from gpt_oss_lite.training.liveness import Liveness
from shared_data.console import complain, describe, mute
from shared_data.errors import UserError

# A rank that is alive may be behind for long (it compiles, or its disk is slow), and NCCL counts from when an operation
# is queued, which may be steps before it can start: the operations' own time-out only ends a deadlock.
OPERATION_TIMEOUT = timedelta(minutes=30)
# The first rank, which failed and says why, leaves first, so that the launcher takes it for the cause.
PAUSE_FOR_THE_FIRST_S = 2.0
# A node may be long in starting its processes.
MEETING_TIMEOUT = timedelta(minutes=10)
# What PyTorch's NCCL group leaves in the launcher's own store when an operation failed (ProcessGroupNCCL.hpp). Ranks
# that are started again find it and take the failure for one of theirs; such ranks hung after their last step.
FAULT_KEYS = ("exception_dump", "remote_error")
# That group ends its process four times this long after an operation failed (ProcessGroupNCCL.cpp), 60 s by default,
# without a word of which rank is missing; `liveness` is to have named it by then.
NCCL_PATIENCE = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
# Set to "True" where torchrun hosts the ranks' store (torch/distributed/elastic/agent/server/local_elastic_agent.py).
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
WAIT_PIECE = timedelta(seconds=20)


class MainRankFailed(Exception):
    """What the first rank did for all failed; it says why."""


@dataclass
class Ranks:
    """This process among the ranks of its job."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    store: "distributed.Store | None" = None
    """Where the ranks leave words for each other; None: this process is alone."""
    liveness: Liveness | None = None
    _calls: int = field(default=0, repr=False)

    @property
    def size_here(self) -> int:
        """How many ranks this host has, as far as the launcher says so."""
        return 1 if self.size == 1 else _from_environment("LOCAL_WORLD_SIZE", 1, self.size, default=1)

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes and speaks."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """The device of this rank: its GPU where there is one."""
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    def from_main(self, work: Callable[[], Any], share: bool = True) -> Any:
        """Have the first rank do something while the others wait, however long it takes.

        Args:
            work: called on the first rank only.
            share: whether all ranks get its result, which JSON must be able to hold; otherwise the others get None.

        Raises:
            MainRankFailed: on the other ranks, where `work` raised on the first.
        """
        if self.store is None:
            return work()
        self._calls += 1
        key = f"main/{self._calls}"
        if not self.is_main:
            return self._wait_for_main(key)
        try:
            result = work()
        except BaseException:  # the others wait for an answer, whatever ends this rank
            self.store.set(key, json.dumps({"failed": True}))
            raise
        self.store.set(key, json.dumps({"result": result if share else None}))
        return result

    def _wait_for_main(self, key: str) -> Any:
        assert self.store is not None
        while True:
            try:
                self.store.wait([key], WAIT_PIECE)
                break
            except distributed.DistStoreError:  # the time is up: an error of the network is another one
                continue  # `liveness` ends this process when the first rank is gone
        answer = json.loads(self.store.get(key))
        if "failed" in answer:
            raise MainRankFailed
        return answer["result"]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, in place; every rank gets the same bits."""
        if self.size > 1:
            distributed.all_reduce(tensor)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """The largest values over the ranks, in place."""
        if self.size > 1:
            distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX)
        return tensor

    def any(self, flags: Tensor) -> Tensor:
        """Flags, bool, that are set where any rank has set them, so that every rank skips what one must skip."""
        return flags if self.size == 1 else self.max(flags.to(torch.int32)).to(torch.bool)

    def by_micro_batch(self, figures_aF: Tensor) -> Tensor:
        """All micro-batches' figures in the order of the stream, (A, F), the same bits on every rank.

        Args:
            figures_aF: those of this rank's micro-batches; its j-th one is the step's (j * ranks + rank)-th.
        """
        if self.size == 1:
            return figures_aF
        figures_AF = figures_aF.new_zeros(figures_aF.shape[0] * self.size, figures_aF.shape[1])
        figures_AF[self.rank :: self.size] = figures_aF
        return self.sum(figures_AF)  # each place is zero on all ranks but one

    def fail(self, reason: str) -> None:
        """This rank ends because of an error of its own: the others, which cannot go on without it, end too."""
        if self.liveness is None:
            return
        if not self.is_main:
            complain(f"error: {reason}")
        self.liveness.leave(failed=True)

    def find_the_missing(self, error: Exception) -> None:
        """Where an operation broke because another rank is gone: wait until that rank is named, which ends this
        process. Signals must still be handled then: the launcher sends SIGTERM at once."""
        if self.liveness is not None and is_lost_connection(error):
            self.liveness.wait_for_verdict()

    def all_or_none(self, work: Callable[[], Any]) -> Any:
        """Have every rank do something that the others cannot go on without.

        Raises:
            UserError: on the first rank: what is wrong on another one.
            MainRankFailed: on the others, where one of them failed.
        """
        result, reason = None, None
        try:
            result = work()
        except (UserError, OSError) as error:  # the others wait for this rank's answer all the same
            reason = f"rank {self.rank} ({socket.gethostname()}): {describe(error)}"
        reasons = [said for said in self.gather(reason) if said is not None]
        if reasons:
            raise UserError("; ".join(reasons)) if self.is_main else MainRankFailed
        return result

    def gather(self, value: Any) -> list[Any]:
        """What each rank has, in their order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may lie in shards, one on each rank, which all call this; any other is itself."""
    # By its method: importing DTensor takes a second that a process alone need not spend.
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def launched_together() -> bool:
    """Whether torchrun, or a launcher that sets the same variables, started this process as one of several.

    Raises:
        UserError: it sets some of them, or to what they cannot be.
    """
    size = _from_environment("WORLD_SIZE", 1, 2**31, default=1)
    if size == 1:
        return False
    _from_environment("RANK", 0, size - 1)
    _from_environment("LOCAL_RANK", 0, size - 1, default=0)
    _from_environment("MASTER_PORT", 0, 65535)
    if not os.environ.get("MASTER_ADDR"):
        raise UserError(f"WORLD_SIZE is {size}, but MASTER_ADDR is not set: {_HOW_TO_LAUNCH}")
    return True


_HOW_TO_LAUNCH = "start the ranks with torchrun; for one process alone unset WORLD_SIZE"


def _from_environment(name: str, least: int, most: int, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None:
        if default is None:
            raise UserError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {name} is not set: {_HOW_TO_LAUNCH}")
        return default
    if not (text.strip().isdecimal() and least <= int(text) <= most):
        raise UserError(f"{name} is {text!r} in the environment: it must be a whole number from {least} to {most}")
    return int(text)


def rank_from_environment() -> int:
    """The rank that a launcher gave this process; 0 without one."""
    return int(os.environ["RANK"]) if launched_together() else 0


@contextmanager
def joined_ranks(settings: Callable[[], TrainingConfig]) -> Iterator[Ranks]:
    """The ranks of this job, until the block ends.

    Args:
        settings: reads the recipe's training block, for the time-out; not called in a process that is alone.

    Raises:
        UserError: there are more ranks than GPUs on this host, or they cannot meet; or what `settings` raises.
        MainRankFailed: on another rank of the first one's host, where `settings` raised there too.
    """
    if not launched_together():
        yield Ranks()
        return
    try:
        timeout_s = settings().distributed_timeout_s
    except (UserError, OSError):
        if os.environ.get("LOCAL_RANK", "0") != "0":
            raise MainRankFailed from None  # one line a host is enough
        raise
    rank, size = rank_from_environment(), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_cuda = torch.cuda.is_available()
    if on_cuda and local_rank >= torch.cuda.device_count():
        gpus = torch.cuda.device_count()
        raise UserError(f"--nproc-per-node: rank {rank} is process {local_rank + 1} of its host, which has {gpus} GPUs")
    device = torch.device("cuda", local_rank) if on_cuda else None
    if device is not None:
        torch.cuda.set_device(device)
    os.environ.setdefault(NCCL_PATIENCE, str(max(15_000, round(1000 * timeout_s / 4))))
    backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
    store = _met(rank, size)
    group = {"store": store, "rank": rank, "world_size": size}
    of_launcher = os.environ.get(AGENT_STORE) == str(True)
    liveness = Liveness(store.clone(), rank, size, timeout_s, of_launcher)
    liveness.start()
    try:
        distributed.init_process_group(backend, timeout=OPERATION_TIMEOUT, device_id=device, **group)
        yield Ranks(rank, size, local_rank, store, liveness)
    except MainRankFailed:
        liveness.leave()
        time.sleep(PAUSE_FOR_THE_FIRST_S)
        raise
    except Exception:  # whatever it was: the other ranks cannot go on, and it goes on up
        liveness.leave(failed=True)
        raise
    liveness.leave()
    distributed.destroy_process_group()


def _met(rank: int, size: int) -> Any:
    """The store of `_fresh_store`.

    Raises:
        UserError: the ranks cannot meet where the launcher says.
    """
    try:
        return _fresh_store(rank, size)
    except distributed.DistError as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(
            f"the {size} ranks cannot meet at MASTER_ADDR:MASTER_PORT {place}: {describe(error)[:300]}"
        ) from None


def _fresh_store(rank: int, size: int) -> Any:
    """A store without keys. The launcher's outlives a restart with all its keys, among them the addresses of ranks that
    are gone; so the first rank draws a number that all keys begin with, and lets each other rank, which may still find
    an older number, know by that rank's own number that this is the one. What NCCL's group reads without such a
    beginning goes before. No rank gets its store before all have met, so that none is missed for being slow to come.
    """
    store, _, _ = next(distributed.rendezvous("env://", rank, size, timeout=MEETING_TIMEOUT))
    mine = os.urandom(8).hex()
    if rank == 0:
        of_the_launcher = store
        while isinstance(of_the_launcher, distributed.PrefixStore):
            of_the_launcher = of_the_launcher.underlying_store
        for key in FAULT_KEYS:
            of_the_launcher.delete_key(key)
        store.set("meet", mine)
        for other in range(1, size):
            store.set(f"met/{mine}/{other}", store.get(f"here/{mine}/{other}"))
        store.set(f"met/{mine}", "all")
        return distributed.PrefixStore(mine, store)
    while True:
        number = store.get("meet").decode()
        store.set(f"here/{number}/{rank}", mine)
        for _ in range(20):
            met = f"met/{number}/{rank}"
            if store.check([met]) and store.get(met).decode() == mine:
                store.wait([f"met/{number}"], MEETING_TIMEOUT)
                return distributed.PrefixStore(number, store)
            time.sleep(0.02)


def is_lost_connection(error: Exception) -> bool:
    """Whether an error is what an operation between ranks raises when one of them is gone."""
    text = str(error)
    return isinstance(error, distributed.DistError) or (isinstance(error, RuntimeError) and "gloo" in text.lower())


def mute_all_but_the_first() -> None:
    """Let one rank speak for all; what fails on another one alone is still said, with its rank."""
    rank = rank_from_environment()
    if rank:
        mute(f"rank {rank} ({socket.gethostname()})")
