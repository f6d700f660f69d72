"""SwiGLU (Shazeer, 2020) on rows that hold gate and up side by side, times a weight per row.

The router's weight is applied here, before the down projection, which is linear: the sum over a token's experts then
needs no weights, and the weight's gradient is a dot product of what this backward pass reads anyway.

Shapes: R rows, F hidden width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt_oss_lite.model.kernels.eight_bits import (
    Rows,
    largest_magnitude,
    rows_of_a_tile,
    store_eight_bits,
    store_scales,
)
from gpt_oss_lite.model.kernels.launch import check_contiguous, next_power_of_2

BLOCK = 512
ROWS = 4
WARPS = 4


@triton.jit
def _at_most_7(x):
    """NaN stays NaN, as in PyTorch: a GPU's plain minimum would make 7 of it, and no one would see the fault."""
    return tl.minimum(x, 7.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _within_7(x):
    return tl.maximum(_at_most_7(x), -7.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _activation(gate, up, CLAMPED: tl.constexpr):
    """SwiGLU, or GPT-OSS's clamped form: gate at most 7, up within +-7, sigmoid(1.702 gate), up + 1."""
    if CLAMPED:
        gate = _at_most_7(gate)
        return gate * tl.sigmoid(1.702 * gate) * (_within_7(up) + 1.0)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _swiglu_forward(
    gate_up_ptr, weight_ptr, a_ptr, eight_ptr, scale_ptr, n_rows,
    F: tl.constexpr, HAS_WEIGHT: tl.constexpr, CLAMPED: tl.constexpr, EIGHT_BITS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_rows = rows < n_rows
    mask = in_rows[:, None] & (cols[None, :] < F)
    gate_ptrs = gate_up_ptr + rows[:, None].to(tl.int64) * 2 * F + cols[None, :]
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + F, mask=mask, other=0.0).to(tl.float32)
    a = _activation(gate, up, CLAMPED)
    if HAS_WEIGHT:
        a *= tl.load(weight_ptr + rows, mask=in_rows, other=0.0)[:, None]
    offsets = rows[:, None].to(tl.int64) * F + cols[None, :]
    tl.store(a_ptr + offsets, a.to(a_ptr.dtype.element_ty), mask=mask)
    if EIGHT_BITS:
        tl.static_assert(BLOCK >= F)
        largest = largest_magnitude(a)
        store_eight_bits(a, largest, eight_ptr + offsets, mask)
        store_scales(largest, scale_ptr + rows, in_rows)


@triton.jit
def _swiglu_backward(
    da_ptr, gate_up_ptr, weight_ptr, dgate_up_ptr, eight_ptr, scale_ptr, dweight_ptr, n_rows,
    F: tl.constexpr, HAS_WEIGHT: tl.constexpr, CLAMPED: tl.constexpr, EIGHT_BITS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_rows = rows < n_rows
    weight = tl.load(weight_ptr + rows, mask=in_rows, other=0.0)[:, None] if HAS_WEIGHT else 1.0
    dweight = tl.zeros([ROWS], dtype=tl.float32)
    for start in tl.static_range(0, F, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = in_rows[:, None] & (cols[None, :] < F)
        gate_offsets = rows[:, None].to(tl.int64) * 2 * F + cols[None, :]
        gate = tl.load(gate_up_ptr + gate_offsets, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + gate_offsets + F, mask=mask, other=0.0).to(tl.float32)
        da = tl.load(da_ptr + rows[:, None].to(tl.int64) * F + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if CLAMPED:
            inside_gate, inside_up = gate <= 7.0, tl.abs(up) <= 7.0
            gate = _at_most_7(gate)
            shifted_up = _within_7(up) + 1.0
            sigmoid = tl.sigmoid(1.702 * gate)
            slope = sigmoid * (1.0 + 1.702 * gate * (1.0 - sigmoid))
        else:
            shifted_up = up
            sigmoid = tl.sigmoid(gate)
            slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        silu = gate * sigmoid
        if HAS_WEIGHT:
            dweight += tl.sum(da * silu * shifted_up, axis=1)
        scaled = da * weight
        dgate = scaled * shifted_up * slope
        dup = scaled * silu
        if CLAMPED:
            dgate = tl.where(inside_gate, dgate, 0.0)
            dup = tl.where(inside_up, dup, 0.0)
        tl.store(dgate_up_ptr + gate_offsets, dgate.to(dgate_up_ptr.dtype.element_ty), mask=mask)
        tl.store(dgate_up_ptr + gate_offsets + F, dup.to(dgate_up_ptr.dtype.element_ty), mask=mask)
        if EIGHT_BITS:
            tl.static_assert(BLOCK >= F)
            largest = tl.maximum(largest_magnitude(dgate), largest_magnitude(dup))
            store_eight_bits(dgate, largest, eight_ptr + gate_offsets, mask)
            store_eight_bits(dup, largest, eight_ptr + gate_offsets + F, mask)
            store_scales(largest, scale_ptr + rows, in_rows)
    if HAS_WEIGHT:
        tl.store(dweight_ptr + rows, dweight, mask=in_rows)


def swiglu(
    gate_up_R2F: Tensor, weight_R: Tensor | None, clamped: bool = False, eight_bits: torch.dtype | None = None
) -> Rows:
    """Activation of an expert's hidden layer.

    Args:
        gate_up_R2F: gate in the first F columns, up in the last F.
        weight_R: fp32 factor per row; None: 1.
        clamped: GPT-OSS's form.
        eight_bits: 8-bit dtype that the result is wanted in besides.

    Returns:
        (R, F) in gate_up's dtype, and in the other one.
    """
    check_contiguous(gate_up_R2F)
    n_rows, hidden = gate_up_R2F.shape[0], gate_up_R2F.shape[1] // 2
    a = Rows.empty(n_rows, hidden, gate_up_R2F, eight_bits)
    rows, block = _tile(hidden, hidden, eight_bits)
    _swiglu_forward[(triton.cdiv(n_rows, rows), triton.cdiv(hidden, block))](
        gate_up_R2F, weight_R, *a, n_rows, F=hidden, HAS_WEIGHT=weight_R is not None, CLAMPED=clamped,
        EIGHT_BITS=eight_bits is not None, ROWS=rows, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
    return a


def swiglu_backward(
    da_RF: Tensor, gate_up_R2F: Tensor, weight_R: Tensor | None, clamped: bool = False,
    eight_bits: torch.dtype | None = None,
) -> tuple[Rows, Tensor | None]:  # fmt: skip
    """Gradients of gate_up (R, 2F), in its dtype and in 8 bits where wanted, and of the weights, fp32 (None without
    weights)."""
    check_contiguous(da_RF, gate_up_R2F)
    n_rows, hidden = da_RF.shape
    dgate_up = Rows.empty(n_rows, 2 * hidden, gate_up_R2F, eight_bits)
    dweight_R = torch.empty_like(weight_R) if weight_R is not None else None
    rows, block = _tile(hidden, 2 * hidden, eight_bits)
    _swiglu_backward[(triton.cdiv(n_rows, rows),)](
        da_RF, gate_up_R2F, weight_R, *dgate_up, dweight_R, n_rows,
        F=hidden, HAS_WEIGHT=weight_R is not None, CLAMPED=clamped, EIGHT_BITS=eight_bits is not None,
        ROWS=rows, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
    return dgate_up, dweight_R


def _tile(hidden: int, width: int, eight_bits: torch.dtype | None) -> tuple[int, int]:
    """Rows and hidden columns of a program: rows of `width` are held whole where their largest magnitude is needed."""
    return (ROWS, BLOCK) if eight_bits is None else (rows_of_a_tile(width), next_power_of_2(hidden))
