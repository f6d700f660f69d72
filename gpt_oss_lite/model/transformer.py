"""GPTOSS: a sparse decoder-only language model in the style of gpt-oss (Agarwal et al., 2025).

Read top to bottom it is: embedding, blocks of attention and experts around a residual stream, final norm, head.

Shapes: B batch, T tokens, D width, V rows of the embedding, L layers, E experts.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.model.attention import Attention
from gpt_oss_lite.model.documents import positions_in_documents
from gpt_oss_lite.model.fused.block import (
    FusedBlock,
    why_not_fused_attention,
    why_not_fused_ends,
    why_not_fused_moe,
)
from gpt_oss_lite.model.kv_cache import KVCache
from gpt_oss_lite.model.layers import Embedding, Linear, RMSNorm, compute_dtype
from gpt_oss_lite.model.moe import MoE
from gpt_oss_lite.model.rope import RotaryEmbedding, RotaryTables
from gpt_oss_lite.model.routing import AverageLoad, LayerStats

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROUTED = ".moe.experts."
"""In the name of a routed expert's parameter."""


class RouterStats(NamedTuple):
    """What the routers did with a micro-batch; the two losses carry gradients, the rest does not."""

    aux: Tensor
    """Mean over layers of the load-balancing loss, fp32 scalar; 1.0 when balanced."""
    z_loss: Tensor
    """Mean over layers of mean(logsumexp(logits)^2), fp32 scalar."""
    expert_load: Tensor
    """(L, E) fp32: share of the token-slots of a layer that each expert got; rows sum to 1."""
    entropy: Tensor
    """(L,) fp32: mean entropy of a layer's router probabilities, in nats."""

    def detached(self) -> "RouterStats":
        """The figures without the graph, which would keep a micro-batch's tensors alive."""
        return RouterStats(*(figure.detach() for figure in self))


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + experts(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attn = Attention(config, layer)
        self.moe_norm = RMSNorm(config.d_model, config.norm_eps)
        self.moe = MoE(config)
        self._config, self._layer = config, layer
        self._fused: FusedBlock | None = None

    def forward(
        self,
        x_BTD: Tensor,
        rotary: RotaryTables,
        document_ids_BT: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, LayerStats]:
        """The residual stream keeps its dtype; attention and experts work in the compute dtype."""
        device_type, dtype = x_BTD.device.type, compute_dtype(self.attn.q_proj.weight)
        if cache is None and why_not_fused_attention(self._config, device_type, dtype) is None:
            x_BTD = self._fused_halves().attention(self, x_BTD, rotary)
        else:
            attended = self.attn(self.attn_norm(x_BTD).to(dtype), rotary, document_ids_BT, cache)
            x_BTD = x_BTD + attended.to(x_BTD.dtype)
        if self.moe.dispatch is None and why_not_fused_moe(self._config, device_type, dtype) is None:
            return self._fused_halves().feed_forward(self, x_BTD)
        fed_forward, stats = self.moe(self.moe_norm(x_BTD).to(dtype))
        return x_BTD + fed_forward.to(x_BTD.dtype), stats

    def _fused_halves(self) -> FusedBlock:
        if self._fused is None:
            self._fused = FusedBlock(self._config, self._layer)
        return self._fused


class GPTOSS(nn.Module):
    """The language model. Parameters are fp32; open torch.autocast around it for another compute dtype.

    Builds under `torch.device("meta")` too, for counting.

    Args:
        keep_part: called with each block before the next one is made. A rank that holds a part of each lets go of the
            rest there, so that the whole model is nowhere.
    """

    def __init__(self, config: ModelConfig, keep_part: Callable[[Block], object] | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.embedding_rows, config.d_model, init_std=config.init_std)
        self.blocks = nn.ModuleList()
        for layer in range(config.n_layers):
            block = Block(config, layer)
            if keep_part is not None:
                keep_part(block)
            self.blocks.append(block)
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        # A tied head takes the embedding's matrix, so none is allocated and filled for it.
        device = "meta" if config.tie_embeddings else None
        self.head = Linear(config.d_model, config.embedding_rows, bias=False, init_std=config.init_std, device=device)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        self.rotary = RotaryEmbedding(config)
        self._checkpoint_every: int | None = None

    def forward(
        self, ids_BT: Tensor, *, document_ids_BT: Tensor | None = None, cache: KVCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits of the next token.

        Args:
            ids_BT: token ids, int64.
            document_ids_BT: as for `hidden_states`.
            cache: as for `hidden_states`.

        Returns:
            Logits (B, T, V) in the compute dtype and the load-balancing loss (fp32 scalar).
        """
        h_BTD, stats = self.hidden_states(ids_BT, document_ids_BT=document_ids_BT, cache=cache)
        return self.head(h_BTD), stats.aux

    def hidden_states(
        self, ids_BT: Tensor, *, document_ids_BT: Tensor | None = None, cache: KVCache | None = None
    ) -> tuple[Tensor, RouterStats]:
        """Activations after the final norm, ready for the head.

        Args:
            ids_BT: token ids, int64.
            document_ids_BT: number of each token's document (`documents.document_ids`), with model.document_mask; None:
                each row is one document.
            cache: keys and values of the tokens before these; this call's are added.

        Returns:
            (B, T, D) in the compute dtype, and what the routers did.

        Raises:
            ValueError: document ids without model.document_mask, or together with a cache; a cache that is too short.
        """
        if document_ids_BT is not None and not self.config.document_mask:
            raise ValueError("document ids are given, but model.document_mask is false")
        if document_ids_BT is not None and cache is not None:
            raise ValueError("document ids and a cache are given: decoding works on one document per row")
        rotary = self.rotary.tables(self._positions(ids_BT, document_ids_BT, cache))
        x_BTD = self._embedded(ids_BT)
        layers = []
        for layer, block in enumerate(self.blocks):
            if self._recomputes(layer):
                # No random numbers are drawn in a block, so their state need not be kept.
                x_BTD, stats = checkpoint(
                    block, x_BTD, rotary, document_ids_BT, cache, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x_BTD, stats = block(x_BTD, rotary, document_ids_BT, cache)
            layers.append(stats)
        if cache is not None:
            cache.advance(ids_BT.shape[1])
        return self._normalised(x_BTD).to(compute_dtype(self.head.weight)), _over_layers(layers)

    def enable_gradient_checkpointing(self, every: int) -> None:
        """Recompute the blocks i with i % every == 0 in the backward pass instead of keeping their activations.

        Raises:
            ValueError: every is below 1.
        """
        if every < 1:
            raise ValueError(f"every is {every}: it must be at least 1")
        self._checkpoint_every = every

    def average_expert_load_by(self, average_load: AverageLoad | None) -> None:
        """Let the load-balancing loss in training use other expert shares than its own tokens': those of several
        machines. None: its own."""
        for module in self.modules():
            if isinstance(module, MoE):
                module.average_load = average_load

    def set_rope_scale(self, scale: float) -> None:
        """Use another YaRN scale, e.g. to decode beyond the trained length. A cache filled at another scale is void.

        Raises:
            UserError: the scale is below 1 or not finite.
        """
        self.rotary.set_scale(scale)

    def num_parameters(self) -> int:
        """Parameters in all; a tied head counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def num_active_parameters(self) -> int:
        """Parameters that one token uses: all but its layers' idle experts."""
        routed = sum(parameter.numel() for name, parameter in self.named_parameters() if ROUTED in name)
        idle = self.config.n_experts - self.config.experts_per_token
        return self.num_parameters() - routed * idle // self.config.n_experts

    def _positions(self, ids_BT: Tensor, document_ids_BT: Tensor | None, cache: KVCache | None) -> Tensor:
        if document_ids_BT is not None:
            return positions_in_documents(document_ids_BT)
        start = 0 if cache is None else cache.length
        return torch.arange(start, start + ids_BT.shape[1], device=ids_BT.device)

    def _has_fused_ends(self) -> bool:
        weight = self.embed.weight
        return why_not_fused_ends(self.config, weight.device.type, compute_dtype(weight)) is None

    def _normalised(self, x_BTD: Tensor) -> Tensor:
        if not self._has_fused_ends():
            return self.norm(x_BTD)
        from gpt_oss_lite.model.fused.norm import fused_rms_norm  # and with it Triton

        return fused_rms_norm(x_BTD, self.norm.weight, self.norm.eps)

    def _embedded(self, ids_BT: Tensor) -> Tensor:
        weight, dtype = self.embed.weight, self._residual_dtype()
        if not self._has_fused_ends():
            return self.embed(ids_BT).to(dtype)
        from gpt_oss_lite.model.fused.embedding import fused_embedding  # and with it Triton

        return fused_embedding(ids_BT, weight, dtype)

    def _residual_dtype(self) -> torch.dtype:
        name = self.config.residual_dtype
        return compute_dtype(self.embed.weight) if name is None else DTYPES[name]

    def _recomputes(self, layer: int) -> bool:
        every = self._checkpoint_every
        return every is not None and layer % every == 0 and torch.is_grad_enabled()


def _over_layers(layers: list[LayerStats]) -> RouterStats:
    return RouterStats(
        aux=torch.stack([stats.aux for stats in layers]).mean(),
        z_loss=torch.stack([stats.z_loss for stats in layers]).mean(),
        expert_load=torch.stack([stats.expert_load_E for stats in layers]),
        entropy=torch.stack([stats.entropy for stats in layers]),
    )


def describe_parameters(model: GPTOSS) -> str:
    """One line for the log: parameters in all and per token."""
    total, active = model.num_parameters(), model.num_active_parameters()
    return f"[model] total params: {total / 1e6:.2f}M, active: {active / 1e6:.2f}M"
