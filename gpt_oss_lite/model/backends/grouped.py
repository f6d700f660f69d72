"""Experts as three grouped products over rows sorted by expert: no loop and no host sync from Hopper on.

For what the fused half does not serve (biases, an fp32 residual stream, torch.compile): nothing here depends on how
many rows an expert gets, so a compiled model is compiled once.

Shapes: R rows, D width, E experts, I and O inner and outer width of a product.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_oss_lite.model.layers import Linear, compute_dtype, without_autocast

if TYPE_CHECKING:
    from gpt_oss_lite.model.moe import Expert


def experts_on_rows(x_RD: Tensor, expert_R: Tensor, rows_E: Tensor, experts: Sequence[nn.Module]) -> Tensor:
    """As `reference.experts_on_rows`; the experts are ours (`moe.Expert`), and widths are multiples of 8."""
    offsets_E = rows_E.cumsum(0).to(torch.int32)
    first = cast("Expert", experts[0])
    dtype = compute_dtype(first.gate_proj.weight)
    member_RE = (expert_R[:, None] == torch.arange(len(experts), device=x_RD.device)).to(dtype)

    def product(name: str, x_RI: Tensor) -> Tensor:
        layers: list[Linear] = [getattr(expert, name) for expert in experts]
        w_EOI = torch.stack([layer.weight.to(dtype) for layer in layers])
        y_RO = F.grouped_mm(x_RI, w_EOI.transpose(1, 2), offs=offsets_E)
        if layers[0].bias is None:
            return y_RO
        # As a product, since the gradient of indexing adds atomically.
        return y_RO + member_RE @ torch.stack([layer.bias.to(dtype) for layer in layers])

    with without_autocast(x_RD):
        x_RD = x_RD.to(dtype)
        hidden_RF = first.activate(product("gate_proj", x_RD), product("up_proj", x_RD))
        return product("down_proj", hidden_RF)
