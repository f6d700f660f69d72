"""SwiGLU (Shazeer, 2020) on rows that hold gate and up side by side, times a weight per row.

The router's weight is applied here, before the down projection, which is linear: the sum over a token's experts then
needs no weights, and the weight's gradient is a dot product of what this backward pass reads anyway.

Shapes: R rows, F hidden width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt_oss_lite.model.kernels.launch import check_contiguous

BLOCK = 512
ROWS = 4
ROWS_BACKWARD = 4
WARPS = 4


@triton.jit
def _activation(gate, up, CLAMPED: tl.constexpr):
    """SwiGLU, or GPT-OSS's clamped form: gate at most 7, up within +-7, sigmoid(1.702 gate), up + 1."""
    if CLAMPED:
        gate = tl.minimum(gate, 7.0)
        up = tl.maximum(tl.minimum(up, 7.0), -7.0)
        return gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _swiglu_forward(
    gate_up_ptr, weight_ptr, a_ptr, n_rows,
    F: tl.constexpr, HAS_WEIGHT: tl.constexpr, CLAMPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows[:, None] < n_rows) & (cols[None, :] < F)
    gate_ptrs = gate_up_ptr + rows[:, None].to(tl.int64) * 2 * F + cols[None, :]
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + F, mask=mask, other=0.0).to(tl.float32)
    a = _activation(gate, up, CLAMPED)
    if HAS_WEIGHT:
        a *= tl.load(weight_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
    tl.store(a_ptr + rows[:, None].to(tl.int64) * F + cols[None, :], a.to(a_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward(
    da_ptr, gate_up_ptr, weight_ptr, dgate_up_ptr, dweight_ptr, n_rows,
    F: tl.constexpr, HAS_WEIGHT: tl.constexpr, CLAMPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
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
            gate = tl.minimum(gate, 7.0)
            shifted_up = tl.maximum(tl.minimum(up, 7.0), -7.0) + 1.0
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
    if HAS_WEIGHT:
        tl.store(dweight_ptr + rows, dweight, mask=in_rows)


def swiglu(gate_up_R2F: Tensor, weight_R: Tensor | None, clamped: bool = False) -> Tensor:
    """Activation of an expert's hidden layer.

    Args:
        gate_up_R2F: gate in the first F columns, up in the last F.
        weight_R: fp32 factor per row; None: 1.
        clamped: GPT-OSS's form.

    Returns:
        (R, F) in gate_up's dtype.
    """
    check_contiguous(gate_up_R2F)
    n_rows, hidden = gate_up_R2F.shape[0], gate_up_R2F.shape[1] // 2
    a_RF = gate_up_R2F.new_empty(n_rows, hidden)
    _swiglu_forward[(triton.cdiv(n_rows, ROWS), triton.cdiv(hidden, BLOCK))](
        gate_up_R2F, weight_R, a_RF, n_rows,
        F=hidden, HAS_WEIGHT=weight_R is not None, CLAMPED=clamped, ROWS=ROWS, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return a_RF


def swiglu_backward(
    da_RF: Tensor, gate_up_R2F: Tensor, weight_R: Tensor | None, clamped: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Gradients of gate_up, in its dtype, and of the weights, fp32 (None without weights)."""
    check_contiguous(da_RF, gate_up_R2F)
    n_rows, hidden = da_RF.shape
    dgate_up_R2F = torch.empty_like(gate_up_R2F)
    dweight_R = torch.empty_like(weight_R) if weight_R is not None else None
    _swiglu_backward[(triton.cdiv(n_rows, ROWS_BACKWARD),)](
        da_RF, gate_up_R2F, weight_R, dgate_up_R2F, dweight_R, n_rows,
        F=hidden, HAS_WEIGHT=weight_R is not None, CLAMPED=clamped, ROWS=ROWS_BACKWARD, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return dgate_up_R2F, dweight_R
