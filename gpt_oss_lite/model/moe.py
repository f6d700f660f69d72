"""Mixture-of-experts feed-forward: router, dispatch to the chosen experts, and one expert that every token uses.

Shapes: B batch, T tokens (B * T of them inside the layer), D width, F expert hidden size.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.model.backends import ExpertsOnRows, select_experts
from gpt_oss_lite.model.backends.rows import dispatch_experts
from gpt_oss_lite.model.layers import Linear, compute_dtype, without_autocast
from gpt_oss_lite.model.routing import AverageLoad, LayerStats, Routing, route, router_logits

DispatchExperts = Callable[[Tensor, Routing, nn.ModuleList, ExpertsOnRows], Tensor]
"""As `rows.dispatch_experts`."""

CLAMP_LIMIT = 7.0
CLAMP_ALPHA = 1.702


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer, 2020)."""
    return F.silu(gate) * up


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """GPT-OSS's form: the gate clamped from above, up from both sides, a steeper sigmoid, and up + 1."""
    gate = gate.clamp(max=CLAMP_LIMIT)
    up = up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
    return gate * torch.sigmoid(CLAMP_ALPHA * gate) * (up + 1)


ACTIVATIONS = {"swiglu": swiglu, "clamped_swiglu": clamped_swiglu}


class Expert(nn.Module):
    """Gated feed-forward D -> F -> D with three matrices."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, hidden = config.d_model, config.expert_hidden_size
        bias, init_std = config.expert_bias, config.init_std
        self.activation = config.expert_activation
        self.gate_proj = Linear(width, hidden, bias=bias, init_std=init_std)
        self.up_proj = Linear(width, hidden, bias=bias, init_std=init_std)
        self.down_proj = Linear(hidden, width, bias=bias, init_std=init_std)

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        """The hidden layer from the outputs of gate and up projection."""
        return ACTIVATIONS[self.activation](gate, up)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to (..., D): gate and up to the hidden width, activation, down."""
        return self.down_proj(self.activate(self.gate_proj(x), self.up_proj(x)))


class MoE(nn.Module):
    """Dropless mixture of experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.moe_dispatch = config.moe_dispatch
        self.average_load: AverageLoad | None = None
        self.dispatch: DispatchExperts | None = None
        """What takes the tokens to experts that other machines hold; None: they are all here."""
        self.router = Linear(config.d_model, config.n_experts, bias=config.router_bias, init_std=config.init_std)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.n_experts))
        self.shared_experts = nn.ModuleList(Expert(config) for _ in range(config.n_shared_experts))

    @property
    def load_to_balance(self) -> AverageLoad | None:
        """`average_load` in training; evaluation, which the ranks do apart, has its own tokens' shares."""
        return self.average_load if self.training else None

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, LayerStats]:
        """Returns (B, T, D) in x's dtype and the router's statistics over the B * T tokens."""
        x_TD = x_BTD.flatten(0, 1)
        with without_autocast(x_TD):
            logits_TE = router_logits(x_TD, self.router.weight, self.router.bias)
            routing, stats = route(logits_TE, self.experts_per_token, self.load_to_balance)
        experts_on_rows = select_experts(self.moe_dispatch, x_TD.device.type, compute_dtype(self.router.weight))
        out_TD = (self.dispatch or dispatch_experts)(x_TD, routing, self.experts, experts_on_rows)
        for expert in self.shared_experts:
            out_TD = out_TD + expert(x_TD)
        return out_TD.view_as(x_BTD), stats
