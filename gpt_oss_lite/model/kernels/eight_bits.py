"""Rows in 8-bit floats for the products that take them, each row divided by a scale of its own.

E4M3 has 3 bits of mantissa and reaches 448 (Micikevicius et al., 2022, "FP8 formats for deep learning"): a row's
largest magnitude becomes that, so numbers within 2^14 of it are off by 1 part in 16 at most.
A row that is not finite stays so: its scale or its numbers are NaN or infinite.

Shapes: R rows, I width.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt_oss_lite.model.kernels.launch import check_contiguous, next_power_of_2

E4M3 = torch.float8_e4m3fn
TILE = 4096


class Rows(NamedTuple):
    """Rows of one side of a product, and in 8 bits where the product takes them so: eight * scale is x, rounded."""

    x_RI: Tensor
    eight_RI: Tensor | None = None
    scale_R: Tensor | None = None
    """fp32."""

    @classmethod
    def empty(cls, n_rows: int, width: int, like: Tensor, eight_bits: torch.dtype | None) -> "Rows":
        """Memory for so many rows in a tensor's dtype, and in `eight_bits` besides; None: not."""
        x_RI = like.new_empty(n_rows, width)
        if eight_bits is None:
            return cls(x_RI)
        eight_RI = like.new_empty(n_rows, width, dtype=eight_bits)
        return cls(x_RI, eight_RI, like.new_empty(n_rows, dtype=torch.float32))

    def in_eight_bits(self) -> tuple[Tensor, Tensor]:
        """The 8-bit form and its scales, of rows that have one."""
        assert self.eight_RI is not None
        assert self.scale_R is not None
        return self.eight_RI, self.scale_R


def rows_of_a_tile(width: int) -> int:
    """Rows that a program holds whole, so that it sees their largest magnitude."""
    return max(TILE // next_power_of_2(width), 1)


@triton.jit
def largest_magnitude(x):
    """Of each row of a tile; 1e-12 where all is zero."""
    return tl.maximum(tl.max(tl.abs(x), axis=1), 1e-12)


@triton.jit
def store_eight_bits(x, largest, eight_ptrs, mask):
    """Write rows whose largest magnitude is `largest` so that it becomes 448."""
    tl.store(eight_ptrs, (x * (448.0 / largest)[:, None]).to(eight_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def store_scales(largest, scale_ptrs, in_rows):
    """Write what 8-bit rows are to be multiplied by."""
    tl.store(scale_ptrs, largest / 448.0, mask=in_rows)


@triton.jit
def _to_eight_bits(x_ptr, eight_ptr, scale_ptr, n_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    in_rows = rows < n_rows
    mask = in_rows[:, None] & (cols[None, :] < WIDTH)
    offsets = rows[:, None].to(tl.int64) * WIDTH + cols[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    largest = largest_magnitude(x)
    store_eight_bits(x, largest, eight_ptr + offsets, mask)
    store_scales(largest, scale_ptr + rows, in_rows)


def to_eight_bits(x_RI: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """Rows in `dtype`, and their scales (R,) fp32."""
    check_contiguous(x_RI)
    n_rows, width = x_RI.shape
    eight_RI = torch.empty_like(x_RI, dtype=dtype)
    scale_R = x_RI.new_empty(n_rows, dtype=torch.float32)
    rows = rows_of_a_tile(width)
    _to_eight_bits[(triton.cdiv(n_rows, rows),)](
        x_RI, eight_RI, scale_R, n_rows, WIDTH=width, ROWS=rows, COLS=next_power_of_2(width)
    )
    return eight_RI, scale_R
