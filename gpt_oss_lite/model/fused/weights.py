"""Copies of parameters in the compute dtype, joined so that several products become one.

The masters stay single fp32 parameters, named one by one. A copy is made in every forward pass: keeping it until a
parameter's version counter moves would save 0.6 ms, and be wrong, since PyTorch's fused optimizers do not move it.
Copies are saved for the backward pass as activations are, so that recomputing drops them too.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def joined_copy(groups: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> Tensor:
    """Matrices side by side, in another dtype.

    Args:
        groups: matrices (rows, width). Those of a group are joined along the rows; all groups have as many.

    Returns:
        (groups, rows, width).
    """
    first, rows = groups[0][0], sum(matrix.shape[0] for matrix in groups[0])
    joined = first.new_empty(len(groups), rows, first.shape[1], dtype=dtype)
    parts = [part for group, whole in zip(groups, joined, strict=True) for part in split(whole, group)]
    torch._foreach_copy_(parts, [matrix.detach() for group in groups for matrix in group])
    return joined


def split(joined: Tensor, group: Sequence[Tensor]) -> list[Tensor]:
    """Views of a joined matrix (or its gradient), one for each matrix of the group."""
    return list(joined.split([matrix.shape[0] for matrix in group]))
