"""Expert parallelism: a group of ranks holds each layer's routed experts once, and tokens travel to them.

(GShard, Lepikhin et al., 2021.) Two all-to-all exchanges a layer and pass, sized by what the router chose: no token is
dropped, no room is kept. All else is a replica on every rank.

Shapes: T tokens of this rank, D width, K experts per token, R = T * K rows to send, S rows received, E experts, P ranks
of a group, X = E / P experts of a rank.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed, nn

from gpt_oss_lite.model.backends import ExpertsOnRows, reference
from gpt_oss_lite.model.backends.rows import PermuteRows, combine, sort_by_expert
from gpt_oss_lite.model.routing import Routing, count_slots
from gpt_oss_lite.model.transformer import GPTOSS, ROUTED, Block


class _Exchange(torch.autograd.Function):
    """Send a span of rows to each rank of a group, and receive one from each, in the order of the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.plan = received, sent, group
        out = x.new_empty(sum(received), *x.shape[1:])
        distributed.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        received, sent, group = ctx.plan
        return _Exchange.apply(gradients[0], received, sent, group), None, None, None


class ExpertGroup:
    """The ranks that hold a model's routed experts together, and the ranks that hold the same ones as this.

    Args:
        n_ranks: of the job; neighbours make a group.
        size: P, a divisor of n_ranks and of the number of experts.
        device_type: of the ranks' devices.
    """

    def __init__(self, n_ranks: int, size: int, device_type: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(device_type, (n_ranks // size, size), mesh_dim_names=("replicas", "experts"))
        self.group, self.replicas = mesh.get_group("experts"), mesh.get_group("replicas")
        self.rank, self.size, self.n_ranks = mesh.get_local_rank("experts"), size, n_ranks

    def take_part(self, block: Block) -> None:
        """Leave this rank its experts of a block, under their names, and send tokens to the others'."""
        moe = block.moe
        mine = self._mine(len(moe.experts))
        for index in range(len(moe.experts)):
            if index not in mine:
                moe.experts[index] = nn.Identity()
        moe.dispatch = self.dispatch

    def _mine(self, n_experts: int) -> range:
        each = n_experts // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def dispatch(
        self, x_TD: Tensor, routing: Routing, experts: nn.ModuleList, experts_on_rows: ExpertsOnRows
    ) -> Tensor:
        """As `rows.dispatch_experts`, where `experts` holds only this rank's."""
        counts_PX = count_slots(routing.experts_TK, len(experts)).view(self.size, -1)
        arriving_PX = torch.empty_like(counts_PX)
        distributed.all_to_all_single(arriving_PX, counts_PX, group=self.group)
        # One wait for the device: the spans to send and to receive.
        sent, received = torch.stack([counts_PX.sum(1), arriving_PX.sum(1)]).tolist()
        mine = [experts[index] for index in self._mine(len(experts))]
        # What comes from a rank is sorted by expert; here it is sorted by expert over all ranks.
        numbers_PX = torch.arange(len(mine), device=x_TD.device).expand(self.size, -1)
        expert_S = numbers_PX.reshape(-1).repeat_interleave(arriving_PX.flatten(), output_size=sum(received))
        order_S = expert_S.argsort(stable=True)
        inverse_S = order_S.argsort()

        x_RD, _, order = sort_by_expert(x_TD, routing)
        x_SD = PermuteRows.apply(_Exchange.apply(x_RD, sent, received, self.group), order_S, inverse_S)
        # Where no row came, grouped products are not asked to work on nothing.
        run = experts_on_rows if any(received) else reference.experts_on_rows
        y_SD = run(x_SD, expert_S[order_S], arriving_PX.sum(0), mine)
        y_RD = _Exchange.apply(PermuteRows.apply(y_SD, inverse_S, order_S), received, sent, self.group)
        return combine(y_RD, routing, order).to(x_TD.dtype)

    def average_gradients(self, model: GPTOSS) -> None:
        """Make the experts' gradients what an average over all ranks is for the other parameters: here each already
        holds the sum over its group, to which all of the group's tokens came."""
        gradients = [parameter.grad for parameter in expert_parameters(model) if parameter.grad is not None]
        works = [distributed.all_reduce(grad, group=self.replicas, async_op=True) for grad in gradients]
        for work in works:
            work.wait()
        torch._foreach_div_(gradients, float(self.n_ranks))

    def gradient_norm(self, parameters: Iterable[nn.Parameter], model: GPTOSS) -> Tensor:
        """Global L2 norm of the gradients over the replicated parameters and all ranks' experts."""
        experts = {id(parameter) for parameter in expert_parameters(model)}
        gradients: dict[bool, list[Tensor]] = {True: [], False: []}
        for parameter in parameters:
            if parameter.grad is not None:
                gradients[id(parameter) in experts].append(parameter.grad)
        square = torch.nn.utils.get_total_norm(gradients[True]).square()
        distributed.all_reduce(square, group=self.group)
        return (square + torch.nn.utils.get_total_norm(gradients[False]).square()).sqrt()


def expert_parameters(model: GPTOSS) -> list[nn.Parameter]:
    """Parameters of the routed experts that this rank holds."""
    return [parameter for name, parameter in model.named_parameters() if ROUTED in name]
