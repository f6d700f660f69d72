"""A block on the fused path, and whether a model on a device can take it."""

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.model.rope import RotaryTables
from gpt_oss_lite.model.routing import LayerStats

if TYPE_CHECKING:
    from gpt_oss_lite.model.transformer import Block


@cache
def grouped_products(moe_dispatch: str) -> str:
    """Name of the grouped products for this machine's card: PyTorch's on Hopper and later, Triton's on the others.

    Before compute capability 9.0 PyTorch's read the groups' sizes on the host, once a product.
    """
    if moe_dispatch != "auto":
        return moe_dispatch
    return "grouped" if torch.cuda.get_device_capability() >= (9, 0) else "triton_grouped"


@cache
def why_not_fused(config: ModelConfig, device_type: str, dtype: torch.dtype) -> str | None:
    """Why a model takes the reference path; None where the fused one serves.

    Args:
        config: the model's.
        device_type: where its parameters are.
        dtype: compute dtype.
    """
    if config.moe_dispatch == "reference":
        return "model.moe_dispatch is reference"
    if device_type != "cuda":
        return f"the device is {device_type}, not cuda"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if dtype != torch.bfloat16:
        return f"the compute dtype is {dtype}, not bf16"
    for key in ("attention_bias", "expert_bias", "document_mask"):
        if getattr(config, key):
            return f"model.{key} is true"
    if config.residual_dtype not in (None, "bf16"):
        return f"model.residual_dtype is {config.residual_dtype}"
    # What cuDNN's attention and 16-byte rows of the grouped products ask for.
    for key, largest in (("head_dim", 128), ("d_model", None), ("expert_hidden_size", None)):
        value = getattr(config, key)
        if value % 8 or (largest and value > largest):
            return f"model.{key} is {value}"
    return None


class FusedBlock:
    """The two halves of a block, with the geometry and the copies of weights that they need."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        # Triton is imported where it is used, since the reference path does without.
        from gpt_oss_lite.model.fused.attention import AttentionGeometry
        from gpt_oss_lite.model.fused.moe import PRODUCTS, MoEGeometry

        self._attention = AttentionGeometry(
            config.n_heads, config.n_kv_heads, config.head_dim, config.layer_window(layer), config.norm_eps
        )
        clamped = config.expert_activation == "clamped_swiglu"
        self._moe = MoEGeometry(
            config.n_experts, config.experts_per_token, config.n_shared_experts, config.norm_eps, clamped,
            PRODUCTS[grouped_products(config.moe_dispatch)],
        )  # fmt: skip

    def __call__(self, block: "Block", x_BTD: Tensor, rotary: RotaryTables) -> tuple[Tensor, LayerStats]:
        """The residual stream (B, T, D) after the block, and the router's statistics."""
        from gpt_oss_lite.model.fused.attention import fused_attention
        from gpt_oss_lite.model.fused.moe import fused_moe

        attn, moe = block.attn, block.moe
        x_BTD = fused_attention(
            x_BTD, self._attention, *rotary, block.attn_norm.weight, attn.sink_bias,
            attn.q_proj.weight, attn.kv_proj.weight, attn.o_proj.weight,
        )  # fmt: skip
        experts = [*moe.experts, *moe.shared_experts]
        x_BTD, aux, z_loss, load_E, entropy = fused_moe(
            x_BTD, self._moe, block.moe_norm.weight, moe.router.weight, moe.router.bias,
            [expert.gate_proj.weight for expert in experts], [expert.up_proj.weight for expert in experts],
            [expert.down_proj.weight for expert in experts],
        )  # fmt: skip
        return x_BTD, LayerStats(aux, z_loss, load_E, entropy)
