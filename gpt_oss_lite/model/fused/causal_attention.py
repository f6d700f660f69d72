"""cuDNN's attention with its log-sum-exp, and its own backward pass: the fastest on full causal layers of an H200.

Shapes: B batch, T time, H heads, hd head width; q, k and v are (B, H, T, hd) views of any strides with a dense last
dimension; o is (B, T, H, hd); lse is (B, H, T) fp32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_aten = torch.ops.aten


def causal_attention(q_BHTd: Tensor, k_BHTd: Tensor, v_BHTd: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Causal softmax attention without a sink: o, its log-sum-exp, and the kernel's state for the backward pass."""
    o, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
        q_BHTd, k_BHTd, v_BHTd, None, True, 0.0, True, False
    )
    return o.transpose(1, 2).contiguous(), lse.squeeze(-1).contiguous(), (seed, offset)


def causal_attention_backward(
    do_BTHd: Tensor, q_BHTd: Tensor, k_BHTd: Tensor, v_BHTd: Tensor, o_BTHd: Tensor, lse_BHT: Tensor,
    state: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v as (B, H, T, hd) views. With a sink, o and lse are those that hold it."""
    seed, offset = state
    seq_len = q_BHTd.shape[2]
    return _aten._scaled_dot_product_cudnn_attention_backward(
        do_BTHd.transpose(1, 2), q_BHTd, k_BHTd, v_BHTd, o_BTHd.transpose(1, 2), lse_BHT.unsqueeze(-1),
        seed, offset, None, None, None, seq_len, seq_len, 0.0, True,
    )  # fmt: skip
