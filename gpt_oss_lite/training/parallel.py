"""One model on many ranks: PyTorch's DistributedDataParallel (Li et al., 2020) and fully_shard (FSDP2; Zhao et al.,
2023).

`Parallel` is all that the loop sees of it: a forward pass to call, whether the gradients of a micro-batch stay apart
for a while, and by what a loss is multiplied so that what the engine makes of them is their sum.

A sharded model keeps fp32 shards, gathers them in fp32 and adds gradients up in fp32: router, sinks and norms see the
numbers that one process sees, and the matrices are rounded to the compute dtype only where they are used.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gpt_oss_lite.config import ModelConfig, Recipe
from gpt_oss_lite.model.transformer import GPTOSS, ROUTED
from gpt_oss_lite.training.compiling import Forward
from gpt_oss_lite.training.distributed import Ranks
from gpt_oss_lite.training.expert_parallel import ExpertGroup
from gpt_oss_lite.training.layout import layout_of
from gpt_oss_lite.training.optimizer import gradient_norm

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True)
class Parallel:
    """How the ranks share a model."""

    forward: Forward
    """Like GPTOSS.hidden_states; the gradients that follow are averaged over the ranks, unless `apart`."""
    apart: Callable[[], AbstractContextManager[Any]]
    """A context for a micro-batch whose gradients stay this rank's own until a later one's are averaged."""
    loss_factor: int
    """Where an engine averages gradients over the ranks, and the step's gradient is their sum: the ranks; else 1."""
    fresh_part: Callable[[], GPTOSS]
    """Draws a model's weights anew; what this rank holds of such a model. All ranks call it."""
    sharded: bool = False
    """As `Layout.sharded`."""
    keeps_gradients: bool = False
    """Whether gradients stay allocated between steps, as parts of the buckets that are exchanged."""
    after_evaluation: Callable[[], None] = lambda: None
    """To be called after a forward pass that no backward pass follows."""
    after_backward: Callable[[], None] = lambda: None
    """To be called after a step's last backward pass."""
    norm: Callable[[list[nn.Parameter]], Tensor] = gradient_norm
    """Global norm of the gradients."""


class _HiddenStates(nn.Module):
    """The model as a module whose forward pass is GPTOSS.hidden_states, which engines call by the module alone."""

    def __init__(self, model: GPTOSS, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self._forward = forward

    def forward(self, *words: Any, **names: Any) -> Any:
        return self._forward(*words, **names)


def make_shared_model(recipe: Recipe, ranks: Ranks, compiled: Callable[[Forward], Forward]) -> tuple[GPTOSS, Parallel]:
    """A model with fresh weights on this rank's device, alike on every rank or this rank's part, for all to train.

    A rank that keeps a part makes no more than one block whole at a time, on the host. What is drawn is the same in
    every layout.

    Args:
        compiled: gives the form of `hidden_states` to call.
    """
    training = recipe.training
    layout = layout_of(training, ranks.size)
    experts = ExpertGroup(ranks.size, layout.expert_ranks, ranks.device.type) if layout.expert_ranks > 1 else None
    fresh_part: Callable[[], GPTOSS] = partial(GPTOSS, recipe.model, None if experts is None else experts.take_part)
    if layout.fully_sharded:
        fresh_part = _shards_maker(recipe.model, ranks)
    model = fresh_part()
    if not layout.fully_sharded:
        model.to(ranks.device)
    if training.grad_checkpoint:
        model.enable_gradient_checkpointing(training.grad_checkpoint_every)
    if training.aux_loss_scope == "ranks" and ranks.size > 1:
        model.average_expert_load_by(lambda load_E: ranks.sum(load_E.clone()) / ranks.size)
    forward = compiled(model.hidden_states)
    if layout.fully_sharded:
        # The head's weight stays gathered until a backward pass, or until it is put back.
        after_evaluation = cast("FSDPModule", model).reshard
        return model, Parallel(forward, nullcontext, 1, fresh_part, sharded=True, after_evaluation=after_evaluation)
    if ranks.size == 1:
        return model, Parallel(forward, nullcontext, 1, fresh_part)
    wrapped = _HiddenStates(model, forward)
    if experts is not None:
        names = [name for name, _ in wrapped.named_parameters() if ROUTED in name]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(wrapped, names)
    # Gradients that are views of the buckets need no second copy of them; they stay so if they are zeroed, not dropped.
    replica = DistributedDataParallel(wrapped, bucket_cap_mb=training.gradient_bucket_mb, gradient_as_bucket_view=True)
    if experts is None:
        return model, Parallel(replica, replica.no_sync, ranks.size, fresh_part, keeps_gradients=True)
    return model, Parallel(
        replica, replica.no_sync, ranks.size, fresh_part, sharded=True, keeps_gradients=True,
        norm=partial(experts.gradient_norm, model=model), after_backward=partial(experts.average_gradients, model),
    )  # fmt: skip


def _shards_maker(config: ModelConfig, ranks: Ranks) -> Callable[[], GPTOSS]:
    """Makes models of which this rank has its shards of the parameters. A block is gathered when it runs, forward and
    backward; embedding, final norm and head for the whole of a micro-batch. Each micro-batch's gradients are added to
    the shards' at once: kept apart they would be as large as a replica's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    device, mesh = ranks.device, init_device_mesh(ranks.device.type, (ranks.size,))

    def make() -> GPTOSS:
        model = GPTOSS(config, lambda block: fully_shard(block.to(device), mesh=mesh))
        for ends in (model.embed, model.norm, model.head):
            ends.to(device)
        fully_shard(model, mesh=mesh)
        register_fsdp_forward_method(model, "hidden_states")
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return model

    return make
