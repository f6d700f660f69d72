"""The feed-forward half of a block as one autograd function: x + shared(norm(x)) + routed(norm(x)).

Routed experts are two grouped products over rows sorted by expert. A token's weights multiply the hidden activations
(kernels/swiglu.py), so that its experts' outputs only need adding.

Shapes: N tokens, D width, E experts, K experts per token, R = N * K rows, F hidden width of an expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpt_oss_lite.model.fused.attention import matrix_gradient
from gpt_oss_lite.model.fused.products import Products
from gpt_oss_lite.model.fused.weights import joined_copy
from gpt_oss_lite.model.kernels.permute import group_by_expert, sum_rows, tokens_to_rows
from gpt_oss_lite.model.kernels.rms_norm import rms_norm
from gpt_oss_lite.model.kernels.router import (
    Routing,
    choose_backward,
    choose_experts,
    experts_input_backward,
    router_gradient,
)
from gpt_oss_lite.model.kernels.swiglu import swiglu, swiglu_backward
from gpt_oss_lite.model.routing import AverageLoad


@dataclass(frozen=True)
class MoEGeometry:
    """Sizes of a feed-forward layer, and how its rows are multiplied."""

    n_experts: int
    experts_per_token: int
    n_shared_experts: int
    eps: float
    clamped: bool
    products: Products


class FusedMoE(torch.autograd.Function):
    """See `fused_moe`."""

    @staticmethod
    def forward(
        ctx: Any, geometry: MoEGeometry, average_load: AverageLoad | None, x_ND: Tensor, gain_D: Tensor,
        router_ED: Tensor, bias_E: Tensor | None, *matrices: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """x_ND plus its experts' output, balancing loss, z-loss, load by expert and router entropy."""
        gates, ups, downs = _by_kind(matrices)
        n, products = geometry.n_experts, geometry.products
        w_gate_up = joined_copy(list(zip(gates[:n], ups[:n], strict=True)), x_ND.dtype)
        w_down = joined_copy([[down] for down in downs[:n]], x_ND.dtype)

        h_ND, rstd_N = rms_norm(x_ND, gain_D, geometry.eps)
        routing = choose_experts(h_ND, router_ED, bias_E, geometry.experts_per_token)
        row_of_slot_NK, weight_R, offsets_E = group_by_expert(routing.expert_NK, routing.weight_NK, n)
        tokens = products.rows(h_ND)
        rows = tokens_to_rows(tokens, row_of_slot_NK)
        gate_up_R2F = products.grouped(rows, w_gate_up.transpose(1, 2), offsets_E)
        hidden = swiglu(gate_up_R2F, weight_R, geometry.clamped, products.eight_bits)
        out_RD = products.grouped(hidden, w_down.transpose(1, 2), offsets_E)

        shared_ND: Tensor | None = None
        shared: tuple[Tensor, ...] = ()
        if geometry.n_shared_experts:
            w_shared = joined_copy([[gates[n], ups[n]]], x_ND.dtype)[0]
            w_shared_down = downs[n].to(x_ND.dtype)
            shared_gate_up = products.dense(tokens, w_shared.t())
            shared_hidden = swiglu(shared_gate_up, None, geometry.clamped, products.eight_bits)
            shared_ND = products.dense(shared_hidden, w_shared_down.t())
            shared = (shared_gate_up, shared_hidden.x_RI, w_shared, w_shared_down)
        y_ND = sum_rows(out_RD, row_of_slot_NK, x_ND, shared_ND)

        n_tokens = x_ND.shape[0]
        load_E = torch.diff(offsets_E, prepend=offsets_E.new_zeros(1)).float() / routing.expert_NK.numel()
        if average_load is not None:
            load_E = average_load(load_E)
        aux = n * (load_E * routing.sums[:n]).sum() / n_tokens
        entropy, z_loss = routing.sums[n] / n_tokens, routing.sums[n + 1] / n_tokens
        ctx.geometry, ctx.shapes = geometry, (gates[0].shape[0], len(matrices))
        ctx.n_routing = len(routing)
        ctx.has_bias = bias_E is not None
        # Saved, not kept on ctx: what is saved is freed by the backward pass, even if someone still holds an output.
        ctx.save_for_backward(
            x_ND, h_ND, rstd_N, gain_D, router_ED, row_of_slot_NK, weight_R, offsets_E, rows.x_RI, gate_up_R2F,
            hidden.x_RI, load_E, w_gate_up, w_down, *routing, *shared,
        )  # fmt: skip
        ctx.mark_non_differentiable(load_E, entropy)
        return y_ND, aux, z_loss, load_E, entropy

    @staticmethod
    def backward(ctx: Any, dy_ND: Tensor, daux: Tensor, dz: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x_ND, the norm's gain, the router and the experts' matrices, in forward's order."""
        (
            x_ND, h_ND, rstd_N, gain_D, router_ED, row_of_slot_NK, weight_R, offsets_E, rows_RD, gate_up_R2F, hidden_RF,
            load_E, w_gate_up, w_down, *rest,
        ) = ctx.saved_tensors  # fmt: skip
        routing, shared = Routing(*rest[: ctx.n_routing]), rest[ctx.n_routing :]
        geometry, n_tokens = ctx.geometry, x_ND.shape[0]
        products, eight_bits = geometry.products, geometry.products.eight_bits
        dy_ND = dy_ND.contiguous()

        dy = products.rows(dy_ND)
        dy_rows = tokens_to_rows(dy, row_of_slot_NK)
        dhidden_RF = products.grouped(dy_rows, w_down, offsets_E)
        ddown_EDF = products.gradient(dy_rows.x_RI, hidden_RF, offsets_E)
        dgate_up, dweight_R = swiglu_backward(dhidden_RF, gate_up_R2F, weight_R, geometry.clamped, eight_bits)
        drows_RD = products.grouped(dgate_up, w_gate_up, offsets_E)
        dgate_up_E2FD = products.gradient(dgate_up.x_RI, rows_RD, offsets_E)

        dshared_ND = None
        hidden_size = ctx.shapes[0]
        dgates, dups, ddowns = (
            list(dgate_up_E2FD[:, :hidden_size]),
            list(dgate_up_E2FD[:, hidden_size:]),
            list(ddown_EDF),
        )
        if shared:
            shared_gate_up, shared_hidden, w_shared, w_shared_down = shared
            dshared_gate_up, _none = swiglu_backward(
                products.dense(dy, w_shared_down), shared_gate_up, None, geometry.clamped, eight_bits
            )
            ddowns.append(matrix_gradient(dy_ND, shared_hidden))
            dshared = matrix_gradient(dshared_gate_up.x_RI, h_ND)
            dgates.append(dshared[:hidden_size])
            dups.append(dshared[hidden_size:])
            dshared_ND = products.dense(dshared_gate_up, w_shared)

        assert dweight_R is not None
        dprob_E, dlse = daux * geometry.n_experts * load_E / n_tokens, dz * 2.0 / n_tokens
        dlogits_NE = choose_backward(routing, row_of_slot_NK, dweight_R, dprob_E, dlse)
        dx_ND, dgain_D = experts_input_backward(
            drows_RD, dshared_ND, dlogits_NE, dy_ND, x_ND, gain_D, rstd_N, router_ED, row_of_slot_NK
        )
        dbias_E = dlogits_NE.sum(0) if ctx.has_bias else None
        return None, None, dx_ND, dgain_D, router_gradient(dlogits_NE, h_ND), dbias_E, *dgates, *dups, *ddowns


def _by_kind(matrices: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    """Gate, up and down matrices, each of the routed experts and then the shared one."""
    third = len(matrices) // 3
    return matrices[:third], matrices[third : 2 * third], matrices[2 * third :]


def fused_moe(
    x_BTD: Tensor, geometry: MoEGeometry, gain_D: Tensor, router_ED: Tensor, bias_E: Tensor | None,
    gates: Sequence[Tensor], ups: Sequence[Tensor], downs: Sequence[Tensor], average_load: AverageLoad | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """x + shared expert + weighted sum of the top-K routed experts, all of rms_norm(x).

    Args:
        x_BTD: residual stream in the compute dtype.
        gates, ups, downs: the experts' fp32 parameters in nn.Linear's layout, the routed ones and then the shared one.
        average_load: see `routing.route`.

    Returns:
        (B, T, D) in x's dtype; balancing loss and z-loss, fp32 scalars; expert load (E,) that sums to 1 and mean
        entropy of the router in nats, without gradients.
    """
    out_ND, aux, z_loss, load_E, entropy = FusedMoE.apply(
        geometry, average_load, x_BTD.reshape(-1, x_BTD.shape[-1]), gain_D, router_ED, bias_E, *gates, *ups, *downs
    )
    return out_ND.view_as(x_BTD), aux, z_loss, load_E, entropy
