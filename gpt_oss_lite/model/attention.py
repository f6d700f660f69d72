"""Grouped-query attention with rotary positions, an alternating window and learned sinks, as in gpt-oss.

Shapes: B batch, T tokens, D width, H query heads, G key/value heads, C head width, S keys (T, or more with a cache).
"""

import torch
from torch import Tensor, nn

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.model.backends import select_attention
from gpt_oss_lite.model.kv_cache import KVCache
from gpt_oss_lite.model.layers import Linear
from gpt_oss_lite.model.rope import RotaryTables, rotate

SINK_MIN, SINK_MAX = -10.0, 15.0
"""Bounds of a sink: beyond them exp(sink) would vanish beside, or swamp, every logit that bf16 activations produce."""


class Attention(nn.Module):
    """Causal self-attention of one layer: even layers see `window_size` tokens, odd ones all."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.window = config.layer_window(layer)
        self.backend = config.attention_backend
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        width, heads_width, kv_width = config.d_model, self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        bias, init_std = config.attention_bias, config.init_std
        self.q_proj = Linear(width, heads_width, bias=bias, init_std=init_std)
        self.kv_proj = Linear(width, 2 * kv_width, bias=bias, init_std=init_std)  # rows of K, then rows of V
        self.o_proj = Linear(heads_width, width, bias=bias, init_std=init_std)
        self.sink_bias = nn.Parameter(torch.zeros(self.n_heads)) if config.sink_bias else None

    def forward(
        self,
        x_BTD: Tensor,
        rotary: RotaryTables,
        document_ids_BT: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Attend; with a cache, also over what it holds, and store this call's keys and values in it.

        Args:
            x_BTD: normed activations.
            rotary: tables for the positions of the T tokens.
            document_ids_BT: where attention stays inside documents, the number of each token's document.
            cache: keys and values of earlier tokens.

        Returns:
            (B, T, D).
        """
        batch, n_tokens, _ = x_BTD.shape
        q_BTHC = self.q_proj(x_BTD).view(batch, n_tokens, self.n_heads, self.head_dim)
        kv = self.kv_proj(x_BTD).view(batch, n_tokens, 2, self.n_kv_heads, self.head_dim)
        k_BTGC, v_BTGC = kv.unbind(dim=2)
        q_BHTC = rotate(q_BTHC, rotary).transpose(1, 2)
        k_BGSC, v_BGSC = rotate(k_BTGC, rotary).transpose(1, 2), v_BTGC.transpose(1, 2)
        if cache is not None:
            k_BGSC, v_BGSC = cache.update(self.layer, k_BGSC, v_BGSC)
        sinks_H = None if self.sink_bias is None else self.sink_bias.clamp(SINK_MIN, SINK_MAX)
        attend = select_attention(self.backend, q_BHTC.device.type, cached=cache is not None)
        o_BHTC = attend(q_BHTC, k_BGSC, v_BGSC, sinks_H, window=self.window, document_ids_BT=document_ids_BT)
        return self.o_proj(o_BHTC.transpose(1, 2).reshape(batch, n_tokens, -1))
