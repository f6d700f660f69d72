"""Attention and expert dispatch in plain PyTorch, on any device: what every faster backend is measured against.

Shapes: B batch, T queries, S keys (the queries are the last T of the S positions), H query heads, G key/value heads,
Q = H / G query heads per key head, C head width. For experts: R rows, D width, E experts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpt_oss_lite.model.layers import at_least_fp32, without_autocast

QUERY_BLOCK = 256
"""Queries whose logits are alive at one time."""


def sink_attention(
    q_BHTC: Tensor,
    k_BGSC: Tensor,
    v_BGSC: Tensor,
    sinks_H: Tensor | None,
    *,
    window: int | None,
    document_ids_BT: Tensor | None = None,
) -> Tensor:
    """Causal softmax attention whose denominator also holds exp(sink) (gpt-oss, Agarwal et al., 2025).

    Queries are taken in blocks, each against the keys that it can see; several blocks are recomputed in the backward
    pass. Memory therefore grows with S, not with T * S, and a windowed layer costs T * (window + block).

    Args:
        q_BHTC: queries, already rotated.
        k_BGSC: keys, already rotated; query t stands at position S - T + t.
        v_BGSC: values.
        sinks_H: one logit per head, fp32, already clamped; None: none.
        window: keys that a query sees, itself included; None: all before it.
        document_ids_BT: number of each token's document, where attention stays inside documents (then S = T).

    Returns:
        (B, H, T, C) in q's dtype; logits and softmax in fp32 (fp64 where q is).
    """
    n_queries, n_keys = q_BHTC.shape[2], k_BGSC.shape[2]
    assert n_keys >= n_queries
    assert document_ids_BT is None or n_keys == n_queries
    blocks = range(0, n_queries, QUERY_BLOCK)
    recompute = len(blocks) > 1 and torch.is_grad_enabled()
    outputs = []
    for start in blocks:
        queries = slice(start, min(start + QUERY_BLOCK, n_queries))
        first_position = n_keys - n_queries + start
        first_key = 0 if window is None else max(0, first_position - window + 1)
        keys = slice(first_key, n_keys - n_queries + queries.stop)
        documents = None if document_ids_BT is None else (document_ids_BT[:, queries], document_ids_BT[:, keys])
        inputs = (
            q_BHTC[:, :, queries], k_BGSC[:, :, keys], v_BGSC[:, :, keys], sinks_H,
            first_position - first_key, window, documents,
        )  # fmt: skip
        if recompute:
            outputs.append(checkpoint(_attend, *inputs, use_reentrant=False, preserve_rng_state=False))
        else:
            outputs.append(_attend(*inputs))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _attend(
    q_BHTC: Tensor,
    k_BGSC: Tensor,
    v_BGSC: Tensor,
    sinks_H: Tensor | None,
    offset: int,
    window: int | None,
    documents: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Attention of one block of queries; query t stands where key t + offset does."""
    batch, n_heads, n_queries, head_dim = q_BHTC.shape
    n_kv_heads, n_keys = k_BGSC.shape[1], k_BGSC.shape[2]
    grouped = (batch, n_kv_heads, n_heads // n_kv_heads, n_queries)
    hidden = ~_visible(n_queries, n_keys, offset, window, documents, q_BHTC.device)
    with without_autocast(q_BHTC):
        q, k, v = at_least_fp32(q_BHTC), at_least_fp32(k_BGSC), at_least_fp32(v_BGSC)
        # The query heads of a group lie one after the other, so they fold into the rows and no key is copied.
        rows_q = (q * head_dim**-0.5).reshape(batch, n_kv_heads, -1, head_dim)
        logits = (rows_q @ k.transpose(2, 3)).view(*grouped, n_keys).masked_fill(hidden, float("-inf"))
        if sinks_H is None:
            probs = logits.softmax(dim=-1)
        else:
            sinks = sinks_H.to(logits.dtype).view(1, n_kv_heads, -1, 1, 1).expand(*grouped, 1)
            probs = torch.cat((logits, sinks), dim=-1).softmax(dim=-1)[..., :-1]
        out = probs.reshape(batch, n_kv_heads, -1, n_keys) @ v
    return out.view(batch, n_heads, n_queries, head_dim).to(q_BHTC.dtype)


def _visible(
    n_queries: int,
    n_keys: int,
    offset: int,
    window: int | None,
    documents: tuple[Tensor, Tensor] | None,
    device: torch.device,
) -> Tensor:
    """Which keys each query sees: (T, S) bool, or (B, 1, 1, T, S) with documents."""
    distance_TS = torch.arange(n_queries, device=device)[:, None] + offset - torch.arange(n_keys, device=device)
    visible = distance_TS >= 0
    if window is not None:
        visible = visible & (distance_TS < window)
    if documents is not None:
        queries_BT, keys_BS = documents
        visible = visible & (queries_BT[:, None, None, :, None] == keys_BS[:, None, None, None, :])
    return visible


def experts_on_rows(x_RD: Tensor, expert_R: Tensor, rows_E: Tensor, experts: Sequence[nn.Module]) -> Tensor:
    """Each expert on its own rows. One without rows runs on none, so its gradients are zeros, not None.

    Args:
        x_RD: rows, sorted by expert.
        expert_R: the number of each row's expert, int64.
        rows_E: how many rows each expert has, int64.
        experts: E modules from (rows, D) to (rows, D).

    Returns:
        (R, D) in the experts' dtype.
    """
    parts = [expert(part) for expert, part in zip(experts, x_RD.split(rows_E.tolist()), strict=True)]
    return torch.cat(parts)
