"""The attention half of a block as one autograd function: x + o_proj(attention(norm(x))).

Shapes: N tokens = B * T, D width, C columns of the fused projection, H heads, P rotary pairs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpt_oss_lite.model.attention import SINK_MAX, SINK_MIN
from gpt_oss_lite.model.fused.causal_attention import causal_attention, causal_attention_backward
from gpt_oss_lite.model.fused.weights import joined_copy, split
from gpt_oss_lite.model.kernels.rms_norm import rms_norm, rms_norm_backward
from gpt_oss_lite.model.kernels.rope import rope_, rope_backward
from gpt_oss_lite.model.kernels.sink import add_sink_, sink_gradient
from gpt_oss_lite.model.kernels.window_attention import window_attention, window_attention_backward


@dataclass(frozen=True)
class AttentionGeometry:
    """Sizes of an attention layer."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    window: int | None
    eps: float


def matrix_gradient(dy_NO: Tensor, x_NI: Tensor) -> Tensor:
    """Gradient of a weight (O, I) in fp32, straight from the product's accumulator where the device can."""
    if dy_NO.is_cuda and dy_NO.dtype != torch.float32:
        return torch.mm(dy_NO.t(), x_NI, out_dtype=torch.float32)
    return torch.mm(dy_NO.t(), x_NI).float()


def _views(qkv_NC: Tensor, geometry: AttentionGeometry, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    heads = qkv_NC.view(batch, qkv_NC.shape[0] // batch, -1, geometry.head_dim).transpose(1, 2)
    q, k, v = heads.split([geometry.n_heads, geometry.n_kv_heads, geometry.n_kv_heads], dim=1)
    return q, k, v


class FusedAttention(torch.autograd.Function):
    """See `fused_attention`."""

    @staticmethod
    def forward(
        ctx: Any, geometry: AttentionGeometry, batch: int, cos_TP: Tensor, sin_TP: Tensor, x_ND: Tensor, gain_D: Tensor,
        sink_H: Tensor | None, q_proj: Tensor, kv_proj: Tensor, o_proj: Tensor,
    ) -> Tensor:  # fmt: skip
        """x_ND plus the attention of its norm, (N, D); keeps for the backward pass what is dear to compute again."""
        w_qkv = joined_copy([[q_proj, kv_proj]], x_ND.dtype)[0]
        w_out = o_proj.to(x_ND.dtype)
        h_ND, rstd_N = rms_norm(x_ND, gain_D, geometry.eps)
        qkv_NC = h_ND @ w_qkv.t()
        rope_(qkv_NC, cos_TP, sin_TP, geometry.n_heads, geometry.n_kv_heads)
        clamped_H = None if sink_H is None else sink_H.clamp(SINK_MIN, SINK_MAX)
        state: tuple[Tensor, ...] = ()
        if geometry.window is not None:
            o_BTHd, lse_BHT = window_attention(
                qkv_NC, clamped_H, batch, geometry.n_heads, geometry.n_kv_heads, geometry.window
            )
        else:
            o_BTHd, lse_BHT, state = causal_attention(*_views(qkv_NC, geometry, batch))
            if clamped_H is not None:
                add_sink_(o_BTHd, lse_BHT, clamped_H)
        ctx.geometry, ctx.parameters = geometry, (q_proj, kv_proj)
        # Saved, not kept on ctx: what is saved is freed by the backward pass, even if someone still holds an output.
        ctx.save_for_backward(
            x_ND, gain_D, rstd_N, h_ND, qkv_NC, o_BTHd, lse_BHT, cos_TP, sin_TP, sink_H, w_qkv, w_out, *state
        )
        return torch.addmm(x_ND, o_BTHd.view(x_ND.shape[0], -1), w_out.t())

    @staticmethod
    def backward(ctx: Any, dout_ND: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x_ND, the norm's gain, the sinks and the projections, in forward's order."""
        (
            x_ND, gain_D, rstd_N, h_ND, qkv_NC, o_BTHd, lse_BHT, cos_TP, sin_TP, sink_H, w_qkv, w_out, *state,
        ) = ctx.saved_tensors  # fmt: skip
        geometry = ctx.geometry
        dout_ND = dout_ND.contiguous()
        do_BTHd = (dout_ND @ w_out).view_as(o_BTHd)
        do_proj = matrix_gradient(dout_ND, o_BTHd.view(dout_ND.shape[0], -1))
        clamped_H = None if sink_H is None else sink_H.clamp(SINK_MIN, SINK_MAX)
        if geometry.window is not None:
            dqkv_NC, dsink_H = window_attention_backward(do_BTHd, qkv_NC, o_BTHd, lse_BHT, clamped_H, geometry.window)
            # Turning by the negative angle is the transposed turn.
            rope_(dqkv_NC, cos_TP, -sin_TP, geometry.n_heads, geometry.n_kv_heads)
        else:
            dsink_H = None if clamped_H is None else sink_gradient(do_BTHd, o_BTHd, lse_BHT, clamped_H)
            parts = _views(qkv_NC, geometry, o_BTHd.shape[0])
            gradients = causal_attention_backward(do_BTHd, *parts, o_BTHd, lse_BHT, state)
            dqkv_NC = rope_backward(*gradients, cos_TP, sin_TP)
        if dsink_H is not None:
            dsink_H = dsink_H * ((sink_H >= SINK_MIN) & (sink_H <= SINK_MAX))
        dq_proj, dkv_proj = split(matrix_gradient(dqkv_NC, h_ND), ctx.parameters)
        dx_ND, dgain_D = rms_norm_backward(dqkv_NC @ w_qkv, dout_ND, x_ND, gain_D, rstd_N)
        return None, None, None, None, dx_ND, dgain_D, dsink_H, dq_proj, dkv_proj, do_proj


def fused_attention(
    x_BTD: Tensor, geometry: AttentionGeometry, cos_TP: Tensor, sin_TP: Tensor, gain_D: Tensor, sink_H: Tensor | None,
    q_proj: Tensor, kv_proj: Tensor, o_proj: Tensor,
) -> Tensor:  # fmt: skip
    """x + o_proj(attention(rms_norm(x))), causal, with a window and sinks where given.

    Args:
        x_BTD: residual stream in the compute dtype.
        cos_TP, sin_TP: rotary tables of the T positions, fp32.
        sink_H: fp32 logits, clamped here to [-10, 15]; None: no sinks.
        q_proj, kv_proj, o_proj: fp32 parameters in nn.Linear's layout.

    Returns:
        (B, T, D) in x's dtype.
    """
    batch, seq_len, width = x_BTD.shape
    out_ND = FusedAttention.apply(
        geometry, batch, cos_TP, sin_TP, x_BTD.reshape(-1, width), gain_D, sink_H, q_proj, kv_proj, o_proj
    )
    return out_ND.view(batch, seq_len, width)
