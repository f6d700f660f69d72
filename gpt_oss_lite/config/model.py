"""The model block of a recipe. The defaults are the 502M model; see docs/configuration.md for every key."""

from typing import Literal

from pydantic import Field

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

    # Positions
    rope_theta: float = Field(150000.0, gt=1)
    """Base of the rotary angles."""
    rope_scale: float = Field(1.0, ge=1)
    """YaRN scale that the model is trained at; 1 is plain RoPE."""
    yarn_scale_factor: float = Field(32.0, ge=1)
    """YaRN scale of the extension: yarn_target_seq_len / yarn_original_max_seq_len."""
    yarn_original_max_seq_len: int = Field(4096, ge=1)
    """Context of the model before the extension, in tokens; max_seq_len unless stated."""
    yarn_target_seq_len: int = Field(131072, ge=1)
    """Context after the extension, in tokens."""
    yarn_beta_fast: float = Field(32.0, gt=0)
    """Pairs that turn more often than this in the original context are not interpolated."""
    yarn_beta_slow: float = Field(1.0, gt=0)
    """Pairs that turn less often than this in the original context are interpolated in full."""
    eval_max_seq_len: int = Field(131072, ge=1)
    """Longest context that evaluation and generation may use, in tokens; at most yarn_target_seq_len."""

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
    moe_dispatch: Literal["auto", "reference", "grouped", "triton_grouped"] = "auto"
    """How tokens reach their experts; auto takes the fastest that this machine has."""

    # Precision
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Compute type of the matrices on CUDA; fp16 for inference only. On the CPU it is always fp32."""
    residual_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """Type of the residual stream. Null: the compute type."""

    @property
    def embedding_rows(self) -> int:
        """Rows of the embedding: padded_vocab_size, or vocab_size without padding."""
        return self.padded_vocab_size or self.vocab_size
