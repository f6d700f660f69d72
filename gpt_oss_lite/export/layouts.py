"""Names and shapes of weights: ours, those of the modelling file that exports ship, and those of stock gpt-oss.

Both foreign layouts keep K and V apart. The shipped one keeps each expert's matrices apart too, as ours does; stock
gpt-oss holds a layer's experts in one block, transposed, with gate and up interleaved.

Shapes: E experts, D width, F expert hidden size.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.model.attention import SINK_MAX, SINK_MIN
from shared_data.errors import UserError

Layout = Literal["gpt_oss", "gpt_oss_lite"]
"""transformers' own gpt-oss classes, or the shipped modelling file."""

Tensors = Mapping[str, Tensor]

Take = Callable[..., Tensor]
"""Hands a tensor out once: (name, *shape) -> fp32."""

_OUTER = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def layout_of(config: ModelConfig) -> Layout:
    """The layout that expresses a model: stock gpt-oss wherever that can, since it needs no remote code.

    Stock gpt-oss has no shared expert, its own activation, and sinks and biases everywhere; a bias that a model lacks
    is written as zeros, which computes the same.
    """
    stock = config.n_shared_experts == 0 and config.expert_activation == "clamped_swiglu" and config.sink_bias
    return "gpt_oss" if stock else "gpt_oss_lite"


def to_layout(config: ModelConfig, layout: Layout, tensors: Tensors) -> dict[str, Tensor]:
    """Our weights under the names and in the shapes of a layout, in the dtype that they have.

    Args:
        config: of the model.
        layout: where to.
        tensors: the model's parameters by name. A tied head is left out of the result.

    Returns:
        Contiguous tensors that share no memory. Sinks are written clamped, since only our own attention clamps them.
    """
    renamed = {
        theirs: tensors[ours]
        for ours, theirs in _OUTER.items()
        if not (ours == "head.weight" and config.tie_embeddings)
    }
    for layer in range(config.n_layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        renamed[f"{theirs}.input_layernorm.weight"] = tensors[f"{ours}.attn_norm.weight"]
        renamed[f"{theirs}.post_attention_layernorm.weight"] = tensors[f"{ours}.moe_norm.weight"]
        block = {name.removeprefix(f"{ours}."): value for name, value in tensors.items() if name.startswith(f"{ours}.")}
        for name, value in (*_attention(config, layout, block).items(), *_experts(config, layout, block).items()):
            renamed[f"{theirs}.{name}"] = value
    return {name: value.contiguous().clone() for name, value in renamed.items()}


def _attention(config: ModelConfig, layout: Layout, block: Tensors) -> dict[str, Tensor]:
    renamed = {}
    if config.sink_bias:
        renamed["self_attn.sinks"] = block["attn.sink_bias"].clamp(SINK_MIN, SINK_MAX)
    for kind in ("weight", "bias") if config.attention_bias else ("weight",):
        for name in ("q_proj", "o_proj"):
            renamed[f"self_attn.{name}.{kind}"] = block[f"attn.{name}.{kind}"]
        for name, half in zip(("k_proj", "v_proj"), block[f"attn.kv_proj.{kind}"].chunk(2), strict=True):
            renamed[f"self_attn.{name}.{kind}"] = half
    return renamed


def _experts(config: ModelConfig, layout: Layout, block: Tensors) -> dict[str, Tensor]:
    if layout == "gpt_oss_lite":
        return {name.replace("moe.", "mlp.", 1): value for name, value in block.items() if name.startswith("moe.")}

    def stacked(name: str) -> Tensor:
        return torch.stack([block[f"moe.experts.{expert}.{name}"] for expert in range(config.n_experts)])

    def stacked_bias(name: str, width: int) -> Tensor:
        if config.expert_bias:
            return stacked(f"{name}.bias")
        return block["moe.router.weight"].new_zeros(config.n_experts, width)

    router = block["moe.router.weight"]
    hidden = config.expert_hidden_size
    gate_up_EFD = torch.stack((stacked("gate_proj.weight"), stacked("up_proj.weight")), dim=2).flatten(1, 2)
    gate_up_bias_EF = torch.stack((stacked_bias("gate_proj", hidden), stacked_bias("up_proj", hidden)), dim=2)
    return {
        "mlp.router.weight": router,
        "mlp.router.bias": block["moe.router.bias"] if config.router_bias else router.new_zeros(config.n_experts),
        "mlp.experts.gate_up_proj": gate_up_EFD.transpose(1, 2),
        "mlp.experts.gate_up_proj_bias": gate_up_bias_EF.flatten(1, 2),
        "mlp.experts.down_proj": stacked("down_proj.weight").transpose(1, 2),
        "mlp.experts.down_proj_bias": stacked_bias("down_proj", config.d_model),
    }


def from_stock(config: ModelConfig, tensors: Tensors) -> dict[str, Tensor]:
    """Weights of stock gpt-oss under our names and in our shapes, fp32.

    Args:
        config: of the model to make; with router_bias and expert_bias.
        tensors: the checkpoint's, by name.

    Raises:
        UserError: a tensor is missing, has another shape than the config says, or is left over; or a sink lies outside
            the range that our attention clamps it to.
    """
    left = dict(tensors)

    def take(name: str, *shape: int) -> Tensor:
        if name not in left:
            raise UserError(f"the checkpoint has no tensor {name}")
        value = left.pop(name).float()
        if tuple(value.shape) != shape:
            raise UserError(f"{name} is {tuple(value.shape)}: by config.json it must be {shape}")
        return value

    rows, width = config.embedding_rows, config.d_model
    ours = {
        "embed.weight": take(_OUTER["embed.weight"], rows, width),
        "norm.weight": take(_OUTER["norm.weight"], width),
    }
    if config.tie_embeddings:
        left.pop("lm_head.weight", None)  # some writers keep the copy
        ours["head.weight"] = ours["embed.weight"]
    else:
        ours["head.weight"] = take("lm_head.weight", rows, width)
    for layer in range(config.n_layers):
        block = _block_from_stock(config, partial(_take_from_layer, take, layer))
        ours |= {f"blocks.{layer}.{name}": value for name, value in block.items()}
    if left:
        raise UserError(f"the checkpoint has a tensor that this model has no place for: {min(left)}")
    return ours


def _take_from_layer(take: Take, layer: int, name: str, *shape: int) -> Tensor:
    return take(f"model.layers.{layer}.{name}", *shape)


def _block_from_stock(config: ModelConfig, take: Take) -> dict[str, Tensor]:
    width, hidden, n_experts = config.d_model, config.expert_hidden_size, config.n_experts
    q_width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    block = {
        "attn_norm.weight": take("input_layernorm.weight", width),
        "moe_norm.weight": take("post_attention_layernorm.weight", width),
        "attn.sink_bias": take("self_attn.sinks", config.n_heads),
        "moe.router.weight": take("mlp.router.weight", n_experts, width),
        "moe.router.bias": take("mlp.router.bias", n_experts),
    }
    sinks = block["attn.sink_bias"]
    if not bool(((sinks >= SINK_MIN) & (sinks <= SINK_MAX)).all()):
        raise UserError(
            f"the checkpoint has a sink of {sinks.abs().max():.4g}: this model clamps sinks to [{SINK_MIN:g}, "
            f"{SINK_MAX:g}], and would compute something else"
        )
    for kind, shape in (("weight", (width,)), ("bias", ())) if config.attention_bias else (("weight", (width,)),):
        block[f"attn.q_proj.{kind}"] = take(f"self_attn.q_proj.{kind}", q_width, *shape)
        halves = [take(f"self_attn.{name}.{kind}", kv_width, *shape) for name in ("k_proj", "v_proj")]
        block[f"attn.kv_proj.{kind}"] = torch.cat(halves)
    block["attn.o_proj.weight"] = take("self_attn.o_proj.weight", width, q_width)
    if config.attention_bias:
        block["attn.o_proj.bias"] = take("self_attn.o_proj.bias", width)

    gate_up_EDF = take("mlp.experts.gate_up_proj", n_experts, width, 2 * hidden)
    gate_up_bias_EF = take("mlp.experts.gate_up_proj_bias", n_experts, 2 * hidden)
    down_EFD = take("mlp.experts.down_proj", n_experts, hidden, width)
    down_bias_ED = take("mlp.experts.down_proj_bias", n_experts, width)
    for expert in range(n_experts):
        for name, weight, bias in (
            ("gate_proj", gate_up_EDF[expert, :, 0::2], gate_up_bias_EF[expert, 0::2]),
            ("up_proj", gate_up_EDF[expert, :, 1::2], gate_up_bias_EF[expert, 1::2]),
            ("down_proj", down_EFD[expert], down_bias_ED[expert]),
        ):
            block[f"moe.experts.{expert}.{name}.weight"] = weight.T.contiguous()
            block[f"moe.experts.{expert}.{name}.bias"] = bias.contiguous()
    return block
