"""Token-slots sorted by expert, and back: what is around the experts, however they are computed.

Shapes: T tokens, K experts per token, R = T * K rows, D width, E experts.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpt_oss_lite.model.backends import ExpertsOnRows
from gpt_oss_lite.model.routing import Routing, count_slots


class RowOrder(NamedTuple):
    """Where the token-slots lie among the sorted rows."""

    slot_of_row_R: Tensor
    row_of_slot_R: Tensor


class PermuteRows(torch.autograd.Function):
    """x[order] for a permutation; the gradient is read through the inverse, not scattered with atomic adds."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        """The rows in another order: x_RD[order_R]."""
        ctx.save_for_backward(inverse_R)
        return x_RD[order_R]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The gradient's rows, put back in x_RD's order."""
        (inverse_R,) = ctx.saved_tensors
        return gradients[0][inverse_R], None, None


def sort_by_expert(x_TD: Tensor, routing: Routing) -> tuple[Tensor, Tensor, RowOrder]:
    """Each token once for each of its experts, sorted by expert: rows (R, D), their experts (R,), and the order."""
    n_tokens, width = x_TD.shape
    experts_per_token = routing.experts_TK.shape[1]
    flat_R = routing.experts_TK.reshape(-1)
    slot_of_row_R = flat_R.argsort(stable=True)
    order = RowOrder(slot_of_row_R, slot_of_row_R.argsort())
    x_TKD = x_TD[:, None].expand(n_tokens, experts_per_token, width)
    return PermuteRows.apply(x_TKD.reshape(-1, width), *order), flat_R[slot_of_row_R], order


def combine(y_RD: Tensor, routing: Routing, order: RowOrder) -> Tensor:
    """Weighted sum over a token's experts in their order of choice, (T, D) in the weights' dtype."""
    y_RD = PermuteRows.apply(y_RD, order.row_of_slot_R, order.slot_of_row_R)
    return (y_RD.view(*routing.experts_TK.shape, y_RD.shape[1]) * routing.weights_TK[..., None]).sum(dim=1)


def dispatch_experts(x_TD: Tensor, routing: Routing, experts: nn.ModuleList, experts_on_rows: ExpertsOnRows) -> Tensor:
    """Send every token through its experts and add up what they return, by their weights.

    The sum over a token's experts goes in their order of choice, so two runs agree bit by bit.

    Args:
        x_TD: tokens.
        routing: experts (T, K) and their weights.
        experts: E modules from (rows, D) to (rows, D).
        experts_on_rows: how they are computed.

    Returns:
        (T, D) in x's dtype; the sum runs in the weights' dtype.
    """
    x_RD, expert_R, order = sort_by_expert(x_TD, routing)
    rows_E = count_slots(routing.experts_TK, len(experts))
    return combine(experts_on_rows(x_RD, expert_R, rows_E, list(experts)), routing, order).to(x_TD.dtype)
