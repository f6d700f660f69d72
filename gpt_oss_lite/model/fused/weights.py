"""Copies of parameters in the compute dtype, joined so that several products become one.

The masters stay single fp32 parameters, named one by one. Their copies are refreshed when a parameter has changed,
which is once a step, not once a micro-batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class JoinedWeight:
    """Several matrices of equal width in one tensor, in the compute dtype."""

    def __init__(self, stacked: bool = False) -> None:
        """Args: stacked: join along a new first dimension, one entry per group of matrices, not along the rows."""
        self._stacked = stacked
        self._joined: Tensor | None = None
        self._seen: tuple[tuple[int, int], ...] = ()

    def get(self, groups: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> Tensor:
        """The joined copy.

        Args:
            groups: matrices (rows, width). Those of a group are joined along the rows.

        Returns:
            (groups, rows, width) when stacked, (rows, width) with a single group otherwise.
        """
        parameters = [matrix for group in groups for matrix in group]
        seen = tuple((parameter._version, parameter.data_ptr()) for parameter in parameters)
        first = parameters[0]
        stale = self._joined is None or self._joined.dtype != dtype or self._joined.device != first.device
        if stale:
            rows = sum(matrix.shape[0] for matrix in groups[0])
            self._joined = first.new_empty(len(groups), rows, first.shape[1], dtype=dtype)
        assert self._joined is not None
        if stale or seen != self._seen:
            with torch.no_grad():
                parts = [
                    part for group, joined in zip(groups, self._joined, strict=True) for part in split(joined, group)
                ]
                torch._foreach_copy_(parts, [parameter.detach() for parameter in parameters])
            self._seen = seen
        return self._joined if self._stacked else self._joined[0]


def split(joined: Tensor, group: Sequence[Tensor]) -> list[Tensor]:
    """Views of a joined matrix (or its gradient), one for each matrix of the group."""
    return list(joined.split([matrix.shape[0] for matrix in group]))
