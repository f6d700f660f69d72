"""The two halves of a block on the fused path, and whether a model on a device can take them and the fused ends.

Triton is imported where it is used, since the reference path does without.
"""

from functools import cache, cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.model.rope import RotaryTables
from gpt_oss_lite.model.routing import LayerStats

if TYPE_CHECKING:
    from gpt_oss_lite.model.fused.attention import AttentionGeometry
    from gpt_oss_lite.model.fused.moe import MoEGeometry
    from gpt_oss_lite.model.transformer import Block


@cache
def why_not_fused_attention(config: ModelConfig, device_type: str, dtype: torch.dtype) -> str | None:
    """Why attention takes a backend of `backends`; None where the fused half serves. Arguments: see `_why_not`."""
    if config.attention_backend not in ("auto", "fused"):
        return f"model.attention_backend is {config.attention_backend}"
    for key in ("attention_bias", "document_mask"):
        if getattr(config, key):
            return f"model.{key} is true"
    if config.head_dim % 8 or config.head_dim > 128:
        return f"model.head_dim is {config.head_dim}, and cuDNN takes multiples of 8 up to 128"
    return _why_not(config, device_type, dtype)


@cache
def why_not_fused_moe(config: ModelConfig, device_type: str, dtype: torch.dtype) -> str | None:
    """Why the experts take the reference path; None where the fused half serves. Arguments: see `_why_not`."""
    if config.moe_dispatch == "reference":
        return "model.moe_dispatch is reference"
    if config.expert_bias:
        return "model.expert_bias is true"
    for key in ("d_model", "expert_hidden_size"):
        if getattr(config, key) % 8:
            return f"model.{key} is {getattr(config, key)}, and grouped products take multiples of 8"
    return _why_not(config, device_type, dtype)


@cache
def why_not_fused_ends(config: ModelConfig, device_type: str, dtype: torch.dtype) -> str | None:
    """Why embedding and final norm are PyTorch's; None where the fused ones serve, which is beside a fused half.
    Arguments: see `_why_not`."""
    reason = why_not_fused_attention(config, device_type, dtype)
    return reason and why_not_fused_moe(config, device_type, dtype)


def _why_not(config: ModelConfig, device_type: str, dtype: torch.dtype) -> str | None:
    """What both halves need.

    Args:
        config: the model's.
        device_type: where its parameters are.
        dtype: compute dtype.
    """
    if device_type != "cuda":
        return f"the device is {device_type}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if dtype != torch.bfloat16:
        return f"the compute dtype is {str(dtype).removeprefix('torch.')}"
    if config.residual_dtype not in (None, "bf16"):
        return f"model.residual_dtype is {config.residual_dtype}"
    return None


@cache
def grouped_products(moe_dispatch: str, training: bool) -> str:
    """Name of the products for this machine's card: PyTorch's on Hopper and the Blackwell of data centres, Triton's on
    the others.

    There, at compute capability 9 and 10, PyTorch's are one kernel; elsewhere they read the groups' sizes on the host,
    once a product. 8 bits are for training alone: what is evaluated is the model that will be used, in bf16.
    """
    if moe_dispatch != "auto" and (training or moe_dispatch != "grouped_fp8"):
        return moe_dispatch
    major, _ = torch.cuda.get_device_capability()
    return "grouped" if major in (9, 10) else "triton_grouped"


class FusedBlock:
    """A layer's fused halves; each is set up at its first use, since a model may take only one."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        self._config, self._layer = config, layer

    @cached_property
    def _attention(self) -> "AttentionGeometry":
        from gpt_oss_lite.model.fused.attention import AttentionGeometry

        config = self._config
        return AttentionGeometry(
            config.n_heads, config.n_kv_heads, config.head_dim, config.layer_window(self._layer), config.norm_eps
        )

    @cached_property
    def _moe(self) -> "dict[bool, MoEGeometry]":
        """By whether the model is in training mode."""
        from gpt_oss_lite.model.fused.moe import MoEGeometry
        from gpt_oss_lite.model.fused.products import PRODUCTS

        config = self._config
        return {
            training: MoEGeometry(
                config.n_experts, config.experts_per_token, config.n_shared_experts, config.norm_eps,
                config.expert_activation == "clamped_swiglu", PRODUCTS[grouped_products(config.moe_dispatch, training)],
            ) for training in (False, True)
        }  # fmt: skip

    def attention(self, block: "Block", x_BTD: Tensor, rotary: RotaryTables) -> Tensor:
        """x + attention(norm(x)), (B, T, D) in x's dtype."""
        from gpt_oss_lite.model.fused.attention import fused_attention

        attn = block.attn
        return fused_attention(
            x_BTD, self._attention, *rotary, block.attn_norm.weight, attn.sink_bias,
            attn.q_proj.weight, attn.kv_proj.weight, attn.o_proj.weight,
        )  # fmt: skip

    def feed_forward(self, block: "Block", x_BTD: Tensor) -> tuple[Tensor, LayerStats]:
        """x + experts(norm(x)), (B, T, D) in x's dtype, and the router's statistics."""
        from gpt_oss_lite.model.fused.moe import fused_moe

        moe = block.moe
        experts = [*moe.experts, *moe.shared_experts]
        x_BTD, aux, z_loss, load_E, entropy = fused_moe(
            x_BTD, self._moe[block.training], block.moe_norm.weight, moe.router.weight, moe.router.bias,
            [expert.gate_proj.weight for expert in experts], [expert.up_proj.weight for expert in experts],
            [expert.down_proj.weight for expert in experts], moe.load_to_balance,
        )  # fmt: skip
        return x_BTD, LayerStats(aux, z_loss, load_E, entropy)
