"""One model on many ranks: PyTorch's DistributedDataParallel (Li et al., 2020).

`Parallel` is all that the loop sees of it: a forward pass to call, whether the gradients of a micro-batch are to be
averaged over the ranks, and by what a loss is multiplied so that the average is the sum.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gpt_oss_lite.config import TrainingConfig
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.compiling import Forward
from gpt_oss_lite.training.distributed import Ranks


@dataclass(frozen=True)
class Parallel:
    """How the ranks share a model."""

    forward: Forward
    """Like GPTOSS.hidden_states; the gradients that follow are averaged over the ranks, unless `apart`."""
    apart: Callable[[], AbstractContextManager[Any]]
    """A context for a micro-batch whose gradients stay this rank's own until a later one's are averaged."""
    loss_factor: int
    """Engines average gradients over the ranks; the step's gradient is their sum, so the losses are multiplied."""


class _HiddenStates(nn.Module):
    """The model as a module whose forward pass is GPTOSS.hidden_states, which engines call by the module alone."""

    def __init__(self, model: GPTOSS, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self._forward = forward

    def forward(self, *words: Any, **names: Any) -> Any:
        return self._forward(*words, **names)


def share_model(model: GPTOSS, forward: Forward, training: TrainingConfig, ranks: Ranks) -> Parallel:
    """Let the ranks train one model together.

    Args:
        model: alike on every rank, on this rank's device.
        forward: its hidden_states, compiled or not.
    """
    if training.aux_loss_scope == "ranks" and ranks.size > 1:
        model.average_expert_load_by(lambda load_E: ranks.sum(load_E.clone()) / ranks.size)
    if ranks.size == 1:
        return Parallel(forward, nullcontext, 1)
    # Gradients that are views of the buckets need no second copy of them.
    replica = DistributedDataParallel(_HiddenStates(model, forward), gradient_as_bucket_view=True)
    return Parallel(replica, replica.no_sync, ranks.size)
