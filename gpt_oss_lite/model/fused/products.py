"""How the experts' rows and matrices are multiplied, by the name in model.moe_dispatch.

In 8 bits, an option: two of a matrix's three products, with the rows of both sides in E4M3 (kernels/eight_bits.py). The
matrices' own gradients stay bf16, since the card multiplies 8-bit floats along rows only, and those would need
transposed copies of all activations. Hopper's fast accumulation keeps some 14 bits of a sum (DeepSeek-AI, 2024,
"DeepSeek-V3 Technical Report"): enough for rows of a model's width, of numbers with 4.

Shapes: R rows, I and O widths, E experts.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gpt_oss_lite.model.kernels.eight_bits import E4M3, Rows, to_eight_bits
from gpt_oss_lite.model.kernels.grouped import triton_grouped_gradient, triton_grouped_product


class Products(NamedTuple):
    """The products of a feed-forward layer."""

    grouped: Callable[[Rows, Tensor, Tensor], Tensor]
    """(R, I) rows sorted by expert, (E, I, O) matrices and offsets (E,) int32 to (R, O)."""
    dense: Callable[[Rows, Tensor], Tensor]
    """(R, I) rows and a matrix (I, O) to (R, O)."""
    gradient: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(R, O) gradients, (R, I) rows and offsets to (E, O, I) fp32, zero for an expert without rows."""
    eight_bits: torch.dtype | None = None
    """8-bit dtype in which the rows are wanted besides."""

    def rows(self, x_RI: Tensor) -> Rows:
        """Rows as these products take them."""
        return Rows(x_RI) if self.eight_bits is None else Rows(x_RI, *to_eight_bits(x_RI, self.eight_bits))


def _torch_product(rows: Rows, w_EIO: Tensor, offsets_E: Tensor) -> Tensor:
    return torch._grouped_mm(rows.x_RI, w_EIO, offs=offsets_E)


def _torch_gradient(dy_RO: Tensor, x_RI: Tensor, offsets_E: Tensor) -> Tensor:
    return torch._grouped_mm(dy_RO.t(), x_RI, offs=offsets_E).float()


def _triton_product(rows: Rows, w_EIO: Tensor, offsets_E: Tensor) -> Tensor:
    return triton_grouped_product(rows.x_RI, w_EIO, offsets_E)


def _dense_product(rows: Rows, w_IO: Tensor) -> Tensor:
    return rows.x_RI @ w_IO


def _eight_bit_product(rows: Rows, w_EIO: Tensor, offsets_E: Tensor) -> Tensor:
    n_experts, inner, outer = w_EIO.shape
    x_RI, scale_R = rows.in_eight_bits()
    w_OI, scale_O = to_eight_bits(w_EIO.transpose(1, 2).reshape(-1, inner))
    return torch._scaled_grouped_mm(
        x_RI, w_OI.view(n_experts, outer, inner).transpose(1, 2), scale_R, scale_O.view(n_experts, outer),
        offs=offsets_E, out_dtype=rows.x_RI.dtype, use_fast_accum=True,
    )  # fmt: skip


def _eight_bit_dense_product(rows: Rows, w_IO: Tensor) -> Tensor:
    x_RI, scale_R = rows.in_eight_bits()
    w_OI, scale_O = to_eight_bits(w_IO.t().contiguous())
    return torch._scaled_mm(
        x_RI, w_OI.t(), scale_R[:, None], scale_O[None, :], out_dtype=rows.x_RI.dtype, use_fast_accum=True
    )


PRODUCTS = {
    "grouped": Products(_torch_product, _dense_product, _torch_gradient),
    "triton_grouped": Products(_triton_product, _dense_product, triton_grouped_gradient),
    "grouped_fp8": Products(_eight_bit_product, _eight_bit_dense_product, _torch_gradient, E4M3),
}
