"""A matrix times a factor, rounded once: PyTorch rounds a factor without dimensions to the matrix's dtype first.

Shapes: N rows, D width.
"""

from importlib.util import find_spec

import torch
from torch import Tensor


def times(x_ND: Tensor, factor: Tensor, out: Tensor | None = None) -> Tensor:
    """x times a factor for each row (N,), or one for all, computed in the wider dtype and rounded once.

    Args:
        out: takes the result, in its dtype, 8-bit floats included; None: a new matrix in x's.
    """
    out = torch.empty_like(x_ND) if out is None else out
    in_fp32 = torch.promote_types(x_ND.dtype, factor.dtype) == torch.float32
    contiguous = x_ND.is_contiguous() and factor.is_contiguous() and out.is_contiguous()
    if x_ND.is_cuda and in_fp32 and contiguous and find_spec("triton") is not None:
        from gpt_oss_lite.model.kernels.scale import scaled

        scaled(x_ND, factor, out)
        return out
    return torch.mul(x_ND, factor.reshape(-1, 1), out=out)
