"""Rotary positions (Su et al., 2021), half-split as in Llama and GPT-OSS, on the fused projection's rows.

A row of `qkv` holds the query heads, the key heads and the value heads, hd columns each. The forward pass turns queries
and keys in place; the backward pass turns the gradients back and writes them side by side, ready for one product.

Shapes: N rows = B * T tokens, H heads, hd head width.
"""

import triton
import triton.language as tl
from torch import Tensor

from gpt_oss_lite.model.kernels.launch import check_contiguous, next_power_of_2


@triton.jit
def _turn(
    qkv_ptr, cos_ptr, sin_ptr, seq_len, row_stride,
    N_TURNED: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    heads = tl.arange(0, HEADS)
    cols = tl.arange(0, COLS)
    mask = (heads[:, None] < N_TURNED) & (cols[None, :] < HALF)
    angle = (row % seq_len) * HALF + cols
    cos = tl.load(cos_ptr + angle, mask=cols < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + angle, mask=cols < HALF, other=0.0)[None, :]
    first_ptr = qkv_ptr + row.to(tl.int64) * row_stride + heads[:, None] * 2 * HALF + cols[None, :]
    first = tl.load(first_ptr, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(first_ptr, (first * cos - second * sin).to(qkv_ptr.dtype.element_ty), mask=mask)
    tl.store(first_ptr + HALF, (second * cos + first * sin).to(qkv_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gather_part(
    from_ptr, to_ptr, cos, sin, batch, time, stride_b, stride_h, stride_t,
    N_HEADS: tl.constexpr, TURN: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    heads = tl.arange(0, HEADS)
    cols = tl.arange(0, COLS)
    mask = (heads[:, None] < N_HEADS) & (cols[None, :] < HALF)
    source = from_ptr + batch * stride_b + time * stride_t + heads[:, None] * stride_h + cols[None, :]
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    target = to_ptr + heads[:, None] * 2 * HALF + cols[None, :]
    if TURN:
        turned = first * cos + second * sin
        second = second * cos - first * sin
        first = turned
    tl.store(target, first.to(to_ptr.dtype.element_ty), mask=mask)
    tl.store(target + HALF, second.to(to_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _turn_back(
    dq_ptr, dk_ptr, dv_ptr, dqkv_ptr, cos_ptr, sin_ptr, seq_len,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    N_Q: tl.constexpr, N_KV: tl.constexpr, HALF: tl.constexpr,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    batch, time = (row // seq_len).to(tl.int64), (row % seq_len).to(tl.int64)
    cols = tl.arange(0, COLS)
    angle = time * HALF + cols
    cos = tl.load(cos_ptr + angle, mask=cols < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + angle, mask=cols < HALF, other=0.0)[None, :]
    to_ptr = dqkv_ptr + row.to(tl.int64) * ((N_Q + 2 * N_KV) * 2 * HALF)
    _gather_part(dq_ptr, to_ptr, cos, sin, batch, time, q_b, q_h, q_t, N_Q, True, HALF, Q_HEADS, COLS)
    to_ptr += N_Q * 2 * HALF
    _gather_part(dk_ptr, to_ptr, cos, sin, batch, time, k_b, k_h, k_t, N_KV, True, HALF, KV_HEADS, COLS)
    to_ptr += N_KV * 2 * HALF
    _gather_part(dv_ptr, to_ptr, cos, sin, batch, time, v_b, v_h, v_t, N_KV, False, HALF, KV_HEADS, COLS)


def rope_(qkv_NC: Tensor, cos_TP: Tensor, sin_TP: Tensor, n_heads: int, n_kv_heads: int) -> None:
    """Turn the queries and keys of `qkv` in place.

    Args:
        qkv_NC: (B * T, (n_heads + 2 * n_kv_heads) * hd), rows in the order of the tokens.
        cos_TP, sin_TP: (T, hd / 2) fp32; row t for position t.
    """
    check_contiguous(qkv_NC, cos_TP, sin_TP)
    seq_len, half = cos_TP.shape
    turned = n_heads + n_kv_heads
    _turn[(qkv_NC.shape[0],)](
        qkv_NC, cos_TP, sin_TP, seq_len, qkv_NC.shape[1],
        N_TURNED=turned, HALF=half, HEADS=next_power_of_2(turned), COLS=next_power_of_2(half),
    )  # fmt: skip


def rope_backward(dq_BHTd: Tensor, dk_BHTd: Tensor, dv_BHTd: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """Gradient of the fused projection (B * T, C) from those of the turned queries, the turned keys and the values.

    The inputs are (B, H, T, hd) with any strides that keep the last dimension dense.
    """
    parts = (dq_BHTd, dk_BHTd, dv_BHTd)
    assert all(part.stride(3) == 1 for part in parts)
    batch, n_heads, seq_len, head_dim = dq_BHTd.shape
    n_kv_heads = dk_BHTd.shape[1]
    dqkv_NC = dq_BHTd.new_empty(batch * seq_len, (n_heads + 2 * n_kv_heads) * head_dim)
    strides = [part.stride(dim) for part in parts for dim in (0, 1, 2)]
    _turn_back[(batch * seq_len,)](
        *parts, dqkv_NC, cos_TP, sin_TP, seq_len, *strides,
        N_Q=n_heads, N_KV=n_kv_heads, HALF=head_dim // 2,
        Q_HEADS=next_power_of_2(n_heads), KV_HEADS=next_power_of_2(n_kv_heads), COLS=next_power_of_2(head_dim // 2),
    )  # fmt: skip
    return dqkv_NC
