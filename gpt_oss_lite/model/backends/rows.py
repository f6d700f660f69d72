"""Token-slots sorted by expert, and back: what the dispatch backends share.

Shapes: T tokens, K experts per token, R = T * K rows, D width.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_oss_lite.model.routing import Routing


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
    return (y_RD.view(*routing.experts_TK.shape, -1) * routing.weights_TK[..., None]).sum(dim=1)
