"""GPT-OSS-Lite for Hugging Face transformers (5.x): configuration and model in one file.

A copy of this file lies in every exported folder that transformers' own gpt-oss classes cannot express, and is what
`AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` runs. It needs torch and transformers, nothing
else. A decoder with RMSNorm, grouped-query attention whose softmax has a learned sink per head, a sliding window on
every other layer, rotary positions with YaRN, and a mixture of experts with one expert that every token may share.

Shapes: B batch, T tokens, S keys, H query heads, G key/value heads, C head width, D width, E experts, K experts per
token, R = B * T * K rows.
"""

import math
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast

SINK_MIN, SINK_MAX = -10.0, 15.0
CLAMP_LIMIT, CLAMP_ALPHA = 7.0, 1.702

# transformers 5.24 calls the cache `cache`; before, it was `past_key_values`.
CACHE_NAME = "cache" if "cache" in {field.name for field in fields(MoeModelOutputWithPast)} else "past_key_values"


class GPTOSSLiteConfig(PreTrainedConfig):
    """Sizes and variants. Names that gpt-oss has too mean the same there."""

    model_type = "gpt_oss_lite"
    keys_to_ignore_at_inference = ["cache", "past_key_values", "router_logits"]

    def __init__(
        self,
        vocab_size: int = 128256,
        hidden_size: int = 768,
        intermediate_size: int = 1536,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 8,
        num_key_value_heads: int = 4,
        head_dim: int = 96,
        sliding_window: int | None = 128,
        layer_types: list[str] | None = None,
        max_position_embeddings: int = 4096,
        rope_parameters: dict | None = None,
        rms_norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
        attention_sinks: bool = True,
        attention_bias: bool = False,
        num_local_experts: int = 8,
        num_experts_per_tok: int = 2,
        n_shared_experts: int = 1,
        expert_activation: str = "swiglu",
        router_bias: bool = False,
        expert_bias: bool = False,
        output_router_logits: bool = False,
        router_aux_loss_coef: float = 0.01,
        use_cache: bool = True,
        tie_word_embeddings: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.sliding_window = sliding_window
        # Even layers see `sliding_window` tokens, odd ones all.
        even_layer = "full_attention" if sliding_window is None else "sliding_attention"
        self.layer_types = layer_types or [
            "full_attention" if layer % 2 else even_layer for layer in range(num_hidden_layers)
        ]
        self.max_position_embeddings = max_position_embeddings
        self.rope_parameters = rope_parameters or {"rope_type": "default", "rope_theta": 150000.0}
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        self.attention_sinks = attention_sinks
        self.attention_bias = attention_bias
        self.num_local_experts = num_local_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.n_shared_experts = n_shared_experts
        self.expert_activation = expert_activation
        self.router_bias = router_bias
        self.expert_bias = expert_bias
        self.output_router_logits = output_router_logits
        self.router_aux_loss_coef = router_aux_loss_coef
        self.use_cache = use_cache
        super().__init__(**kwargs)
        self.tie_word_embeddings = tie_word_embeddings


class GPTOSSLiteRMSNorm(nn.Module):
    """Root-mean-square norm; activations keep their dtype."""

    def __init__(self, config: GPTOSSLiteConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.eps = config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        """x over its root mean square, times the gain."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rotary_tables(config: GPTOSSLiteConfig, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin (B, 1, T, C / 2), fp32, of plain rotary positions or of YaRN (Peng et al., 2023) without truncation.

    Computed from the config at each call: there is no buffer to lose when a model is built on the meta device.
    """
    rope, head_dim = config.rope_parameters, config.head_dim
    theta = rope["rope_theta"]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    periods = theta**exponents
    frequencies, magnitude = 1.0 / periods, 1.0
    if rope["rope_type"] == "yarn":
        scale, original = rope["factor"], rope["original_max_position_embeddings"]

        def pair_that_turns(times: float) -> float:
            return head_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

        low = max(pair_that_turns(rope["beta_fast"]), 0)
        high = min(pair_that_turns(rope["beta_slow"]), head_dim - 1)
        high += 0.001 if low == high else 0.0
        pairs = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
        kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
        frequencies = 1.0 / (scale * periods) * (1 - kept) + frequencies * kept
        magnitude = 0.1 * math.log(scale) + 1.0
    elif rope["rope_type"] != "default":
        raise ValueError(f"rope_type is {rope['rope_type']}: it must be default or yarn")
    angles = positions_BT[:, None, :, None].float() * frequencies.to(positions_BT.device)
    return angles.cos() * magnitude, angles.sin() * magnitude


def rotate(x_BHTC: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (i, i + C / 2) of each head; in fp32, back in x's dtype."""
    cos, sin = tables
    first, second = x_BHTC.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BHTC.dtype)


class GPTOSSLiteAttention(nn.Module):
    """Grouped-query attention; logits and softmax in fp32."""

    def __init__(self, config: GPTOSSLiteConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.head_dim = layer_idx, config.head_dim
        self.n_heads, self.n_kv_heads = config.num_attention_heads, config.num_key_value_heads
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, self.n_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.n_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.n_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.n_heads * self.head_dim, width, bias=bias)
        if config.attention_sinks:
            self.sinks = nn.Parameter(torch.zeros(self.n_heads))
        else:
            self.register_parameter("sinks", None)

    def forward(self, x_BTD: Tensor, tables: tuple[Tensor, Tensor], mask: Tensor, cache: Any) -> Tensor:
        """(B, T, D) to (B, T, D), with the keys and values of the cache before x's own."""
        batch, n_tokens, _ = x_BTD.shape
        q_BHTC = self.q_proj(x_BTD).view(batch, n_tokens, self.n_heads, self.head_dim).transpose(1, 2)
        k_BGSC = self.k_proj(x_BTD).view(batch, n_tokens, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v_BGSC = self.v_proj(x_BTD).view(batch, n_tokens, self.n_kv_heads, self.head_dim).transpose(1, 2)
        q_BHTC, k_BGSC = rotate(q_BHTC, tables), rotate(k_BGSC, tables)
        if cache is not None:
            k_BGSC, v_BGSC = cache.update(k_BGSC, v_BGSC, self.layer_idx)

        # The query heads of a group lie one after the other, so they fold into a dimension and no key is copied.
        group = (batch, self.n_kv_heads, self.n_heads // self.n_kv_heads, n_tokens)
        q = (q_BHTC.float() * self.head_dim**-0.5).view(*group, self.head_dim)
        logits = q @ k_BGSC.float().transpose(2, 3).unsqueeze(2)
        logits = logits + mask[:, :, None, :, : logits.shape[-1]]
        if self.sinks is not None:
            sinks = self.sinks.float().clamp(SINK_MIN, SINK_MAX).view(1, self.n_kv_heads, -1, 1, 1)
            logits = torch.cat((logits, sinks.expand(*group, 1)), dim=-1)
        probs = logits.softmax(dim=-1)
        if self.sinks is not None:
            probs = probs[..., :-1]
        out = (probs @ v_BGSC.float().unsqueeze(2)).to(x_BTD.dtype)
        return self.o_proj(out.view(batch, self.n_heads, n_tokens, -1).transpose(1, 2).reshape(batch, n_tokens, -1))


class GPTOSSLiteExpert(nn.Module):
    """Gated feed-forward with three matrices."""

    def __init__(self, config: GPTOSSLiteConfig) -> None:
        super().__init__()
        width, hidden, bias = config.hidden_size, config.intermediate_size, config.expert_bias
        self.clamped = config.expert_activation == "clamped_swiglu"
        self.gate_proj = nn.Linear(width, hidden, bias=bias)
        self.up_proj = nn.Linear(width, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to (..., D)."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        if not self.clamped:
            return self.down_proj(F.silu(gate) * up)
        gate, up = gate.clamp(max=CLAMP_LIMIT), up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
        return self.down_proj(gate * torch.sigmoid(CLAMP_ALPHA * gate) * (up + 1))


class GPTOSSLiteMoE(nn.Module):
    """Top-k of E experts with renormalised weights, and those that every token uses. No token is dropped."""

    def __init__(self, config: GPTOSSLiteConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.router = nn.Linear(config.hidden_size, config.num_local_experts, bias=config.router_bias)
        self.experts = nn.ModuleList(GPTOSSLiteExpert(config) for _ in range(config.num_local_experts))
        self.shared_experts = nn.ModuleList(GPTOSSLiteExpert(config) for _ in range(config.n_shared_experts))

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """The output (B, T, D), and the router's logits (B * T, E) in fp32: in bf16 they tie often enough to change
        the choice."""
        x_TD = x_BTD.flatten(0, 1)
        bias_E = None if self.router.bias is None else self.router.bias.float()
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = F.linear(x_TD.float(), self.router.weight.float(), bias_E)
        # A stable sort, since topk leaves the order of ties open.
        sorted_TE, order_TE = logits_TE.sort(dim=-1, descending=True, stable=True)
        weights_TK, experts_TK = sorted_TE[:, : self.top_k].softmax(dim=-1), order_TE[:, : self.top_k]

        order_R = experts_TK.flatten().argsort(stable=True)
        rows = torch.bincount(experts_TK.flatten(), minlength=len(self.experts)).tolist()
        parts = x_TD[order_R // self.top_k].split(rows)
        y_RD = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        y_TKD = y_RD[order_R.argsort()].view(len(x_TD), self.top_k, -1)
        out_TD = (y_TKD * weights_TK[..., None]).sum(dim=1).to(x_TD.dtype)
        for expert in self.shared_experts:
            out_TD = out_TD + expert(x_TD)
        return out_TD.view_as(x_BTD), logits_TE


class GPTOSSLiteDecoderLayer(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + experts(norm(x))."""

    def __init__(self, config: GPTOSSLiteConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = GPTOSSLiteRMSNorm(config)
        self.self_attn = GPTOSSLiteAttention(config, layer_idx)
        self.post_attention_layernorm = GPTOSSLiteRMSNorm(config)
        self.mlp = GPTOSSLiteMoE(config)

    def forward(
        self, x_BTD: Tensor, tables: tuple[Tensor, Tensor], mask: Tensor, cache: Any = None
    ) -> tuple[Tensor, Tensor]:
        """The stream (B, T, D) after this layer, and the router's logits (B * T, E)."""
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), tables, mask, cache)
        fed_forward, router_logits = self.mlp(self.post_attention_layernorm(x_BTD))
        return x_BTD + fed_forward, router_logits


class GPTOSSLitePreTrainedModel(PreTrainedModel):
    """What transformers needs to know of both models."""

    config: GPTOSSLiteConfig
    config_class = GPTOSSLiteConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["GPTOSSLiteDecoderLayer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    # The sinks belong into the softmax, which the library's fused attentions do not all offer: eager only.
    _supports_sdpa = False
    _supports_flash_attn = False
    _supports_flex_attn = False

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, GPTOSSLiteAttention) and module.sinks is not None:
            nn.init.zeros_(module.sinks)


class GPTOSSLiteModel(GPTOSSLitePreTrainedModel):
    """Embedding, layers, final norm."""

    def __init__(self, config: GPTOSSLiteConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(GPTOSSLiteDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = GPTOSSLiteRMSNorm(config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        """Activations after the final norm, and the router's logits of each layer.

        Args:
            input_ids: (B, T) int64; or inputs_embeds, (B, T, D).
            attention_mask: (B, all tokens so far) with 0 at padding, on either side; or one ready mask a layer type.
            position_ids: (B, T); None: counted from the cache's length on, padding included.
            cache: keys and values of the tokens before these; past_key_values is its older name.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        x_BTD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values if cache is None else cache
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        if self.gradient_checkpointing and self.training:
            use_cache, cache = False, None  # a layer that runs twice would store its keys twice
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            start = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(start, start + x_BTD.shape[1], device=x_BTD.device)[None]
        masks = self._masks(x_BTD, attention_mask, cache, position_ids)
        tables = rotary_tables(self.config, position_ids)

        all_hidden, all_logits = [x_BTD], []
        for layer, layer_type in zip(self.layers, self.config.layer_types, strict=True):
            x_BTD, router_logits = layer(x_BTD, tables, masks[layer_type], cache)
            all_hidden.append(x_BTD)
            all_logits.append(router_logits)
        x_BTD = all_hidden[-1] = self.norm(x_BTD)
        wants_hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return MoeModelOutputWithPast(
            last_hidden_state=x_BTD,
            hidden_states=tuple(all_hidden) if wants_hidden else None,
            router_logits=tuple(all_logits),
            **{CACHE_NAME: cache if use_cache else None},
        )

    def _masks(self, x_BTD: Tensor, attention_mask: Any, cache: Any, position_ids: Tensor) -> dict[str, Tensor]:
        """What is added to the logits of each type of layer, (B, 1, T, S): 0 where a query sees a key."""
        if isinstance(attention_mask, dict):  # `generate` prepares them for caches of fixed size
            return attention_mask
        make = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
        types = set(self.config.layer_types)
        # By position: the names of these arguments differ between releases of transformers.
        return {name: make[name](self.config, x_BTD, attention_mask, cache, position_ids) for name in types}


class GPTOSSLiteForCausalLM(GPTOSSLitePreTrainedModel, GenerationMixin):
    """The language model."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: GPTOSSLiteConfig) -> None:
        super().__init__(config)
        self.model = GPTOSSLiteModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast | tuple:
        """Logits (B, T, V), and with labels (B, T; shifted here, -100 ignored) the loss.

        With output_router_logits, also the load-balancing loss of the Switch Transformer, added to the loss with the
        weight router_aux_loss_coef, as in pre-training.
        """
        outputs = self.model(
            input_ids,
            attention_mask,
            position_ids,
            cache,
            past_key_values,
            inputs_embeds,
            use_cache,
            output_hidden_states,
        )
        logits = self.lm_head(outputs.last_hidden_state[:, -logits_to_keep if logits_to_keep else 0 :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)
        aux_loss = None
        if self.config.output_router_logits if output_router_logits is None else output_router_logits:
            aux_loss = self._load_balancing_loss(outputs.router_logits, attention_mask)
            loss = None if loss is None else loss + self.config.router_aux_loss_coef * aux_loss.to(loss.device)
        result = MoeCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            aux_loss=aux_loss,
            router_logits=None if aux_loss is None else outputs.router_logits,
            hidden_states=outputs.hidden_states,
            **{CACHE_NAME: outputs.get(CACHE_NAME)},
        )
        return result.to_tuple() if return_dict is False else result

    def _load_balancing_loss(self, router_logits: tuple[Tensor, ...], attention_mask: Any) -> Tensor:
        """E * sum of (share of the token-slots) * (mean probability), mean over the layers; 1 when balanced. Padding
        does not count."""
        losses = []
        for logits_TE in router_logits:
            if isinstance(attention_mask, Tensor) and attention_mask.numel() == len(logits_TE):
                logits_TE = logits_TE[attention_mask.flatten().bool()]
            chosen_TK = logits_TE.sort(dim=-1, descending=True, stable=True).indices[
                :, : self.config.num_experts_per_tok
            ]
            share_E = F.one_hot(chosen_TK, self.config.num_local_experts).float().mean(dim=(0, 1))
            losses.append(self.config.num_local_experts * (share_E * logits_TE.softmax(dim=-1).mean(dim=0)).sum())
        return torch.stack([loss.to(losses[0].device) for loss in losses]).mean()
