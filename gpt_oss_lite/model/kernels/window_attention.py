"""Causal attention within a short window, with sinks, forward and backward (after Dao, 2023, FlashAttention-2).

A window of 128 tokens is a few blocks of keys, so the whole backward pass of a block of queries, or of keys, runs in
one program, and the gradients are written straight into the rows of the fused projection. The sink starts the running
softmax: maximum `sink`, denominator 1, numerator 0.

A head of 96 is no power of two, and padded to 128 a third of every product would be zeros; so each tile of a head is
two, LO columns and HI more (64 and 32; HI is 0 where one is enough).

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
STAGES = 2  # blocks under way in the loop over them: the one that is computed and the next
LOG2_E = 1 / math.log(2)
MIN_COLS = 16  # of a tensor core's product; narrower heads are padded with zeros


@triton.jit
def _load(pointer, offsets, in_rows, FIRST: tl.constexpr, COLS: tl.constexpr, HD: tl.constexpr):
    """Columns FIRST to FIRST + COLS of one head's rows, which begin at `offsets`; 0 outside."""
    cols = FIRST + tl.arange(0, COLS)
    mask = in_rows[:, None] & (cols[None, :] < HD)
    return tl.load(pointer + offsets[:, None] + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _store(pointer, offsets, in_rows, values, FIRST: tl.constexpr, COLS: tl.constexpr, HD: tl.constexpr):
    """The counterpart of `_load`."""
    cols = FIRST + tl.arange(0, COLS)
    mask = in_rows[:, None] & (cols[None, :] < HD)
    tl.store(pointer + offsets[:, None] + cols[None, :], values.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _dot(a_lo, a_hi, b_lo, b_hi, HI: tl.constexpr):
    """a b^T over all columns of a head."""
    product = tl.dot(a_lo, tl.trans(b_lo), input_precision="ieee")
    if HI:
        product = tl.dot(a_hi, tl.trans(b_hi), product, input_precision="ieee")
    return product


@triton.jit
def _window_forward(
    qkv_ptr, sink_ptr, o_ptr, lse_ptr, T, scale_log2, log2_e, W: tl.constexpr, HAS_SINK: tl.constexpr,
    N_Q: tl.constexpr, N_KV: tl.constexpr, HD: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    row_stride: tl.constexpr = (N_Q + 2 * N_KV) * HD
    reach: tl.constexpr = (W + BLOCK - 2) // BLOCK + 1
    batch, head = tl.program_id(1) // N_Q, tl.program_id(1) % N_Q
    qkv_ptr += batch.to(tl.int64) * T * row_stride
    k_ptr = qkv_ptr + (N_Q + head // (N_Q // N_KV)) * HD
    v_ptr = k_ptr + N_KV * HD
    start = tl.program_id(0) * BLOCK
    q_rows = start + tl.arange(0, BLOCK)
    in_time = q_rows < T
    q_lo = _load(qkv_ptr, q_rows * row_stride + head * HD, in_time, 0, LO, HD)
    q_hi = _load(qkv_ptr, q_rows * row_stride + head * HD, in_time, LO, HI, HD) if HI else q_lo
    if HAS_SINK:
        top = tl.zeros([BLOCK], dtype=tl.float32) + tl.load(sink_ptr + head) * log2_e
        total = tl.full([BLOCK], 1.0, dtype=tl.float32)
    else:
        top = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK], dtype=tl.float32)
    o_lo = tl.zeros([BLOCK, LO], dtype=tl.float32)
    o_hi = tl.zeros([BLOCK, HI], dtype=tl.float32) if HI else o_lo
    # The block with the queries themselves comes first: each query sees its own key, so `top` is finite from there on.
    for behind in tl.range(0, tl.minimum(reach, tl.program_id(0) + 1), num_stages=STAGES):
        k_rows = start - behind * BLOCK + tl.arange(0, BLOCK)
        offsets = k_rows * row_stride
        k_lo = _load(k_ptr, offsets, k_rows < T, 0, LO, HD)
        v_lo = _load(v_ptr, offsets, k_rows < T, 0, LO, HD)
        k_hi = _load(k_ptr, offsets, k_rows < T, LO, HI, HD) if HI else k_lo
        scores = _dot(q_lo, q_hi, k_lo, k_hi, HI) * scale_log2
        distance = q_rows[:, None] - k_rows[None, :]
        scores = tl.where((distance >= 0) & (distance < W), scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        p = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, axis=1)
        p = p.to(v_lo.dtype)
        o_lo = tl.dot(p, v_lo, o_lo * shrink[:, None], input_precision="ieee")
        if HI:
            v_hi = _load(v_ptr, offsets, k_rows < T, LO, HI, HD)
            o_hi = tl.dot(p, v_hi, o_hi * shrink[:, None], input_precision="ieee")
        top = new_top
    o_ptr += batch.to(tl.int64) * T * N_Q * HD
    _store(o_ptr, (q_rows * N_Q + head) * HD, in_time, o_lo / total[:, None], 0, LO, HD)
    if HI:
        _store(o_ptr, (q_rows * N_Q + head) * HD, in_time, o_hi / total[:, None], LO, HI, HD)
    tl.store(lse_ptr + (batch * N_Q + head) * T + q_rows, top + tl.log2(total), mask=in_time)


@triton.jit
def _window_backward_q(
    qkv_ptr, sink_ptr, do_ptr, o_ptr, lse_ptr, delta_ptr, dqkv_ptr, dsink_ptr, T, scale, scale_log2, log2_e,
    W: tl.constexpr, HAS_SINK: tl.constexpr, N_Q: tl.constexpr, N_KV: tl.constexpr, HD: tl.constexpr,
    LO: tl.constexpr, HI: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row_stride: tl.constexpr = (N_Q + 2 * N_KV) * HD
    reach: tl.constexpr = (W + BLOCK - 2) // BLOCK + 1
    batch, head = tl.program_id(1) // N_Q, tl.program_id(1) % N_Q
    qkv_ptr += batch.to(tl.int64) * T * row_stride
    dqkv_ptr += batch.to(tl.int64) * T * row_stride
    do_ptr += batch.to(tl.int64) * T * N_Q * HD
    o_ptr += batch.to(tl.int64) * T * N_Q * HD
    k_ptr = qkv_ptr + (N_Q + head // (N_Q // N_KV)) * HD
    v_ptr = k_ptr + N_KV * HD
    start = tl.program_id(0) * BLOCK
    q_rows = start + tl.arange(0, BLOCK)
    in_time = q_rows < T
    q_offsets, o_offsets = q_rows * row_stride + head * HD, (q_rows * N_Q + head) * HD
    q_lo = _load(qkv_ptr, q_offsets, in_time, 0, LO, HD)
    do_lo = _load(do_ptr, o_offsets, in_time, 0, LO, HD)
    delta = tl.sum(do_lo.to(tl.float32) * _load(o_ptr, o_offsets, in_time, 0, LO, HD).to(tl.float32), axis=1)
    q_hi, do_hi = q_lo, do_lo
    if HI:
        q_hi = _load(qkv_ptr, q_offsets, in_time, LO, HI, HD)
        do_hi = _load(do_ptr, o_offsets, in_time, LO, HI, HD)
        delta += tl.sum(do_hi.to(tl.float32) * _load(o_ptr, o_offsets, in_time, LO, HI, HD).to(tl.float32), axis=1)
    statistics = (batch * N_Q + head) * T + q_rows
    lse = tl.load(lse_ptr + statistics, mask=in_time, other=0.0)
    tl.store(delta_ptr + statistics, delta, mask=in_time)
    if HAS_SINK:
        share = tl.exp2(tl.load(sink_ptr + head) * log2_e - lse)
        dsink = -tl.sum(tl.where(in_time, share * delta, 0.0), axis=0)
        tl.store(dsink_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), dsink)
    dq_lo = tl.zeros([BLOCK, LO], dtype=tl.float32)
    dq_hi = tl.zeros([BLOCK, HI], dtype=tl.float32) if HI else dq_lo
    for behind in tl.range(0, tl.minimum(reach, tl.program_id(0) + 1), num_stages=STAGES):
        k_rows = start - behind * BLOCK + tl.arange(0, BLOCK)
        offsets = k_rows * row_stride
        k_lo = _load(k_ptr, offsets, k_rows < T, 0, LO, HD)
        v_lo = _load(v_ptr, offsets, k_rows < T, 0, LO, HD)
        k_hi, v_hi = k_lo, v_lo
        if HI:
            k_hi = _load(k_ptr, offsets, k_rows < T, LO, HI, HD)
            v_hi = _load(v_ptr, offsets, k_rows < T, LO, HI, HD)
        scores = _dot(q_lo, q_hi, k_lo, k_hi, HI) * scale_log2
        distance = q_rows[:, None] - k_rows[None, :]
        p = tl.where((distance >= 0) & (distance < W), tl.exp2(scores - lse[:, None]), 0.0)
        ds = (p * (_dot(do_lo, do_hi, v_lo, v_hi, HI) - delta[:, None])).to(k_lo.dtype)
        dq_lo = tl.dot(ds, k_lo, dq_lo, input_precision="ieee")
        if HI:
            dq_hi = tl.dot(ds, k_hi, dq_hi, input_precision="ieee")
    _store(dqkv_ptr, q_offsets, in_time, dq_lo * scale, 0, LO, HD)
    if HI:
        _store(dqkv_ptr, q_offsets, in_time, dq_hi * scale, LO, HI, HD)


@triton.jit
def _window_backward_kv(
    qkv_ptr, do_ptr, lse_ptr, delta_ptr, dqkv_ptr, T, scale, scale_log2,
    W: tl.constexpr, N_Q: tl.constexpr, N_KV: tl.constexpr, HD: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row_stride: tl.constexpr = (N_Q + 2 * N_KV) * HD
    reach: tl.constexpr = (W + BLOCK - 2) // BLOCK + 1
    batch, kv_head = tl.program_id(1) // N_KV, tl.program_id(1) % N_KV
    qkv_ptr += batch.to(tl.int64) * T * row_stride
    dqkv_ptr += batch.to(tl.int64) * T * row_stride
    do_ptr += batch.to(tl.int64) * T * N_Q * HD
    start = tl.program_id(0) * BLOCK
    k_rows = start + tl.arange(0, BLOCK)
    k_offsets = k_rows * row_stride + (N_Q + kv_head) * HD
    k_lo = _load(qkv_ptr, k_offsets, k_rows < T, 0, LO, HD)
    v_lo = _load(qkv_ptr + N_KV * HD, k_offsets, k_rows < T, 0, LO, HD)
    k_hi, v_hi = k_lo, v_lo
    if HI:
        k_hi = _load(qkv_ptr, k_offsets, k_rows < T, LO, HI, HD)
        v_hi = _load(qkv_ptr + N_KV * HD, k_offsets, k_rows < T, LO, HI, HD)
    dk_lo = tl.zeros([BLOCK, LO], dtype=tl.float32)
    dv_lo = tl.zeros([BLOCK, LO], dtype=tl.float32)
    dk_hi = tl.zeros([BLOCK, HI], dtype=tl.float32) if HI else dk_lo
    dv_hi = tl.zeros([BLOCK, HI], dtype=tl.float32) if HI else dv_lo
    blocks = tl.minimum(reach, tl.cdiv(T - start, BLOCK))
    # Transposed, (keys, queries): what the second products take is then what the first have made.
    for turn in tl.range(0, N_Q // N_KV * blocks, num_stages=STAGES):
        head = kv_head * (N_Q // N_KV) + turn // blocks
        q_rows = start + turn % blocks * BLOCK + tl.arange(0, BLOCK)
        in_time = q_rows < T
        q_offsets, o_offsets = q_rows * row_stride + head * HD, (q_rows * N_Q + head) * HD
        q_lo = _load(qkv_ptr, q_offsets, in_time, 0, LO, HD)
        do_lo = _load(do_ptr, o_offsets, in_time, 0, LO, HD)
        q_hi, do_hi = q_lo, do_lo
        if HI:
            q_hi = _load(qkv_ptr, q_offsets, in_time, LO, HI, HD)
            do_hi = _load(do_ptr, o_offsets, in_time, LO, HI, HD)
        statistics = (batch * N_Q + head) * T + q_rows
        lse = tl.load(lse_ptr + statistics, mask=in_time, other=0.0)
        delta = tl.load(delta_ptr + statistics, mask=in_time, other=0.0)
        scores = _dot(k_lo, k_hi, q_lo, q_hi, HI) * scale_log2
        distance = q_rows[None, :] - k_rows[:, None]
        seen = (distance >= 0) & (distance < W) & in_time[None, :]
        p = tl.where(seen, tl.exp2(scores - lse[None, :]), 0.0)
        ds = (p * (_dot(v_lo, v_hi, do_lo, do_hi, HI) - delta[None, :])).to(q_lo.dtype)
        p = p.to(do_lo.dtype)
        dv_lo = tl.dot(p, do_lo, dv_lo, input_precision="ieee")
        dk_lo = tl.dot(ds, q_lo, dk_lo, input_precision="ieee")
        if HI:
            dv_hi = tl.dot(p, do_hi, dv_hi, input_precision="ieee")
            dk_hi = tl.dot(ds, q_hi, dk_hi, input_precision="ieee")
    _store(dqkv_ptr, k_offsets, k_rows < T, dk_lo * scale, 0, LO, HD)
    _store(dqkv_ptr + N_KV * HD, k_offsets, k_rows < T, dv_lo, 0, LO, HD)
    if HI:
        _store(dqkv_ptr, k_offsets, k_rows < T, dk_hi * scale, LO, HI, HD)
        _store(dqkv_ptr + N_KV * HD, k_offsets, k_rows < T, dv_hi, LO, HI, HD)


def _columns(head_dim: int) -> dict[str, int]:
    """The two tiles of a head."""
    lo = max(MIN_COLS, 1 << (head_dim.bit_length() - 1))
    hi = max(MIN_COLS, next_power_of_2(head_dim - lo)) if head_dim > lo else 0
    return {"HD": head_dim, "LO": lo, "HI": hi}


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
        W=window, HAS_SINK=sink_H is not None, N_Q=n_heads, N_KV=n_kv_heads, **_columns(head_dim),
        BLOCK=BLOCK, STAGES=STAGES, num_warps=WARPS,
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
    sizes = {"W": window, "N_Q": n_heads, "N_KV": n_kv_heads, **_columns(head_dim), "BLOCK": BLOCK}
    launch = {"STAGES": STAGES, "num_warps": WARPS}
    _window_backward_q[(blocks, batch * n_heads)](
        qkv_NC, sink_H, do_BTHd, o_BTHd, lse_BHT, delta_BHT, dqkv_NC, dsink_BHG, seq_len, scale, scale * LOG2_E, LOG2_E,
        HAS_SINK=sink_H is not None, **sizes, **launch,
    )  # fmt: skip
    _window_backward_kv[(blocks, batch * n_kv_heads)](
        qkv_NC, do_BTHd, lse_BHT, delta_BHT, dqkv_NC, seq_len, scale, scale * LOG2_E, **sizes, **launch
    )
    return dqkv_NC, dsink_BHG.sum((0, 2)) if sink_H is not None else None
