"""RMSNorm (Zhang and Sennrich, 2019), with the residual branch's gradient added in its backward pass.

Shapes: N rows (tokens), D width, P programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt_oss_lite.model.kernels.launch import check_contiguous, next_power_of_2, persistent_programs

ROWS = 4
WARPS = 2
ROWS_BACKWARD = 2
WARPS_BACKWARD = 2
PROGRAMS_BACKWARD = 8


@triton.jit
def _rms_norm_forward(
    x_ptr, gain_ptr, h_ptr, rstd_ptr, n_rows, eps, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    mask = (rows[:, None] < n_rows) & (cols[None, :] < D)
    offsets = rows[:, None].to(tl.int64) * D + cols[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)
    gain = tl.load(gain_ptr + cols, mask=cols < D, other=0.0)
    tl.store(h_ptr + offsets, (x * rstd[:, None] * gain[None, :]).to(h_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)


@triton.jit
def _rms_norm_backward(
    dh_ptr, residual_ptr, x_ptr, gain_ptr, rstd_ptr, dx_ptr, dgain_ptr, n_rows,
    D: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, COLS)
    gain = tl.load(gain_ptr + cols, mask=cols < D, other=0.0)
    dgain = tl.zeros([COLS], dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        mask = (rows[:, None] < n_rows) & (cols[None, :] < D)
        offsets = rows[:, None].to(tl.int64) * D + cols[None, :]
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)
        x_hat = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * rstd[:, None]
        dh = tl.load(dh_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        dgain += tl.sum(dh * x_hat, axis=0)
        scaled = dh * gain[None, :]
        dx = (scaled - x_hat * (tl.sum(scaled * x_hat, axis=1) / D)[:, None]) * rstd[:, None]
        if HAS_RESIDUAL:
            dx += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dgain_ptr + tl.program_id(0) * D + cols, dgain, mask=cols < D)


def rms_norm(x_ND: Tensor, gain_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalise rows.

    Returns:
        h (N, D) in x's dtype, and 1 / rms (N,) fp32 for the backward pass.
    """
    check_contiguous(x_ND, gain_D)
    n_rows, width = x_ND.shape
    h_ND = torch.empty_like(x_ND)
    rstd_N = torch.empty(n_rows, dtype=torch.float32, device=x_ND.device)
    grid = (triton.cdiv(n_rows, ROWS),)
    _rms_norm_forward[grid](
        x_ND, gain_D, h_ND, rstd_N, n_rows, eps, D=width, ROWS=ROWS, COLS=next_power_of_2(width), num_warps=WARPS
    )
    return h_ND, rstd_N


def rms_norm_backward(
    dh_ND: Tensor, residual_ND: Tensor | None, x_ND: Tensor, gain_D: Tensor, rstd_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the gain.

    Args:
        residual_ND: gradient that reaches x around the norm, added to dx; None: there is none.

    Returns:
        dx (N, D) in x's dtype and dgain (D,) fp32.
    """
    check_contiguous(dh_ND, x_ND, gain_D)
    n_rows, width = x_ND.shape
    dx_ND = torch.empty_like(x_ND)
    programs = persistent_programs(x_ND.device, PROGRAMS_BACKWARD)
    dgain_PD = torch.empty(programs, width, dtype=torch.float32, device=x_ND.device)
    _rms_norm_backward[(programs,)](
        dh_ND, residual_ND, x_ND, gain_D, rstd_N, dx_ND, dgain_PD, n_rows,
        D=width, HAS_RESIDUAL=residual_ND is not None, ROWS=ROWS_BACKWARD, COLS=next_power_of_2(width),
        num_warps=WARPS_BACKWARD,
    )  # fmt: skip
    return dx_ND, dgain_PD.sum(0)
