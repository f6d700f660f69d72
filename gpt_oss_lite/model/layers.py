"""The small parts: matrices and embeddings with their own initialisation, RMSNorm, and the question of the dtype."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Linear):
    """nn.Linear whose matrix starts normal and whose bias starts at zero.

    torch would fill it uniformly first: half a billion random numbers drawn in vain.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, init_std: float, device: str | None = None
    ) -> None:
        self.init_std = init_std  # before the constructor, which calls reset_parameters
        super().__init__(in_features, out_features, bias=bias, device=device)

    def reset_parameters(self) -> None:
        """Draw the matrix anew, and set the bias to zero."""
        if self.weight.is_meta:
            return  # there is nothing to fill, and PyTorch takes its time over it
        nn.init.normal_(self.weight, std=self.init_std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """nn.Embedding with the initialisation of the other matrices."""

    def __init__(self, rows: int, width: int, *, init_std: float) -> None:
        self.init_std = init_std
        super().__init__(rows, width)

    def reset_parameters(self) -> None:
        """Draw the matrix anew."""
        nn.init.normal_(self.weight, std=self.init_std)


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich, 2019): statistics and gain in fp32, activations in their own dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x over its root mean square, times the gain, rounded once to x's dtype."""
        # In x's dtype the gain would be rounded too, and bf16 has no number between 1 and 1.0078.
        wider = x.to(torch.promote_types(x.dtype, self.weight.dtype))
        return F.rms_norm(wider, self.weight.shape, self.weight, self.eps).to(x.dtype)


def compute_dtype(weight: Tensor) -> torch.dtype:
    """The dtype that a product with `weight` runs in: autocast's where autocast is on, else the weight's own."""
    device_type = weight.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return weight.dtype


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Autocast off on x's device: for what must stay in fp32."""
    return nullcontext() if x.device.type == "meta" else torch.autocast(x.device.type, enabled=False)


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32, or as it is where it is wider already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
