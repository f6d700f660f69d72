"""RMSNorm by itself, for the one that stands before the head: gain and statistics in fp32, no fp32 copy of x.

Shapes: B batch, T positions, N = B * T tokens, D width.
"""

from typing import Any

import torch
from torch import Tensor

from gpt_oss_lite.model.kernels.rms_norm import rms_norm, rms_norm_backward


class FusedRMSNorm(torch.autograd.Function):
    """See `fused_rms_norm`."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, gain_D: Tensor, eps: float) -> Tensor:
        """Normalised rows (N, D)."""
        h_ND, rstd_N = rms_norm(x_ND, gain_D, eps)
        ctx.save_for_backward(x_ND, gain_D, rstd_N)
        return h_ND

    @staticmethod
    def backward(ctx: Any, dh_ND: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and of the gain."""
        return *rms_norm_backward(dh_ND.contiguous(), None, *ctx.saved_tensors), None


def fused_rms_norm(x_BTD: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    """x over its root mean square, times the gain, rounded once to x's dtype.

    Args:
        x_BTD: residual stream in the compute dtype.
        gain_D: fp32.
    """
    return FusedRMSNorm.apply(x_BTD.reshape(-1, x_BTD.shape[-1]).contiguous(), gain_D, eps).view_as(x_BTD)
