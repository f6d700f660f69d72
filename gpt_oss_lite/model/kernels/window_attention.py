"""Causal attention within a short window, with sinks, forward and backward (after Dao, 2023, FlashAttention-2).

A window of 128 tokens is a few blocks of keys, so the whole backward pass of a block of queries, or of keys, runs in
one program; the sum over the query heads of a key head is made in registers, and the gradients are written straight
into the rows of the fused projection. The sink starts the running softmax: maximum `sink`, denominator 1, numerator 0.

Shapes: B batch, T time, Hq query heads, Hkv key heads, hd head width; qkv is (B * T, (Hq + 2 Hkv) * hd).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt_oss_lite.model.kernels.launch import check_contiguous, next_power_of_2

BLOCK = 64
WARPS = 4
STAGES = 2
LOG2_E = 1 / math.log(2)
MIN_COLS = 16  # of a tensor core's product; narrower heads are padded with zeros


@triton.jit
def _load_rows(pointer, rows, row_stride, cols, T, HD: tl.constexpr):
    """Rows of one head, 0 outside the sequence and the head."""
    mask = (rows[:, None] < T) & (cols[None, :] < HD)
    return tl.load(pointer + rows[:, None] * row_stride + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _probabilities(q, k, q_rows, k_rows, lse, T, scale_log2, W: tl.constexpr):
    """exp(score - lse) of a block, 0 where a query does not see a key; the log-sum-exp is in base 2."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    distance = q_rows[:, None] - k_rows[None, :]
    seen = (distance >= 0) & (distance < W) & (q_rows[:, None] < T)
    return tl.where(seen, tl.exp2(scores - lse[:, None]), 0.0)


@triton.jit
def _window_forward(
    qkv_ptr, sink_ptr, o_ptr, lse_ptr, T, scale_log2, log2_e, W: tl.constexpr, HAS_SINK: tl.constexpr,
    N_Q: tl.constexpr, N_KV: tl.constexpr, HD: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(1) // N_Q, tl.program_id(1) % N_Q
    row_stride = (N_Q + 2 * N_KV) * HD
    q_ptr = qkv_ptr + batch.to(tl.int64) * T * row_stride + head * HD
    k_ptr = q_ptr + (N_Q + head // (N_Q // N_KV) - head) * HD
    cols = tl.arange(0, COLS)
    start = tl.program_id(0) * BLOCK
    q_rows = start + tl.arange(0, BLOCK)
    q = _load_rows(q_ptr, q_rows, row_stride, cols, T, HD)
    if HAS_SINK:
        top = tl.zeros([BLOCK], dtype=tl.float32) + tl.load(sink_ptr + head) * log2_e
        total = tl.full([BLOCK], 1.0, dtype=tl.float32)
    else:
        top = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK], dtype=tl.float32)
    o = tl.zeros([BLOCK, COLS], dtype=tl.float32)
    # The block with the queries themselves comes first: each query sees its own key, so `top` is finite from there on.
    for behind in tl.static_range(0, (W + BLOCK - 2) // BLOCK + 1):
        k_start = start - behind * BLOCK
        if k_start >= 0:
            k_rows = k_start + tl.arange(0, BLOCK)
            k = _load_rows(k_ptr, k_rows, row_stride, cols, T, HD)
            v = _load_rows(k_ptr + N_KV * HD, k_rows, row_stride, cols, T, HD)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
            distance = q_rows[:, None] - k_rows[None, :]
            scores = tl.where((distance >= 0) & (distance < W), scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            p = tl.exp2(scores - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(p, axis=1)
            o = o * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            top = new_top
    o_ptrs = o_ptr + ((batch * T + q_rows[:, None]).to(tl.int64) * N_Q + head) * HD + cols[None, :]
    tl.store(o_ptrs, (o / total[:, None]).to(o_ptr.dtype.element_ty), mask=(q_rows[:, None] < T) & (cols[None, :] < HD))
    tl.store(lse_ptr + tl.program_id(1) * T + q_rows, top + tl.log2(total), mask=q_rows < T)


@triton.jit
def _window_backward_q(
    qkv_ptr, sink_ptr, do_ptr, o_ptr, lse_ptr, delta_ptr, dqkv_ptr, dsink_ptr, T, scale, scale_log2, log2_e,
    W: tl.constexpr, HAS_SINK: tl.constexpr, N_Q: tl.constexpr, N_KV: tl.constexpr, HD: tl.constexpr,
    COLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(1) // N_Q, tl.program_id(1) % N_Q
    row_stride = (N_Q + 2 * N_KV) * HD
    q_offset = batch.to(tl.int64) * T * row_stride + head * HD
    k_ptr = qkv_ptr + q_offset + (N_Q + head // (N_Q // N_KV) - head) * HD
    o_offset = (batch.to(tl.int64) * T * N_Q + head) * HD
    cols = tl.arange(0, COLS)
    start = tl.program_id(0) * BLOCK
    q_rows = start + tl.arange(0, BLOCK)
    q = _load_rows(qkv_ptr + q_offset, q_rows, row_stride, cols, T, HD)
    do = _load_rows(do_ptr + o_offset, q_rows, N_Q * HD, cols, T, HD)
    o = _load_rows(o_ptr + o_offset, q_rows, N_Q * HD, cols, T, HD)
    lse = tl.load(lse_ptr + tl.program_id(1) * T + q_rows, mask=q_rows < T, other=0.0)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), axis=1)
    tl.store(delta_ptr + tl.program_id(1) * T + q_rows, delta, mask=q_rows < T)
    if HAS_SINK:
        share = tl.exp2(tl.load(sink_ptr + head) * log2_e - lse)
        dsink = -tl.sum(tl.where(q_rows < T, share * delta, 0.0), axis=0)
        tl.store(dsink_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), dsink)
    dq = tl.zeros([BLOCK, COLS], dtype=tl.float32)
    for behind in tl.static_range(0, (W + BLOCK - 2) // BLOCK + 1):
        k_start = start - behind * BLOCK
        if k_start >= 0:
            k_rows = k_start + tl.arange(0, BLOCK)
            k = _load_rows(k_ptr, k_rows, row_stride, cols, T, HD)
            v = _load_rows(k_ptr + N_KV * HD, k_rows, row_stride, cols, T, HD)
            p = _probabilities(q, k, q_rows, k_rows, lse, T, scale_log2, W)
            dp = tl.dot(do, tl.trans(v), input_precision="ieee")
            ds = p * (dp - delta[:, None])
            dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    dq_ptrs = dqkv_ptr + q_offset + q_rows[:, None] * row_stride + cols[None, :]
    tl.store(dq_ptrs, (dq * scale).to(dqkv_ptr.dtype.element_ty), mask=(q_rows[:, None] < T) & (cols[None, :] < HD))


@triton.jit
def _window_backward_kv(
    qkv_ptr, do_ptr, lse_ptr, delta_ptr, dqkv_ptr, T, scale, scale_log2,
    W: tl.constexpr, N_Q: tl.constexpr, N_KV: tl.constexpr, HD: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch, kv_head = tl.program_id(1) // N_KV, tl.program_id(1) % N_KV
    row_stride = (N_Q + 2 * N_KV) * HD
    base = batch.to(tl.int64) * T * row_stride
    k_offset = base + (N_Q + kv_head) * HD
    cols = tl.arange(0, COLS)
    start = tl.program_id(0) * BLOCK
    k_rows = start + tl.arange(0, BLOCK)
    k = _load_rows(qkv_ptr + k_offset, k_rows, row_stride, cols, T, HD)
    v = _load_rows(qkv_ptr + k_offset + N_KV * HD, k_rows, row_stride, cols, T, HD)
    dk = tl.zeros([BLOCK, COLS], dtype=tl.float32)
    dv = tl.zeros([BLOCK, COLS], dtype=tl.float32)
    for member in tl.static_range(0, N_Q // N_KV):
        head = kv_head * (N_Q // N_KV) + member
        statistics = (batch * N_Q + head) * T
        for ahead in tl.static_range(0, (W + BLOCK - 2) // BLOCK + 1):
            q_rows = start + ahead * BLOCK + tl.arange(0, BLOCK)
            if start + ahead * BLOCK < T:
                q = _load_rows(qkv_ptr + base + head * HD, q_rows, row_stride, cols, T, HD)
                do_ptr_head = do_ptr + (batch.to(tl.int64) * T * N_Q + head) * HD
                do = _load_rows(do_ptr_head, q_rows, N_Q * HD, cols, T, HD)
                lse = tl.load(lse_ptr + statistics + q_rows, mask=q_rows < T, other=0.0)
                delta = tl.load(delta_ptr + statistics + q_rows, mask=q_rows < T, other=0.0)
                p = _probabilities(q, k, q_rows, k_rows, lse, T, scale_log2, W)
                dv += tl.dot(tl.trans(p.to(do.dtype)), do, input_precision="ieee")
                dp = tl.dot(do, tl.trans(v), input_precision="ieee")
                ds = p * (dp - delta[:, None])
                dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision="ieee")
    dk_ptrs = dqkv_ptr + k_offset + k_rows[:, None] * row_stride + cols[None, :]
    mask = (k_rows[:, None] < T) & (cols[None, :] < HD)
    tl.store(dk_ptrs, (dk * scale).to(dqkv_ptr.dtype.element_ty), mask=mask)
    tl.store(dk_ptrs + N_KV * HD, dv.to(dqkv_ptr.dtype.element_ty), mask=mask)


def window_attention(
    qkv_NC: Tensor, sink_H: Tensor | None, batch: int, n_heads: int, n_kv_heads: int, window: int
) -> tuple[Tensor, Tensor]:
    """Attention over the turned queries and keys in `qkv`.

    Args:
        sink_H: clamped sinks, fp32; None: none.
        window: tokens that each token sees, self included.

    Returns:
        o (B, T, Hq, hd) in qkv's dtype and the log-sum-exp with the sink, base 2, (B, Hq, T) fp32.
    """
    check_contiguous(qkv_NC)
    seq_len, head_dim = qkv_NC.shape[0] // batch, qkv_NC.shape[1] // (n_heads + 2 * n_kv_heads)
    o_BTHd = qkv_NC.new_empty(batch, seq_len, n_heads, head_dim)
    lse_BHT = torch.empty(batch, n_heads, seq_len, dtype=torch.float32, device=qkv_NC.device)
    _window_forward[(triton.cdiv(seq_len, BLOCK), batch * n_heads)](
        qkv_NC, sink_H, o_BTHd, lse_BHT, seq_len, head_dim**-0.5 * LOG2_E, LOG2_E,
        W=window, HAS_SINK=sink_H is not None, N_Q=n_heads, N_KV=n_kv_heads, HD=head_dim,
        COLS=max(MIN_COLS, next_power_of_2(head_dim)), BLOCK=BLOCK, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return o_BTHd, lse_BHT


def window_attention_backward(
    do_BTHd: Tensor, qkv_NC: Tensor, o_BTHd: Tensor, lse_BHT: Tensor, sink_H: Tensor | None, window: int
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the turned `qkv`, in its layout and dtype, and of the clamped sinks, fp32."""
    check_contiguous(do_BTHd, qkv_NC, o_BTHd, lse_BHT)
    batch, seq_len, n_heads, head_dim = o_BTHd.shape
    n_kv_heads = (qkv_NC.shape[1] // head_dim - n_heads) // 2
    blocks, scale = triton.cdiv(seq_len, BLOCK), head_dim**-0.5
    dqkv_NC, delta_BHT = torch.empty_like(qkv_NC), torch.empty_like(lse_BHT)
    dsink_BHG = torch.empty(batch, n_heads, blocks, dtype=torch.float32, device=qkv_NC.device)
    cols = max(MIN_COLS, next_power_of_2(head_dim))
    sizes = {"W": window, "N_Q": n_heads, "N_KV": n_kv_heads, "HD": head_dim, "COLS": cols, "BLOCK": BLOCK}
    launch = {"num_warps": WARPS, "num_stages": STAGES}
    _window_backward_q[(blocks, batch * n_heads)](
        qkv_NC, sink_H, do_BTHd, o_BTHd, lse_BHT, delta_BHT, dqkv_NC, dsink_BHG, seq_len, scale, scale * LOG2_E, LOG2_E,
        HAS_SINK=sink_H is not None, **sizes, **launch,
    )  # fmt: skip
    _window_backward_kv[(blocks, batch * n_kv_heads)](
        qkv_NC, do_BTHd, lse_BHT, delta_BHT, dqkv_NC, seq_len, scale, scale * LOG2_E, **sizes, **launch
    )
    return dqkv_NC, dsink_BHG.sum((0, 2)) if sink_H is not None else None
