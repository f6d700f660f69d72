"""RMSNorm, router and top-K in one pass over the tokens; and the whole backward pass of what enters the experts.

Logits are fp32 dot products of the normalised activation, rounded to its dtype first, as the experts see it. Ties
go to the lowest expert number, so recomputation routes alike. Weights are the chosen probabilities over their sum.

Shapes: N tokens, D width, E experts, K experts per token, P programs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt_oss_lite.model.kernels.launch import check_contiguous, next_power_of_2, persistent_programs

ROWS = 4
WARPS = 4
WARPS_BACKWARD = 8


class Routing(NamedTuple):
    """What the router decided, with the sums that the losses and the log need."""

    h_ND: Tensor
    """Normalised activations, in x's dtype."""
    rstd_N: Tensor
    """1 / rms of each token, fp32."""
    probs_NE: Tensor
    """Softmax of the logits, fp32."""
    lse_N: Tensor
    """Log-sum-exp of the logits, fp32."""
    expert_NK: Tensor
    """Chosen experts, int32."""
    weight_NK: Tensor
    """Their weights, fp32, sum 1."""
    prob_sum_E: Tensor
    """Sum of probs over the tokens, fp32."""
    entropy_sum: Tensor
    """Sum of the tokens' entropies in nats, fp32."""
    squared_lse_sum: Tensor
    """Sum of the squared log-sum-exps, fp32."""


@triton.jit
def _norm_and_route(
    x_ptr, gain_ptr, router_ptr, bias_ptr, h_ptr, rstd_ptr, probs_ptr, lse_ptr, expert_ptr, weight_ptr, sums_ptr,
    n_rows, eps, D: tl.constexpr, E: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    experts = tl.arange(0, EXPERTS)
    row_mask = rows < n_rows
    mask = row_mask[:, None] & (cols[None, :] < D)
    offsets = rows[:, None].to(tl.int64) * D + cols[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)
    gain = tl.load(gain_ptr + cols, mask=cols < D, other=0.0)
    h_rounded = (x * rstd[:, None] * gain[None, :]).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + offsets, h_rounded, mask=mask)
    tl.store(rstd_ptr + rows, rstd, mask=row_mask)

    h = h_rounded.to(tl.float32)
    logits = tl.full([ROWS, EXPERTS], float("-inf"), dtype=tl.float32)
    for e in tl.static_range(E):
        logit = tl.sum(h * tl.load(router_ptr + e * D + cols, mask=cols < D, other=0.0)[None, :], axis=1)
        if HAS_BIAS:
            logit += tl.load(bias_ptr + e)
        logits = tl.where(experts[None, :] == e, logit[:, None], logits)
    top = tl.max(logits, axis=1)
    exps = tl.exp(logits - top[:, None])
    total = tl.sum(exps, axis=1)
    probs = exps / total[:, None]
    lse = top + tl.log(total)
    tl.store(probs_ptr + rows[:, None] * E + experts[None, :], probs, mask=row_mask[:, None] & (experts[None, :] < E))
    tl.store(lse_ptr + rows, lse, mask=row_mask)

    remaining = tl.where(experts[None, :] < E, probs, -1.0)
    chosen = tl.zeros([ROWS], dtype=tl.float32)
    for k in tl.static_range(K):
        best = tl.argmax(remaining, axis=1, tie_break_left=True)
        tl.store(expert_ptr + rows * K + k, best, mask=row_mask)
        chosen += tl.max(remaining, axis=1)
        remaining = tl.where(experts[None, :] == best[:, None], -1.0, remaining)
    remaining = tl.where(experts[None, :] < E, probs, -1.0)
    for k in tl.static_range(K):
        best = tl.argmax(remaining, axis=1, tie_break_left=True)
        tl.store(weight_ptr + rows * K + k, tl.max(remaining, axis=1) / chosen, mask=row_mask)
        remaining = tl.where(experts[None, :] == best[:, None], -1.0, remaining)

    # Sums over this program's tokens: E probabilities, then entropy and squared log-sum-exp.
    counted = tl.where(row_mask[:, None], probs, 0.0)
    sums_row = sums_ptr + tl.program_id(0) * (E + 2)
    tl.store(sums_row + experts, tl.sum(counted, axis=0), mask=experts < E)
    log_probs = tl.where(probs > 0, tl.log(tl.where(probs > 0, probs, 1.0)), 0.0)
    tl.store(sums_row + E, -tl.sum(tl.sum(counted * log_probs, axis=1), axis=0))
    tl.store(sums_row + E + 1, tl.sum(tl.where(row_mask, lse * lse, 0.0), axis=0))


@triton.jit
def _route_backward(
    drows_ptr, dshared_ptr, residual_ptr, x_ptr, rstd_ptr, gain_ptr, router_ptr, probs_ptr, lse_ptr, expert_ptr,
    weight_ptr, row_of_slot_ptr, dweight_ptr, dprob_ptr, dlse_ptr, dx_ptr, dgain_ptr, drouter_ptr, dbias_ptr, n_rows,
    D: tl.constexpr, E: tl.constexpr, K: tl.constexpr, HAS_SHARED: tl.constexpr, COLS: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, COLS)
    experts = tl.arange(0, EXPERTS)
    in_width = cols < D
    in_experts = experts < E
    gain = tl.load(gain_ptr + cols, mask=in_width, other=0.0)
    router = tl.load(
        router_ptr + experts[:, None] * D + cols[None, :], mask=in_experts[:, None] & in_width[None, :], other=0.0
    )
    dprob_common = tl.load(dprob_ptr + experts, mask=in_experts, other=0.0)
    dlse_common = tl.load(dlse_ptr)
    dgain = tl.zeros([COLS], dtype=tl.float32)
    drouter = tl.zeros([EXPERTS, COLS], dtype=tl.float32)
    dbias = tl.zeros([EXPERTS], dtype=tl.float32)
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        # Gradient of the logits: through the renormalised weights, the balancing loss and the z-loss.
        probs = tl.load(probs_ptr + row * E + experts, mask=in_experts, other=0.0)
        chosen = 0.0
        weighted = 0.0
        for k in tl.static_range(K):
            expert = tl.load(expert_ptr + row * K + k)
            dweight = tl.load(dweight_ptr + tl.load(row_of_slot_ptr + row * K + k))
            chosen += tl.sum(tl.where(experts == expert, probs, 0.0), axis=0)
            weighted += dweight * tl.load(weight_ptr + row * K + k)
        dprobs = dprob_common
        for k in tl.static_range(K):
            expert = tl.load(expert_ptr + row * K + k)
            dweight = tl.load(dweight_ptr + tl.load(row_of_slot_ptr + row * K + k))
            dprobs += tl.where(experts == expert, (dweight - weighted) / chosen, 0.0)
        dlogits = probs * (dprobs - tl.sum(probs * dprobs, axis=0) + dlse_common * tl.load(lse_ptr + row))

        # Gradient of the normalised activation: both kinds of experts and the router.
        offsets = tl.cast(row, tl.int64) * D + cols
        dh = tl.sum(dlogits[:, None] * router, axis=0)
        for k in tl.static_range(K):
            source = tl.load(row_of_slot_ptr + row * K + k).to(tl.int64)
            dh += tl.load(drows_ptr + source * D + cols, mask=in_width, other=0.0).to(tl.float32)
        if HAS_SHARED:
            dh += tl.load(dshared_ptr + offsets, mask=in_width, other=0.0).to(tl.float32)

        # Back through the norm, and the residual branch beside it.
        rstd = tl.load(rstd_ptr + row)
        x_hat = tl.load(x_ptr + offsets, mask=in_width, other=0.0).to(tl.float32) * rstd
        h = (x_hat * gain).to(x_ptr.dtype.element_ty).to(tl.float32)
        drouter += dlogits[:, None] * h[None, :]
        dbias += dlogits
        dgain += dh * x_hat
        scaled = dh * gain
        dx = (scaled - x_hat * (tl.sum(scaled * x_hat, axis=0) / D)) * rstd
        dx += tl.load(residual_ptr + offsets, mask=in_width, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=in_width)
    program = tl.program_id(0)
    tl.store(dgain_ptr + program * D + cols, dgain, mask=in_width)
    tl.store(
        drouter_ptr + program * E * D + experts[:, None] * D + cols[None, :], drouter,
        mask=in_experts[:, None] & in_width[None, :],
    )  # fmt: skip
    tl.store(dbias_ptr + program * E + experts, dbias, mask=in_experts)


def norm_and_route(
    x_ND: Tensor, gain_D: Tensor, router_ED: Tensor, bias_E: Tensor | None, eps: float, experts_per_token: int
) -> Routing:
    """Normalise, score and choose. The router's matrix and bias are fp32."""
    check_contiguous(x_ND, gain_D, router_ED)
    (n_tokens, width), n_experts = x_ND.shape, router_ED.shape[0]

    def fp32(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=x_ND.device)

    h_ND, rstd_N, lse_N = torch.empty_like(x_ND), fp32(n_tokens), fp32(n_tokens)
    probs_NE, weight_NK = fp32(n_tokens, n_experts), fp32(n_tokens, experts_per_token)
    expert_NK = torch.empty(n_tokens, experts_per_token, dtype=torch.int32, device=x_ND.device)
    programs = triton.cdiv(n_tokens, ROWS)
    sums_PS = fp32(programs, n_experts + 2)
    _norm_and_route[(programs,)](
        x_ND, gain_D, router_ED, bias_E, h_ND, rstd_N, probs_NE, lse_N, expert_NK, weight_NK, sums_PS, n_tokens, eps,
        D=width, E=n_experts, K=experts_per_token, HAS_BIAS=bias_E is not None,
        ROWS=ROWS, COLS=next_power_of_2(width), EXPERTS=next_power_of_2(n_experts), num_warps=WARPS,
    )  # fmt: skip
    sums_S = sums_PS.sum(0)
    return Routing(
        h_ND,
        rstd_N,
        probs_NE,
        lse_N,
        expert_NK,
        weight_NK,
        sums_S[:n_experts],
        sums_S[n_experts],
        sums_S[n_experts + 1],
    )


def route_backward(
    drows_RD: Tensor, dshared_ND: Tensor | None, residual_ND: Tensor, x_ND: Tensor, gain_D: Tensor, router_ED: Tensor,
    routing: Routing, row_of_slot_NK: Tensor, dweight_R: Tensor, dprob_E: Tensor, dlse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, the gain, the router and its bias.

    Args:
        drows_RD: gradient of the experts' inputs, in the order of the experts. dshared_ND: that of the shared expert's.
        residual_ND: gradient that reaches x around this layer.
        dweight_R: gradient of each row's weight, fp32.
        dprob_E: gradient of every token's probabilities (the balancing loss), fp32.
        dlse: gradient of the log-sum-exp per unit of itself (the z-loss), fp32 scalar.

    Returns:
        dx (N, D) in x's dtype; dgain (D,), drouter (E, D) and dbias (E,) in fp32.
    """
    check_contiguous(drows_RD, residual_ND, x_ND, router_ED)
    (n_tokens, width), n_experts = x_ND.shape, router_ED.shape[0]
    dx_ND = torch.empty_like(x_ND)
    programs = persistent_programs(x_ND.device)
    dgain_PD = torch.empty(programs, width, dtype=torch.float32, device=x_ND.device)
    drouter_PED = torch.empty(programs, n_experts, width, dtype=torch.float32, device=x_ND.device)
    dbias_PE = torch.empty(programs, n_experts, dtype=torch.float32, device=x_ND.device)
    _route_backward[(programs,)](
        drows_RD, dshared_ND, residual_ND, x_ND, routing.rstd_N, gain_D, router_ED, routing.probs_NE, routing.lse_N,
        routing.expert_NK, routing.weight_NK, row_of_slot_NK, dweight_R, dprob_E, dlse, dx_ND, dgain_PD, drouter_PED,
        dbias_PE, n_tokens, D=width, E=n_experts, K=routing.expert_NK.shape[1], HAS_SHARED=dshared_ND is not None,
        COLS=next_power_of_2(width), EXPERTS=next_power_of_2(n_experts), num_warps=WARPS_BACKWARD,
    )  # fmt: skip
    return dx_ND, dgain_PD.sum(0), drouter_PED.sum(0), dbias_PE.sum(0)
