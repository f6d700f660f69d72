"""Attention through PyTorch's FlexAttention: one fused kernel for any mask, document masks included (CUDA only).

The kernel returns its log-sum-exp, and the sink scales its output: o' = o * sigmoid(lse - sink). Autograd carries the
gradient through both, so the sinks' and the scores' gradients are exact.

Shapes: as in `reference`.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from gpt_oss_lite.model.layers import without_autocast

MIN_HEAD_DIM = 16  # of the kernel; narrower heads are padded with zeros, which change no score and no output


@cache
def _compiled_attention() -> Any:
    # Uncompiled, FlexAttention materialises the scores.
    return torch.compile(flex_attention, dynamic=False)


@cache
def _static_mask(seq_len: int, window: int | None, device: torch.device) -> BlockMask:
    return create_block_mask(_visible(window, None), None, None, seq_len, seq_len, device=device)


def _visible(window: int | None, document_ids_BT: Tensor | None) -> Any:
    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = q >= k
        if window is not None:
            seen = seen & (q - k < window)
        if document_ids_BT is not None:
            seen = seen & (document_ids_BT[b, q] == document_ids_BT[b, k])
        return seen

    return visible


def sink_attention(
    q_BHTC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, sinks_H: Tensor | None, *,
    window: int | None, document_ids_BT: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `reference.sink_attention`, for as many queries as keys."""
    batch, _, seq_len, head_dim = q_BHTC.shape
    assert k_BGSC.shape[2] == seq_len
    if head_dim < MIN_HEAD_DIM:
        q_BHTC, k_BGSC, v_BGSC = (F.pad(part, (0, MIN_HEAD_DIM - head_dim)) for part in (q_BHTC, k_BGSC, v_BGSC))
    if document_ids_BT is None:
        mask = _static_mask(seq_len, window, q_BHTC.device)
    else:
        mask = create_block_mask(_visible(window, document_ids_BT), batch, None, seq_len, seq_len, device=q_BHTC.device)
    with without_autocast(q_BHTC):
        out, lse_BHT = _compiled_attention()(
            q_BHTC, k_BGSC, v_BGSC, block_mask=mask, scale=head_dim**-0.5, enable_gqa=True, return_lse=True
        )
        out = out[..., :head_dim]
        if sinks_H is None:
            return out
        return (out * torch.sigmoid(lse_BHT - sinks_H[None, :, None])[..., None]).to(out.dtype)
