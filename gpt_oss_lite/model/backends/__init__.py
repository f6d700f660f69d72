"""How attention and experts are computed. A backend is a module with one or both of these functions:

sink_attention(q_BHTC, k_BGSC, v_BGSC, sinks_H, *, window, document_ids_BT) -> o_BHTC
experts_on_rows(x_RD, expert_R, rows_E, experts) -> y_RD

as `reference` documents them. Every backend agrees with `reference` within rounding, in outputs and all gradients.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn

from gpt_oss_lite.model.backends import reference

logger = logging.getLogger(__name__)


class SinkAttention(Protocol):
    """Causal attention with grouped keys, an optional window and optional sinks; see `reference.sink_attention`."""

    def __call__(
        self,
        q_BHTC: Tensor,
        k_BGSC: Tensor,
        v_BGSC: Tensor,
        sinks_H: Tensor | None,
        *,
        window: int | None,
        document_ids_BT: Tensor | None = None,
    ) -> Tensor: ...


ExpertsOnRows = Callable[[Tensor, Tensor, Tensor, Sequence[nn.Module]], Tensor]
"""Experts on rows that are sorted by expert; see `reference.experts_on_rows`."""


@cache
def select_attention(backend: str, device_type: str, cached: bool) -> SinkAttention:
    """The attention that the key model.attention_backend names, where the fused half does not serve.

    Args:
        backend: the key's value.
        device_type: of the queries.
        cached: whether keys of earlier tokens take part; FlexAttention is for whole sequences.
    """
    if backend == "reference" or device_type != "cuda" or cached:
        if backend in ("flex", "fused") and not cached:
            logger.warning("attention_backend %s is not available on %s: using reference", backend, device_type)
        return reference.sink_attention
    from gpt_oss_lite.model.backends import flex

    return flex.sink_attention


@cache
def select_experts(moe_dispatch: str, device_type: str, dtype: torch.dtype) -> ExpertsOnRows:
    """What the key model.moe_dispatch names, where the fused half does not serve.

    Args:
        moe_dispatch: the key's value.
        device_type: of the tokens.
        dtype: compute dtype; PyTorch's grouped products are for 16 bits, on a CPU where they are asked for by name.
    """
    if moe_dispatch == "reference" or (moe_dispatch == "auto" and (device_type != "cuda" or dtype != torch.bfloat16)):
        return reference.experts_on_rows
    if dtype != torch.bfloat16:
        logger.warning("moe_dispatch %s is not available in %s: using reference", moe_dispatch, dtype)
        return reference.experts_on_rows
    if moe_dispatch in ("triton_grouped", "grouped_fp8"):
        logger.warning("moe_dispatch %s is not available here (%s): using grouped", moe_dispatch, device_type)
    from gpt_oss_lite.model.backends import grouped

    return grouped.experts_on_rows
