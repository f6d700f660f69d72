"""From router logits to chosen experts and back; and the backward pass of what enters the experts.

The logits are fp32 products on tensor cores without TF32: a normalised activation is bf16 already, so splitting the
fp32 router into three bf16 terms keeps every bit of both (24 = 3 x 8 bits), and the products are added in fp32. Ties go
to the lowest expert number, so recomputation routes alike. Weights are the chosen probabilities over their sum.

Shapes: N tokens, D width, E experts, K experts per token, S terms, P programs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt_oss_lite.model.kernels.launch import check_contiguous, next_power_of_2, persistent_programs

ROWS = 64
ROWS_BACKWARD = 2
WARPS_BACKWARD = 1
PROGRAMS_BACKWARD = 8


class Routing(NamedTuple):
    """What the router decided, with the sums that the losses and the log need."""

    probs_NE: Tensor
    """Softmax of the logits, fp32."""
    lse_N: Tensor
    """Log-sum-exp of the logits, fp32."""
    expert_NK: Tensor
    """Chosen experts, int32."""
    weight_NK: Tensor
    """Their weights, fp32, sum 1."""
    sums: Tensor
    """Over the tokens, fp32: E sums of probabilities, the entropies in nats, the squared log-sum-exps."""


def split_terms(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An fp32 matrix (E, D) as a sum of S matrices of `dtype`, stacked to (S * E, D): 3 for bf16, 1 for fp32."""
    if dtype == torch.float32:
        return x
    terms = []
    for _ in range(3):
        terms.append(x.to(dtype))
        x = x - terms[-1].float()
    return torch.cat(terms)


@triton.jit
def _choose(
    logits_ptr, bias_ptr, probs_ptr, lse_ptr, expert_ptr, weight_ptr, sums_ptr, n_rows,
    E: tl.constexpr, K: tl.constexpr, S: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    experts = tl.arange(0, EXPERTS)
    row_mask = rows < n_rows
    mask = row_mask[:, None] & (experts[None, :] < E)
    logits = tl.zeros([ROWS, EXPERTS], dtype=tl.float32)
    # The smallest terms first.
    for back in tl.static_range(S):
        term = (S - 1 - back) * E
        logits += tl.load(logits_ptr + rows[:, None] * S * E + term + experts[None, :], mask=mask, other=0.0)
    if HAS_BIAS:
        logits += tl.load(bias_ptr + experts, mask=experts < E, other=0.0)[None, :]
    logits = tl.where(experts[None, :] < E, logits, float("-inf"))
    top = tl.max(logits, axis=1)
    exps = tl.exp(logits - top[:, None])
    total = tl.sum(exps, axis=1)
    probs = exps / total[:, None]
    lse = top + tl.log(total)
    tl.store(probs_ptr + rows[:, None] * E + experts[None, :], probs, mask=mask)
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

    # Sums over this program's tokens.
    counted = tl.where(row_mask[:, None], probs, 0.0)
    sums_row = sums_ptr + tl.program_id(0) * (E + 2)
    tl.store(sums_row + experts, tl.sum(counted, axis=0), mask=experts < E)
    log_probs = tl.where(probs > 0, tl.log(tl.where(probs > 0, probs, 1.0)), 0.0)
    tl.store(sums_row + E, -tl.sum(tl.sum(counted * log_probs, axis=1), axis=0))
    tl.store(sums_row + E + 1, tl.sum(tl.where(row_mask, lse * lse, 0.0), axis=0))


@triton.jit
def _choose_backward(
    probs_ptr, lse_ptr, expert_ptr, weight_ptr, row_of_slot_ptr, dweight_ptr, dprob_ptr, dlse_ptr, dlogits_ptr, n_rows,
    E: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    experts = tl.arange(0, EXPERTS)
    row_mask = rows < n_rows
    mask = row_mask[:, None] & (experts[None, :] < E)
    probs = tl.load(probs_ptr + rows[:, None] * E + experts[None, :], mask=mask, other=0.0)
    # w_k = p_k / chosen, so dp_k = (dw_k - sum_j dw_j w_j) / chosen.
    chosen = tl.zeros([ROWS], dtype=tl.float32)
    weighted = tl.zeros([ROWS], dtype=tl.float32)
    for k in tl.static_range(K):
        expert = tl.load(expert_ptr + rows * K + k, mask=row_mask, other=0)
        dweight = tl.load(dweight_ptr + tl.load(row_of_slot_ptr + rows * K + k, mask=row_mask, other=0))
        chosen += tl.sum(tl.where(experts[None, :] == expert[:, None], probs, 0.0), axis=1)
        weighted += dweight * tl.load(weight_ptr + rows * K + k, mask=row_mask, other=0.0)
    chosen = tl.where(row_mask, chosen, 1.0)
    dprobs = tl.zeros([ROWS, EXPERTS], dtype=tl.float32)
    dprobs += tl.load(dprob_ptr + experts, mask=experts < E, other=0.0)[None, :]
    for k in tl.static_range(K):
        expert = tl.load(expert_ptr + rows * K + k, mask=row_mask, other=0)
        dweight = tl.load(dweight_ptr + tl.load(row_of_slot_ptr + rows * K + k, mask=row_mask, other=0))
        dprobs += tl.where(experts[None, :] == expert[:, None], ((dweight - weighted) / chosen)[:, None], 0.0)
    dlse = tl.load(dlse_ptr) * tl.load(lse_ptr + rows, mask=row_mask, other=0.0)
    dlogits = probs * (dprobs - tl.sum(probs * dprobs, axis=1)[:, None] + dlse[:, None])
    tl.store(dlogits_ptr + rows[:, None] * E + experts[None, :], dlogits, mask=mask)


@triton.jit
def _experts_input_backward(
    drows_ptr, dshared_ptr, residual_ptr, x_ptr, rstd_ptr, gain_ptr, router_ptr, dlogits_ptr, row_of_slot_ptr, dx_ptr,
    dgain_ptr, n_rows, D: tl.constexpr, E: tl.constexpr, K: tl.constexpr, HAS_SHARED: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, COLS)
    in_width = cols < D
    gain = tl.load(gain_ptr + cols, mask=in_width, other=0.0)
    dgain = tl.zeros([COLS], dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        row_mask = rows < n_rows
        mask = row_mask[:, None] & in_width[None, :]
        offsets = rows[:, None].to(tl.int64) * D + cols[None, :]
        dh = tl.zeros([ROWS, COLS], dtype=tl.float32)
        for k in tl.static_range(K):
            source = tl.load(row_of_slot_ptr + rows * K + k, mask=row_mask, other=0).to(tl.int64)
            dh += tl.load(drows_ptr + source[:, None] * D + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_SHARED:
            dh += tl.load(dshared_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        for e in tl.static_range(E):
            dlogit = tl.load(dlogits_ptr + rows * E + e, mask=row_mask, other=0.0)
            dh += dlogit[:, None] * tl.load(router_ptr + e * D + cols, mask=in_width, other=0.0)[None, :]
        rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)
        x_hat = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * rstd[:, None]
        dgain += tl.sum(dh * x_hat, axis=0)
        scaled = dh * gain[None, :]
        dx = (scaled - x_hat * (tl.sum(scaled * x_hat, axis=1) / D)[:, None]) * rstd[:, None]
        dx += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dgain_ptr + tl.program_id(0) * D + cols, dgain, mask=in_width)


def choose_experts(h_ND: Tensor, router_ED: Tensor, bias_E: Tensor | None, experts_per_token: int) -> Routing:
    """Score the normalised activations and choose. The router's matrix and bias are fp32."""
    check_contiguous(h_ND, router_ED)
    n_tokens, n_experts = h_ND.shape[0], router_ED.shape[0]
    terms = split_terms(router_ED, h_ND.dtype)
    logits_NS = torch.mm(h_ND, terms.t(), out_dtype=torch.float32) if h_ND.is_cuda else h_ND @ terms.t()

    def fp32(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=h_ND.device)

    probs_NE, lse_N, weight_NK = fp32(n_tokens, n_experts), fp32(n_tokens), fp32(n_tokens, experts_per_token)
    expert_NK = torch.empty(n_tokens, experts_per_token, dtype=torch.int32, device=h_ND.device)
    programs = triton.cdiv(n_tokens, ROWS)
    sums_PS = fp32(programs, n_experts + 2)
    _choose[(programs,)](
        logits_NS, bias_E, probs_NE, lse_N, expert_NK, weight_NK, sums_PS, n_tokens,
        E=n_experts, K=experts_per_token, S=len(terms) // n_experts, HAS_BIAS=bias_E is not None,
        ROWS=ROWS, EXPERTS=next_power_of_2(n_experts),
    )  # fmt: skip
    return Routing(probs_NE, lse_N, expert_NK, weight_NK, sums_PS.sum(0))


def choose_backward(
    routing: Routing, row_of_slot_NK: Tensor, dweight_R: Tensor, dprob_E: Tensor, dlse: Tensor
) -> Tensor:
    """Gradient of the logits (N, E) fp32.

    Args:
        dweight_R: gradient of each row's weight, fp32.
        dprob_E: gradient of every token's probabilities (the balancing loss), fp32.
        dlse: gradient of the log-sum-exp per unit of itself (the z-loss), fp32 scalar.
    """
    n_tokens, n_experts = routing.probs_NE.shape
    dlogits_NE = torch.empty_like(routing.probs_NE)
    _choose_backward[(triton.cdiv(n_tokens, ROWS),)](
        routing.probs_NE, routing.lse_N, routing.expert_NK, routing.weight_NK, row_of_slot_NK, dweight_R, dprob_E, dlse,
        dlogits_NE, n_tokens,
        E=n_experts, K=routing.expert_NK.shape[1], ROWS=ROWS, EXPERTS=next_power_of_2(n_experts),
    )  # fmt: skip
    return dlogits_NE


def router_gradient(dlogits_NE: Tensor, h_ND: Tensor) -> Tensor:
    """Gradient of the router's matrix (E, D) fp32, from fp32 products like the logits."""
    terms = split_terms(dlogits_NE.t(), h_ND.dtype)
    if h_ND.is_cuda and h_ND.dtype != torch.float32:
        return torch.mm(terms, h_ND, out_dtype=torch.float32).view(-1, dlogits_NE.shape[1], h_ND.shape[1]).sum(0)
    return terms @ h_ND


def experts_input_backward(
    drows_RD: Tensor, dshared_ND: Tensor | None, dlogits_NE: Tensor, residual_ND: Tensor, x_ND: Tensor, gain_D: Tensor,
    rstd_N: Tensor, router_ED: Tensor, row_of_slot_NK: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x, which reach it through routed experts, shared expert, router and norm, and of the gain.

    Args:
        drows_RD: gradient of the routed experts' inputs, in the order of the experts.
        dshared_ND: that of the shared expert's; None: there is none.
        residual_ND: gradient that reaches x around this layer.

    Returns:
        dx (N, D) in x's dtype and dgain (D,) fp32.
    """
    check_contiguous(drows_RD, dlogits_NE, residual_ND, x_ND, router_ED)
    (n_tokens, width), n_experts = x_ND.shape, router_ED.shape[0]
    dx_ND = torch.empty_like(x_ND)
    programs = persistent_programs(x_ND.device, PROGRAMS_BACKWARD)
    dgain_PD = torch.empty(programs, width, dtype=torch.float32, device=x_ND.device)
    _experts_input_backward[(programs,)](
        drows_RD, dshared_ND, residual_ND, x_ND, rstd_N, gain_D, router_ED, dlogits_NE, row_of_slot_NK, dx_ND, dgain_PD,
        n_tokens, D=width, E=n_experts, K=row_of_slot_NK.shape[1], HAS_SHARED=dshared_ND is not None,
        ROWS=ROWS_BACKWARD, COLS=next_power_of_2(width), num_warps=WARPS_BACKWARD,
    )  # fmt: skip
    return dx_ND, dgain_PD.sum(0)
