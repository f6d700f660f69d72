"""Figures of a step that the host reads a few steps later, when they have long arrived, so that it never waits."""

from typing import Any

import torch
from torch import Tensor

LAG_STEPS = 2
"""Steps between making a figure and reading it."""


class HostCopy:
    """A small tensor on its way from the device to the host.

    Args:
        tensor: on any device.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def tolist(self) -> Any:
        """The values, waited for if they are still under way."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.tolist()
