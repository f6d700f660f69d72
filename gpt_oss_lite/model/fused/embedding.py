"""Token embedding in the residual stream's dtype, without an fp32 copy of the rows or of their gradients.

Shapes: B batch, T positions, N = B * T tokens, D width, V rows.
"""

from typing import Any

import torch
from torch import Tensor

from gpt_oss_lite.model.kernels.embedding import gather_rows, rows_gradient


class FusedEmbedding(torch.autograd.Function):
    """See `fused_embedding`."""

    @staticmethod
    def forward(ctx: Any, id_N: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows (N, D); keeps the ids alone."""
        ctx.save_for_backward(id_N)
        ctx.n_rows = weight_VD.shape[0]
        return gather_rows(id_N, weight_VD, dtype)

    @staticmethod
    def backward(ctx: Any, dx_ND: Tensor) -> tuple[Tensor | None, ...]:
        """Gradient of the matrix, (V, D) fp32."""
        (id_N,) = ctx.saved_tensors
        return None, rows_gradient(dx_ND.contiguous(), id_N, ctx.n_rows), None


def fused_embedding(ids_BT: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """`F.embedding(ids, weight).to(dtype)`; the gradient is summed in fp32, in an order that depends on the ids alone.

    An id outside the matrix is an error as it is in PyTorch's: on a GPU one that the device raises.

    Returns:
        (B, T, D) in `dtype`.
    """
    n_rows, width = weight_VD.shape
    torch._assert_async(((ids_BT >= 0) & (ids_BT < n_rows)).all(), f"a token id is not in [0, {n_rows})")
    return FusedEmbedding.apply(ids_BT.reshape(-1).contiguous(), weight_VD, dtype).view(*ids_BT.shape, width)
