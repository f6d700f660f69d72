"""The model block of a recipe. The defaults are the 502M model; see docs/configuration.md for every key."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from gpt_oss_lite.config.base import ConfigBlock


class ModelConfig(ConfigBlock):
    """Sizes and variants of GPTOSS."""

    # Sizes
    vocab_size: int = Field(128000, ge=1)
    """BPE ranks of the tokenizer, without its special ids."""
    padded_vocab_size: int | None = None
    """Rows of the embedding, with room for special ids; at least vocab_size. Null: vocab_size rows."""
    d_model: int = Field(768, ge=1)
    """Width of the residual stream."""
    n_layers: int = Field(12, ge=1)
    """Transformer blocks."""
    n_heads: int = Field(8, ge=1)
    """Query heads per layer; a multiple of n_kv_heads."""
    n_kv_heads: int = Field(4, ge=1)
    """Key and value heads per layer (grouped-query attention)."""
    head_dim: int = Field(96, ge=2)
    """Width of a head; even, since RoPE turns pairs."""
    norm_eps: float = Field(1e-5, gt=0)
    """Epsilon of RMSNorm."""
    init_std: float = Field(0.02, gt=0)
    """Standard deviation of the normal initialisation of every matrix."""
    tie_embeddings: bool = True
    """Use the embedding as the output head."""

    # Attention
    max_seq_len: int = Field(4096, ge=1)
    """Tokens of a training window."""
    window_size: int | None = Field(128, ge=1)
    """Tokens that the even layers see, self included; the odd layers see all. Null: every layer sees all."""
    sink_bias: bool = True
    """A learned logit per head and layer in the denominator of the softmax, clamped to [-10, 15]."""
    attention_bias: bool = False
    """Biases on q_proj, kv_proj and o_proj."""
    document_mask: bool = False
    """Keep attention inside documents; positions count from each document's start."""

    attention_backend: Literal["auto", "fused", "flex", "reference"] = "auto"
    """How attention is computed; auto takes the fastest that this machine and the other keys allow."""

    # Positions
    rope_theta: float = Field(150000.0, gt=1)
    """Base of the rotary angles."""
    rope_scale: float = Field(1.0, ge=1)
    """YaRN scale that the model is trained at; 1 is plain RoPE."""
    yarn_scale_factor: float = Field(32.0, ge=1)
    """YaRN scale of the extension: yarn_target_seq_len / yarn_original_max_seq_len."""
    yarn_original_max_seq_len: int | None = Field(None, ge=1)
    """Context of the model before the extension, in tokens. Null: max_seq_len."""
    yarn_target_seq_len: int | None = Field(None, ge=1)
    """Context after the extension, in tokens. Null: yarn_scale_factor times the original context."""
    yarn_beta_fast: float = Field(32.0, gt=0)
    """Pairs that turn more often than this in the original context are not interpolated."""
    yarn_beta_slow: float = Field(1.0, gt=0)
    """Pairs that turn less often than this in the original context are interpolated in full."""
    eval_max_seq_len: int | None = Field(None, ge=1)
    """Longest context that evaluation and generation may use, in tokens; at most yarn_target_seq_len. Null: that."""

    # Feed-forward
    n_experts: int = Field(8, ge=1)
    """Routed experts per layer."""
    experts_per_token: int = Field(2, ge=1)
    """Routed experts that each token uses; at most n_experts."""
    n_shared_experts: int = Field(1, ge=0, le=1)
    """Experts that every token uses besides the routed ones."""
    expert_hidden_size: int = Field(1536, ge=1)
    """Hidden width of an expert."""
    expert_activation: Literal["swiglu", "clamped_swiglu"] = "swiglu"
    """swiglu: silu(gate) * up. clamped_swiglu: GPT-OSS's, limit 7, alpha 1.702, up + 1."""
    router_bias: bool = False
    """Bias on the router's logits."""
    expert_bias: bool = False
    """Biases on the experts' matrices."""
    moe_dispatch: Literal["auto", "reference", "grouped", "triton_grouped", "grouped_fp8"] = "auto"
    """How tokens reach their experts; auto takes the fastest that this machine has. grouped_fp8: in training, two of a
    matrix's three products in 8-bit floats (Hopper); it rounds more, so auto never takes it."""

    # Precision
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Compute type of the matrices on CUDA; fp16 for inference only. On the CPU it is always fp32."""
    residual_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """Type of the residual stream. Null: the compute type."""

    @property
    def embedding_rows(self) -> int:
        """Rows of the embedding: padded_vocab_size, or vocab_size without padding."""
        return self.padded_vocab_size or self.vocab_size

    @property
    def original_context(self) -> int:
        """yarn_original_max_seq_len, or max_seq_len where that is null: context before the extension, in tokens."""
        return self.yarn_original_max_seq_len or self.max_seq_len

    @property
    def target_context(self) -> int:
        """yarn_target_seq_len, or yarn_scale_factor times the original where that is null, in tokens."""
        return self.yarn_target_seq_len or math.floor(self.yarn_scale_factor * self.original_context)

    @property
    def eval_context(self) -> int:
        """eval_max_seq_len, or the target where that is null: longest context to evaluate or generate, in tokens."""
        return self.eval_max_seq_len or self.target_context

    def layer_window(self, layer: int) -> int | None:
        """Tokens that a layer sees, self included: window_size on even layers; None (all) on odd ones."""
        return self.window_size if layer % 2 == 0 else None

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.padded_vocab_size is not None and self.padded_vocab_size < self.vocab_size:
            raise ValueError(
                f"padded_vocab_size is {self.padded_vocab_size}: it must be at least vocab_size ({self.vocab_size}), "
                "or null"
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads is {self.n_heads}: it must be a multiple of n_kv_heads ({self.n_kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}: it must be even, since RoPE turns pairs")
        if self.experts_per_token > self.n_experts:
            raise ValueError(
                f"experts_per_token is {self.experts_per_token}: it must lie between 1 and n_experts ({self.n_experts})"
            )
        return self

    @model_validator(mode="after")
    def _check_positions(self) -> Self:
        original, target, scale = self.original_context, self.target_context, self.yarn_scale_factor
        if self.yarn_target_seq_len is not None and not math.isclose(scale * original, target, rel_tol=1e-9):
            source = "" if self.yarn_original_max_seq_len is not None else "max_seq_len, since it is null: "
            raise ValueError(
                f"yarn_scale_factor is {scale:g}: it must be yarn_target_seq_len / yarn_original_max_seq_len "
                f"({target} / {source}{original} = {target / original:g}); leave yarn_target_seq_len null to derive it"
            )
        if self.eval_context > target:
            raise ValueError(
                f"eval_max_seq_len is {self.eval_max_seq_len}: it must be at most yarn_target_seq_len ({target}), "
                "or null"
            )
        if self.rope_scale > scale:
            raise ValueError(
                f"rope_scale is {self.rope_scale:g}: it must lie between 1 and yarn_scale_factor ({scale:g})"
            )
        if self.yarn_beta_slow >= self.yarn_beta_fast:
            raise ValueError(
                f"yarn_beta_slow is {self.yarn_beta_slow:g}: it must be less than yarn_beta_fast "
                f"({self.yarn_beta_fast:g})"
            )
        return self
