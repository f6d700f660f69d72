"""Library attention kernels that return their log-sum-exp, with their own backward passes.

On an H200 (torch 2.11) cuDNN is the fastest on full causal layers, FlashAttention-2's window on the windowed ones.

Shapes: B batch, T time, H heads, hd head width; q, k and v are (B, H, T, hd) views of any strides with a dense last
dimension; o is (B, T, H, hd); lse is (B, H, T) fp32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten


class AttentionState(NamedTuple):
    """What a kernel's backward pass wants back from its forward pass, besides o and lse."""

    rng: tuple[Tensor, Tensor]


def attention_forward(
    q_BHTd: Tensor, k_BHTd: Tensor, v_BHTd: Tensor, window: int | None
) -> tuple[Tensor, Tensor, AttentionState]:
    """Causal softmax attention without a sink: o (B, T, H, hd), lse (B, H, T) and the state for the backward pass.

    Args:
        window: tokens that each token sees, self included; None: all before it.
    """
    if window is None:
        o, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
            q_BHTd, k_BHTd, v_BHTd, None, True, 0.0, True, False
        )
        return o.transpose(1, 2).contiguous(), lse.squeeze(-1).contiguous(), AttentionState((seed, offset))
    seq_len = q_BHTd.shape[2]
    o, lse, seed, unused, _ = _aten._flash_attention_forward(
        *(part.transpose(1, 2) for part in (q_BHTd, k_BHTd, v_BHTd)), None, None, seq_len, seq_len, 0.0, True, False,
        window_size_left=window - 1, window_size_right=0,
    )  # fmt: skip
    return o, lse.contiguous(), AttentionState((seed, unused))


def attention_backward(
    do_BTHd: Tensor, q_BHTd: Tensor, k_BHTd: Tensor, v_BHTd: Tensor, o_BTHd: Tensor, lse_BHT: Tensor,
    state: AttentionState, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v as (B, H, T, hd) views. With a sink, o and lse are those that hold it."""
    first, second = state.rng
    seq_len = q_BHTd.shape[2]
    if window is None:
        return _aten._scaled_dot_product_cudnn_attention_backward(
            do_BTHd.transpose(1, 2), q_BHTd, k_BHTd, v_BHTd, o_BTHd.transpose(1, 2), lse_BHT.unsqueeze(-1),
            first, second, None, None, None, seq_len, seq_len, 0.0, True,
        )  # fmt: skip
    gradients = _aten._flash_attention_backward(
        do_BTHd, *(part.transpose(1, 2) for part in (q_BHTd, k_BHTd, v_BHTd)), o_BTHd, lse_BHT, None, None,
        seq_len, seq_len, 0.0, True, first, second, window_size_left=window - 1, window_size_right=0,
    )  # fmt: skip
    dq, dk, dv = (gradient.transpose(1, 2) for gradient in gradients)
    return dq, dk, dv
