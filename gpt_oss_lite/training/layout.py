"""How a job's ranks, one process a GPU, share a step and the model's state, and which numbers of ranks can.

A step can be cut for as many ranks as divide its windows (`check_windows`, `usable_ranks`); as a recipe cuts it, into
micro-batches, fewer may share it (`check_split`).
"""

from typing import Literal, NamedTuple

from gpt_oss_lite.config import TrainingConfig
from shared_data.errors import UserError


class Layout(NamedTuple):
    """How a run's ranks, one process a GPU, share the model's state."""

    ranks: int = 1
    parallelism: Literal["ddp", "fsdp"] = "ddp"
    """ddp: each rank has all weights, gradients and moments. fsdp: each has its share of them."""
    expert_ranks: int = 1
    """Ranks that share the routed experts of a layer, which are not fused then; with ddp only. A divisor of ranks and
    of n_experts."""

    @property
    def fully_sharded(self) -> bool:
        """Whether a rank keeps only its share of every weight, gradient and moment."""
        return self.parallelism == "fsdp" and self.ranks > 1

    @property
    def sharded(self) -> bool:
        """Whether a rank keeps only a part of the weights, gradients and moments, of the experts' alone or of all."""
        return self.fully_sharded or self.expert_ranks > 1

    def words(self) -> str:
        """The layout for a person."""
        if self.ranks == 1:
            return "one GPU"
        how = "FSDP, state shared by" if self.fully_sharded else "DDP, a replica on each of"
        experts = f", experts over groups of {self.expert_ranks}" if self.expert_ranks > 1 else ""
        return f"{how} {self.ranks} GPUs{experts}"


ONE_GPU = Layout()


def layout_of(training: TrainingConfig, ranks: int) -> Layout:
    """How so many ranks share a recipe's state.

    Raises:
        UserError: its experts are shared by groups that the ranks do not make.
    """
    if ranks == 1:
        return ONE_GPU
    _check_expert_groups(training, ranks)
    return Layout(ranks, training.parallelism, training.expert_parallel_size)


def usable_ranks(windows: int, gpus: int, gpus_per_node: int) -> list[int]:
    """Numbers of ranks, up to `gpus`, that share a step's windows evenly: of one node, or of whole ones."""
    return [
        ranks
        for ranks in range(1, min(gpus, windows) + 1)
        if windows % ranks == 0 and (ranks < gpus_per_node or ranks % gpus_per_node == 0)
    ]


def check_windows(training: TrainingConfig, ranks: int) -> None:
    """See that a step can be cut for `--ranks` so many.

    Raises:
        UserError: they do not divide its windows.
    """
    if training.windows_per_step % ranks:
        raise UserError(
            f"--ranks is {ranks}: it must divide the {training.windows_per_step} windows of the recipe's step"
        )


def check_split(training: TrainingConfig, n_ranks: int) -> None:
    """See that a step's micro-batches can be dealt out evenly, and the experts.

    Raises:
        UserError: they cannot; names the numbers of ranks and the micro-batches that go.
    """
    _check_expert_groups(training, n_ranks)
    micro_batch, micro_batches = training.micro_batch_size, training.gradient_accumulation_steps
    if micro_batches % n_ranks == 0:
        return
    windows = training.windows_per_step
    numbers = [str(count) for count in range(1, micro_batches + 1) if micro_batches % count == 0]
    message = (
        f"training.micro_batch_size {micro_batch} x training.gradient_accumulation_steps {micro_batches}: "
        f"{n_ranks} ranks cannot share a step's micro-batches evenly; ranks that can: {', '.join(numbers)}"
    )
    sizes = [size for size in range(1, windows // n_ranks + 1) if windows % (size * n_ranks) == 0]
    if sizes:
        pairs = ", ".join(f"{size} x {windows // size}" for size in reversed(sizes))
        message += (
            f"; the same tokens a step on {n_ranks} ranks: micro_batch_size x gradient_accumulation_steps {pairs}"
        )
    raise UserError(message)


def _check_expert_groups(training: TrainingConfig, ranks: int) -> None:
    if ranks > 1 and ranks % training.expert_parallel_size:
        raise UserError(
            f"training.expert_parallel_size is {training.expert_parallel_size}: it must be a divisor of the number of "
            f"ranks ({ranks})"
        )
