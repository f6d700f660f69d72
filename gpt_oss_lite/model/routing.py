"""The router: which experts a token uses, with what weights, and how evenly they are used.

Top-k of E with renormalised weights as in Mixtral (Jiang et al., 2024); load-balancing loss of the Switch Transformer
(Fedus et al., 2021, eq. 4) over token-slots; router z-loss of ST-MoE (Zoph et al., 2022, eq. 5). No token is dropped.

Shapes: T tokens of the micro-batch, D width, E experts, K experts per token.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """Where the tokens go."""

    experts_TK: Tensor
    """Chosen experts, int64, best first."""
    weights_TK: Tensor
    """Their weights, at least fp32, positive, summing to 1 over K."""


class LayerStats(NamedTuple):
    """What one layer's router did with a micro-batch; the losses carry gradients, the rest does not."""

    aux: Tensor
    """Load-balancing loss, scalar; 1.0 when every expert gets the same share."""
    z_loss: Tensor
    """mean(logsumexp(logits)^2), scalar."""
    expert_load_E: Tensor
    """Share of the token-slots that each expert got; sums to 1."""
    entropy: Tensor
    """Mean entropy of the router's probabilities in nats, scalar."""


@torch.library.custom_op("gpt_oss_lite::fp32_linear", mutates_args=())
def fp32_linear(x_TD: Tensor, w_ED: Tensor) -> Tensor:
    """x @ w.T with full fp32 products, in the backward pass too, whatever `torch.set_float32_matmul_precision` allows.

    TF32 keeps 10 bits of the mantissa: near-ties between experts are then decided by rounding. It is an operator of its
    own because the switch is global, and neither autograd nor torch.compile would keep it where it is set.
    """
    with _FullPrecision():
        return x_TD @ w_ED.T


@fp32_linear.register_fake
def _(x_TD: Tensor, w_ED: Tensor) -> Tensor:
    return x_TD.new_empty(x_TD.shape[0], w_ED.shape[0])


@torch.library.custom_op("gpt_oss_lite::fp32_linear_backward", mutates_args=())
def _fp32_linear_backward(grad_TE: Tensor, x_TD: Tensor, w_ED: Tensor) -> tuple[Tensor, Tensor]:
    with _FullPrecision():
        return grad_TE @ w_ED, grad_TE.T @ x_TD


@_fp32_linear_backward.register_fake
def _(grad_TE: Tensor, x_TD: Tensor, w_ED: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_TD), torch.empty_like(w_ED)


def _save_inputs(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


fp32_linear.register_autograd(
    lambda ctx, grad_TE: _fp32_linear_backward(grad_TE, *ctx.saved_tensors), setup_context=_save_inputs
)


class _FullPrecision:
    """fp32 products at full precision while the block runs."""

    def __enter__(self) -> None:
        self._before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")

    def __exit__(self, *exception: object) -> None:
        torch.set_float32_matmul_precision(self._before)


AverageLoad = Callable[[Tensor], Tensor]
"""Expert shares (E,) of these tokens to those that the load-balancing loss uses, e.g. the mean over several
machines."""


def route(
    logits_TE: Tensor, experts_per_token: int, average_load: AverageLoad | None = None
) -> tuple[Routing, LayerStats]:
    """Choose experts for each token.

    Args:
        logits_TE: router logits, at least fp32: bf16 logits tie often enough to change which expert is chosen.
        experts_per_token: K.
        average_load: where the load-balancing loss takes other shares than these tokens'; None: theirs.

    Returns:
        The routing and its statistics. Equal logits go to the expert with the lower number, on every device and again
        when a checkpointed block is recomputed.
    """
    assert logits_TE.dtype in (torch.float32, torch.float64)
    # A stable sort, since topk leaves the order of ties open.
    sorted_TE, order_TE = logits_TE.sort(dim=-1, descending=True, stable=True)
    experts_TK = order_TE[:, :experts_per_token]
    # The softmax of the chosen logits is the renormalised softmax of all, without the division of small numbers.
    routing = Routing(experts_TK, sorted_TE[:, :experts_per_token].softmax(dim=-1))
    return routing, _statistics(logits_TE, experts_TK, average_load)


def _statistics(logits_TE: Tensor, experts_TK: Tensor, average_load: AverageLoad | None) -> LayerStats:
    n_experts = logits_TE.shape[-1]
    probs_TE = logits_TE.softmax(dim=-1)
    with torch.no_grad():
        expert_load_E = count_slots(experts_TK, n_experts).to(logits_TE.dtype) / experts_TK.numel()
        if average_load is not None:
            expert_load_E = average_load(expert_load_E)
        entropy = torch.special.entr(probs_TE).sum(dim=-1).mean()
    aux = n_experts * (expert_load_E * probs_TE.mean(dim=0)).sum()
    z_loss = logits_TE.logsumexp(dim=-1).square().mean()
    return LayerStats(aux, z_loss, expert_load_E, entropy)


def count_slots(experts_TK: Tensor, n_experts: int) -> Tensor:
    """Token-slots of each expert, (E,) int64, without atomic additions (bincount uses them on CUDA)."""
    numbers_E = torch.arange(n_experts, device=experts_TK.device)
    return (experts_TK.reshape(-1, 1) == numbers_E).sum(dim=0)


def router_logits(x_TD: Tensor, w_ED: Tensor, bias_E: Tensor | None) -> Tensor:
    """Logits (T, E) in fp32 (fp64 where x is), never TF32."""
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    logits_TE = fp32_linear(x_TD.to(dtype), w_ED.to(dtype))
    return logits_TE if bias_E is None else logits_TE + bias_E.to(dtype)
