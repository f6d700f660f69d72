"""Experts as three grouped products over rows sorted by expert: no loop and no host sync from Hopper on.

For what the fused half does not serve (biases, an fp32 residual stream, torch.compile): nothing here depends on how
many rows an expert gets, so a compiled model is compiled once.

Shapes: T tokens, K experts per token, R = T * K rows, D width, E experts, I and O inner and outer width of a product.
"""

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_oss_lite.model.backends.rows import combine, sort_by_expert
from gpt_oss_lite.model.layers import Linear, compute_dtype, without_autocast
from gpt_oss_lite.model.routing import Routing, count_slots

if TYPE_CHECKING:
    from gpt_oss_lite.model.moe import Expert


def dispatch_experts(x_TD: Tensor, routing: Routing, experts: nn.ModuleList) -> Tensor:
    """As `reference.dispatch_experts`; the experts are ours (`moe.Expert`), and widths are multiples of 8."""
    x_RD, expert_R, order = sort_by_expert(x_TD, routing)
    offsets_E = count_slots(routing.experts_TK, len(experts)).cumsum(0).to(torch.int32)
    first = cast("Expert", experts[0])
    dtype = compute_dtype(first.gate_proj.weight)
    member_RE = (expert_R[:, None] == torch.arange(len(experts), device=x_TD.device)).to(dtype)

    def product(name: str, x_RI: Tensor) -> Tensor:
        layers: list[Linear] = [getattr(expert, name) for expert in experts]
        w_EOI = torch.stack([layer.weight.to(dtype) for layer in layers])
        y_RO = F.grouped_mm(x_RI, w_EOI.transpose(1, 2), offs=offsets_E)
        if layers[0].bias is None:
            return y_RO
        # As a product, since the gradient of indexing adds atomically.
        return y_RO + member_RE @ torch.stack([layer.bias.to(dtype) for layer in layers])

    with without_autocast(x_TD):
        x_RD = x_RD.to(dtype)
        hidden_RF = first.activate(product("gate_proj", x_RD), product("up_proj", x_RD))
        y_RD = product("down_proj", hidden_RF)
    return combine(y_RD, routing, order).to(x_TD.dtype)
