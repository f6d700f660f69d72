"""Products of rows sorted by expert with their expert's matrix, without a host sync on any card.

PyTorch's grouped product reads the groups' sizes on the host before Hopper. Here a program finds its expert from the
offsets on the device; the grid is an upper bound (each expert may end in one tile that is not full), and programs
beyond the last tile leave at once.

Shapes: R rows, E experts, I and O inner and outer width of a product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt_oss_lite.model.kernels.launch import check_contiguous

BLOCK_R, BLOCK_O, BLOCK_I = 128, 128, 64
WARPS, STAGES = 8, 3


@triton.jit
def _grouped_product(
    x_ptr, w_ptr, offsets_ptr, y_ptr, n_inner, n_outer, w_e, w_i, w_o,
    E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    expert, first, last = 0, 0, 0
    begin, tiles = 0, 0
    for e in tl.static_range(E):
        end = tl.load(offsets_ptr + e)
        mine = tl.cdiv(end - begin, BLOCK_R)
        here = (tile >= tiles) & (tile < tiles + mine)
        expert = tl.where(here, e, expert)
        first = tl.where(here, begin + (tile - tiles) * BLOCK_R, first)
        last = tl.where(here, end, last)
        tiles += mine
        begin = end
    if tile < tiles:
        rows = first + tl.arange(0, BLOCK_R)
        outer = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
        inner = tl.arange(0, BLOCK_I)
        x_ptrs = x_ptr + rows[:, None].to(tl.int64) * n_inner + inner[None, :]
        w_ptrs = w_ptr + tl.cast(expert, tl.int64) * w_e + inner[:, None] * w_i + outer[None, :] * w_o
        y = tl.zeros([BLOCK_R, BLOCK_O], dtype=tl.float32)
        for start in range(0, n_inner, BLOCK_I):
            x = tl.load(x_ptrs, mask=(rows[:, None] < last) & (start + inner[None, :] < n_inner), other=0.0)
            w = tl.load(w_ptrs, mask=(start + inner[:, None] < n_inner) & (outer[None, :] < n_outer), other=0.0)
            y += tl.dot(x, w, input_precision="ieee")
            x_ptrs += BLOCK_I
            w_ptrs += BLOCK_I * w_i
        y_ptrs = y_ptr + rows[:, None].to(tl.int64) * n_outer + outer[None, :]
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=(rows[:, None] < last) & (outer[None, :] < n_outer))


@triton.jit
def _grouped_gradient(
    dy_ptr, x_ptr, offsets_ptr, dw_ptr, n_inner, n_outer,
    BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2)
    begin = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert)
    inner = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    outer = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    dw = tl.zeros([BLOCK_O, BLOCK_I], dtype=tl.float32)
    for start in range(begin, end, BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        wide = rows[:, None].to(tl.int64)
        dy = tl.load(
            dy_ptr + wide * n_outer + outer[None, :], mask=(rows[:, None] < end) & (outer[None, :] < n_outer), other=0.0
        )
        x = tl.load(
            x_ptr + wide * n_inner + inner[None, :], mask=(rows[:, None] < end) & (inner[None, :] < n_inner), other=0.0
        )
        dw += tl.dot(tl.trans(dy), x, input_precision="ieee")
    dw_ptrs = dw_ptr + tl.cast(expert, tl.int64) * n_outer * n_inner + outer[:, None] * n_inner + inner[None, :]
    tl.store(dw_ptrs, dw, mask=(outer[:, None] < n_outer) & (inner[None, :] < n_inner))


def triton_grouped_product(x_RI: Tensor, w_EIO: Tensor, offsets_E: Tensor) -> Tensor:
    """Rows of expert e times its matrix, accumulated in fp32: (R, O) in x's dtype. `w_EIO` may be a transposed view."""
    check_contiguous(x_RI, offsets_E)
    n_rows, n_experts, outer = x_RI.shape[0], w_EIO.shape[0], w_EIO.shape[2]
    y_RO = x_RI.new_empty(n_rows, outer)
    grid = (triton.cdiv(outer, BLOCK_O), triton.cdiv(n_rows, BLOCK_R) + n_experts)
    _grouped_product[grid](
        x_RI, w_EIO, offsets_E, y_RO, x_RI.shape[1], outer, *w_EIO.stride(),
        E=n_experts, BLOCK_R=BLOCK_R, BLOCK_O=BLOCK_O, BLOCK_I=BLOCK_I, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return y_RO


def triton_grouped_gradient(dy_RO: Tensor, x_RI: Tensor, offsets_E: Tensor) -> Tensor:
    """Gradients of the experts' matrices (E, O, I) fp32; zero for an expert without rows."""
    check_contiguous(dy_RO, x_RI, offsets_E)
    outer, inner, n_experts = dy_RO.shape[1], x_RI.shape[1], len(offsets_E)
    dw_EOI = torch.empty(n_experts, outer, inner, dtype=torch.float32, device=x_RI.device)
    grid = (triton.cdiv(inner, BLOCK_O), triton.cdiv(outer, BLOCK_O), n_experts)
    _grouped_gradient[grid](
        dy_RO, x_RI, offsets_E, dw_EOI, inner, outer,
        BLOCK_R=BLOCK_I, BLOCK_O=BLOCK_O, BLOCK_I=BLOCK_O, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return dw_EOI
