"""What the model's tests share: explicit float64 attention, and transformers' modules with our weights.

Shapes as in the modules under test: B batch, T tokens, H heads, G key/value heads, C head width, E experts.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssForCausalLM

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.model.transformer import GPTOSS


def explicit_attention(
    q_BHTC: Tensor,
    k_BGTC: Tensor,
    v_BGTC: Tensor,
    sinks_H: Tensor | None,
    window: int | None,
    documents_BT: Tensor | None,
) -> Tensor:
    """Query by query and head by head: a softmax over the visible keys and one column for the sink."""
    batch, n_heads, n_tokens, head_dim = q_BHTC.shape
    group = n_heads // k_BGTC.shape[1]
    rows = []
    for b in range(batch):
        for h in range(n_heads):
            for t in range(n_tokens):
                seen = [
                    s
                    for s in range(t + 1)
                    if (window is None or t - s < window)
                    and (documents_BT is None or documents_BT[b, s] == documents_BT[b, t])
                ]
                logits = k_BGTC[b, h // group, seen] @ q_BHTC[b, h, t] / head_dim**0.5
                if sinks_H is not None:
                    logits = torch.cat((logits, sinks_H[h : h + 1]))
                rows.append(logits.softmax(dim=0)[: len(seen)] @ v_BGTC[b, h // group, seen])
    return torch.stack(rows).view(batch, n_heads, n_tokens, head_dim)


def transformers_config(config: ModelConfig) -> GptOssConfig:
    """The same model for transformers; only what GPT-OSS itself offers can be said."""
    assert config.n_shared_experts == 0
    assert config.expert_activation == "clamped_swiglu"
    assert config.sink_bias
    implementations: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return GptOssConfig(
        vocab_size=config.embedding_rows,
        hidden_size=config.d_model,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.expert_hidden_size,
        num_local_experts=config.n_experts,
        num_experts_per_tok=config.experts_per_token,
        sliding_window=config.window_size,
        rms_norm_eps=config.norm_eps,
        attention_bias=config.attention_bias,
        tie_word_embeddings=config.tie_embeddings,
        max_position_embeddings=config.target_context,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": config.rope_theta,
            "factor": config.rope_scale,
            "beta_fast": config.yarn_beta_fast,
            "beta_slow": config.yarn_beta_slow,
            "truncate": False,
            "original_max_position_embeddings": config.original_context,
        },
        **implementations,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def to_transformers_names(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters (or their gradients), under transformers' names and in its layout.

    transformers keeps K and V apart, expert matrices transposed in one block a layer, and gate and up interleaved.
    """
    renamed = {
        "model.embed_tokens.weight": tensors["embed.weight"],
        "model.norm.weight": tensors["norm.weight"],
        "lm_head.weight": tensors["head.weight"],
    }
    for layer in range(config.n_layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        renamed[f"{theirs}.input_layernorm.weight"] = tensors[f"{ours}.attn_norm.weight"]
        renamed[f"{theirs}.post_attention_layernorm.weight"] = tensors[f"{ours}.moe_norm.weight"]
        renamed[f"{theirs}.self_attn.sinks"] = tensors[f"{ours}.attn.sink_bias"]
        for kind in ("weight", "bias"):
            for name in ("q_proj", "o_proj"):
                renamed[f"{theirs}.self_attn.{name}.{kind}"] = tensors[f"{ours}.attn.{name}.{kind}"]
            k, v = tensors[f"{ours}.attn.kv_proj.{kind}"].chunk(2)
            renamed[f"{theirs}.self_attn.k_proj.{kind}"] = k
            renamed[f"{theirs}.self_attn.v_proj.{kind}"] = v
            renamed[f"{theirs}.mlp.router.{kind}"] = tensors[f"{ours}.moe.router.{kind}"]

        def experts(name: str, prefix: str = ours) -> Tensor:
            return torch.stack([tensors[f"{prefix}.moe.experts.{e}.{name}"] for e in range(config.n_experts)])

        block = f"{theirs}.mlp.experts"
        gate_up = torch.stack((experts("gate_proj.weight"), experts("up_proj.weight")), dim=2)
        renamed[f"{block}.gate_up_proj"] = gate_up.flatten(1, 2).transpose(1, 2)
        gate_up_bias = torch.stack((experts("gate_proj.bias"), experts("up_proj.bias")), dim=2)
        renamed[f"{block}.gate_up_proj_bias"] = gate_up_bias.flatten(1, 2)
        renamed[f"{block}.down_proj"] = experts("down_proj.weight").transpose(1, 2)
        renamed[f"{block}.down_proj_bias"] = experts("down_proj.bias")
    return renamed


def transformers_twin(model: GPTOSS) -> GptOssForCausalLM:
    """transformers' model with the weights of ours."""
    twin = GptOssForCausalLM(transformers_config(model.config))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
    twin.load_state_dict(to_transformers_names(model.config, weights), strict=True)
    return twin
