"""Tokens to experts and back, without a host sync, a sort or an atomic: a counting sort with fixed shapes.

With top-K of E and no token dropped there are always R = N * K rows, so nothing depends on how tokens are routed.

Shapes: N tokens, K experts per token, E experts, R = N * K rows in the order of the experts, D width, G groups.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt_oss_lite.model.kernels.eight_bits import Rows
from gpt_oss_lite.model.kernels.launch import check_contiguous, next_power_of_2

SLOTS = 1024
ROWS = 4


@triton.jit
def _count(expert_ptr, counts_ptr, n_slots, E: tl.constexpr, SLOTS: tl.constexpr):
    slots = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    expert = tl.load(expert_ptr + slots, mask=slots < n_slots, other=E)
    for e in tl.static_range(E):
        tl.store(counts_ptr + tl.program_id(0) * E + e, tl.sum((expert == e).to(tl.int32), axis=0))


@triton.jit
def _place(
    expert_ptr, weight_ptr, counts_ptr, row_of_slot_ptr, weight_of_row_ptr, offsets_ptr, n_slots, n_groups,
    E: tl.constexpr, SLOTS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    groups = tl.arange(0, GROUPS)
    slots = group * SLOTS + tl.arange(0, SLOTS)
    expert = tl.load(expert_ptr + slots, mask=slots < n_slots, other=E)
    weight = tl.load(weight_ptr + slots, mask=slots < n_slots, other=0.0)
    row = tl.zeros([SLOTS], dtype=tl.int32)
    start = 0
    for e in tl.static_range(E):
        counts = tl.load(counts_ptr + groups * E + e, mask=groups < n_groups, other=0)
        before = tl.sum(tl.where(groups < group, counts, 0), axis=0)
        mine = (expert == e).to(tl.int32)
        rank = tl.cumsum(mine, axis=0) - mine
        row = tl.where(expert == e, start + before + rank, row)
        start += tl.sum(counts, axis=0)
        if group == 0:
            tl.store(offsets_ptr + e, start)
    tl.store(row_of_slot_ptr + slots, row, mask=slots < n_slots)
    tl.store(weight_of_row_ptr + row, weight, mask=slots < n_slots)


@triton.jit
def _to_rows(
    x_ptr, eight_ptr, scale_ptr, row_of_slot_ptr, rows_ptr, eight_rows_ptr, scale_rows_ptr, n_tokens,
    D: tl.constexpr, K: tl.constexpr, EIGHT_BITS: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    cols = tl.arange(0, COLS)
    in_tokens = tokens < n_tokens
    mask = in_tokens[:, None] & (cols[None, :] < D)
    offsets = tokens[:, None].to(tl.int64) * D + cols[None, :]
    x = tl.load(x_ptr + offsets, mask=mask)
    if EIGHT_BITS:
        eight = tl.load(eight_ptr + offsets, mask=mask)
        scale = tl.load(scale_ptr + tokens, mask=in_tokens)
    for k in tl.static_range(K):
        row = tl.load(row_of_slot_ptr + tokens * K + k, mask=in_tokens, other=0).to(tl.int64)
        tl.store(rows_ptr + row[:, None] * D + cols[None, :], x, mask=mask)
        if EIGHT_BITS:
            tl.store(eight_rows_ptr + row[:, None] * D + cols[None, :], eight, mask=mask)
            tl.store(scale_rows_ptr + row, scale, mask=in_tokens)


@triton.jit
def _sum_rows(
    rows_ptr, row_of_slot_ptr, x_ptr, shared_ptr, out_ptr, n_tokens,
    D: tl.constexpr, K: tl.constexpr, HAS_SHARED: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    cols = tl.arange(0, COLS)
    mask = (tokens[:, None] < n_tokens) & (cols[None, :] < D)
    offsets = tokens[:, None].to(tl.int64) * D + cols[None, :]
    total = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_SHARED:
        total += tl.load(shared_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_of_slot_ptr + tokens * K + k, mask=tokens < n_tokens, other=0).to(tl.int64)
        total += tl.load(rows_ptr + row[:, None] * D + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)


def group_by_expert(expert_NK: Tensor, weight_NK: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the token-slots by expert, stably.

    Args:
        expert_NK: expert of each slot, int32. weight_NK: its weight, fp32.

    Returns:
        row_of_slot (N, K) int32, weight_of_row (R,) fp32, and offsets (E,) int32: expert e has the rows from
        offsets[e - 1] to offsets[e].
    """
    check_contiguous(expert_NK, weight_NK)
    n_slots = expert_NK.numel()
    n_groups = triton.cdiv(n_slots, SLOTS)
    counts_GE = torch.empty(n_groups, n_experts, dtype=torch.int32, device=expert_NK.device)
    row_of_slot_NK = torch.empty_like(expert_NK)
    weight_of_row_R = torch.empty(n_slots, dtype=torch.float32, device=expert_NK.device)
    offsets_E = torch.empty(n_experts, dtype=torch.int32, device=expert_NK.device)
    _count[(n_groups,)](expert_NK, counts_GE, n_slots, E=n_experts, SLOTS=SLOTS)
    _place[(n_groups,)](
        expert_NK, weight_NK, counts_GE, row_of_slot_NK, weight_of_row_R, offsets_E, n_slots, n_groups,
        E=n_experts, SLOTS=SLOTS, GROUPS=next_power_of_2(n_groups),
    )  # fmt: skip
    return row_of_slot_NK, weight_of_row_R, offsets_E


def tokens_to_rows(tokens: Rows, row_of_slot_NK: Tensor) -> Rows:
    """Copy each token's vector, in every form that it has, to its K rows: (R, D)."""
    x_ND, eight_ND, scale_N = tokens
    check_contiguous(x_ND, row_of_slot_NK)
    (n_tokens, width), k = x_ND.shape, row_of_slot_NK.shape[1]
    rows = Rows.empty(n_tokens * k, width, x_ND, None if eight_ND is None else eight_ND.dtype)
    _to_rows[(triton.cdiv(n_tokens, ROWS),)](
        x_ND, eight_ND, scale_N, row_of_slot_NK, *rows, n_tokens,
        D=width, K=k, EIGHT_BITS=eight_ND is not None, TOKENS=ROWS, COLS=next_power_of_2(width),
    )  # fmt: skip
    return rows


def sum_rows(rows_RD: Tensor, row_of_slot_NK: Tensor, x_ND: Tensor, shared_ND: Tensor | None) -> Tensor:
    """x, plus shared where given, plus the sum of each token's K rows; summed in fp32, (N, D) in x's dtype."""
    check_contiguous(rows_RD, row_of_slot_NK, x_ND)
    (n_tokens, width), k = x_ND.shape, row_of_slot_NK.shape[1]
    out_ND = torch.empty_like(x_ND)
    _sum_rows[(triton.cdiv(n_tokens, ROWS),)](
        rows_RD, row_of_slot_NK, x_ND, shared_ND, out_ND, n_tokens,
        D=width, K=k, HAS_SHARED=shared_ND is not None, TOKENS=ROWS, COLS=next_power_of_2(width),
    )  # fmt: skip
    return out_ND
