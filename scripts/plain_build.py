"""A plain build of the same model, as one would write it today with PyTorch alone, to measure the product beside.

FlexAttention with its log-sum-exp for the sink, PyTorch's grouped products, cross-entropy over chunks, everything else
left to torch.compile. It trains, but has none of the project's other parts.

Weights are fp32 and products bf16 by casts of its own rather than by autocast, whose list of fp32 operations (the norm)
differs between releases of PyTorch, where grouped products take 16 bits only.

Shapes: B batch, T tokens, D width, H heads, E experts, R routed rows.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.model.rope import RotaryEmbedding


class CastLinear(nn.Linear):
    """A linear layer in its input's dtype."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(inner, outer, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class PlainAttention(nn.Module):
    """Causal attention with a sink."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        columns = (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
        self.qkv = CastLinear(config.d_model, columns)
        self.out = CastLinear(self.n_heads * self.head_dim, config.d_model)
        self.sink = nn.Parameter(torch.zeros(self.n_heads))

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        batch, seq_len, _ = x_BTD.shape
        heads = self.qkv(x_BTD).view(batch, seq_len, -1, self.head_dim).transpose(1, 2)
        q, k, v = heads.split([self.n_heads, self.n_kv_heads, self.n_kv_heads], dim=1)
        q, k = self.turn(q, cos, sin), self.turn(k, cos, sin)
        o, lse = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True)
        o = o * torch.sigmoid(lse - self.sink.clamp(-10, 15)[:, None])[..., None].to(o.dtype)
        return self.out(o.transpose(1, 2).reshape(batch, seq_len, -1))

    @staticmethod
    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class PlainMoE(nn.Module):
    """Top-K of E experts by grouped products, and a shared expert."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, hidden, self.n_experts = config.d_model, config.expert_hidden_size, config.n_experts
        self.top_k = config.experts_per_token
        self.router = CastLinear(width, self.n_experts)
        self.gate_up = nn.Parameter(torch.randn(self.n_experts, width, 2 * hidden) * config.init_std)
        self.down = nn.Parameter(torch.randn(self.n_experts, hidden, width) * config.init_std)
        self.shared_gate_up = CastLinear(width, 2 * hidden)
        self.shared_down = CastLinear(hidden, width)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        x = x_BTD.flatten(0, 1)
        probs = self.router(x.float()).softmax(-1)
        top, experts = probs.topk(self.top_k, dim=-1)
        weights = top / top.sum(-1, keepdim=True)
        slots = (experts.flatten()[:, None] == torch.arange(self.n_experts, device=x.device)).sum(0)
        aux = self.n_experts * (slots / experts.numel() * probs.mean(0)).sum()
        order = experts.flatten().argsort(stable=True)
        ends = slots.cumsum(0).to(torch.int32)
        gate, up = torch._grouped_mm(x[order // self.top_k], self.gate_up.to(x.dtype), offs=ends).chunk(2, dim=-1)
        rows = torch._grouped_mm(F.silu(gate) * up, self.down.to(x.dtype), offs=ends)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        routed = (rows[inverse].view(-1, self.top_k, x.shape[-1]) * weights.to(x.dtype)[..., None]).sum(1)
        gate, up = self.shared_gate_up(x).chunk(2, dim=-1)
        return (routed + self.shared_down(F.silu(gate) * up)).view_as(x_BTD), aux


class PlainBuild(nn.Module):
    """The whole model up to its final norm, and the head's matrix in `embed`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_layers, self.window, self.eps = config.n_layers, config.window_size, config.norm_eps
        self.embed = nn.Embedding(config.embedding_rows, config.d_model)
        nn.init.normal_(self.embed.weight, std=config.init_std)
        sizes = [config.d_model] * config.n_layers
        self.attention = nn.ModuleList(PlainAttention(config) for _ in sizes)
        self.experts = nn.ModuleList(PlainMoE(config) for _ in sizes)
        self.norms = nn.ModuleList(nn.RMSNorm(size, eps=config.norm_eps) for size in [*sizes, *sizes, config.d_model])
        self.rotary = RotaryEmbedding(config)

    def masks(self, seq_len: int, device: torch.device) -> tuple[Any, Any]:
        """Block masks of the even, windowed layers and of the odd ones."""
        window = self.window or seq_len

        def full(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return q >= k

        def windowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (q - k < window)

        one, other = (create_block_mask(f, None, None, seq_len, seq_len, device=device) for f in (windowed, full))
        return one, other

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor, masks: tuple[Any, Any]) -> tuple[Tensor, Tensor]:
        x = self.embed(ids).to(torch.bfloat16)
        auxes = []
        for layer, (attention, experts) in enumerate(zip(self.attention, self.experts, strict=True)):
            x = x + attention(self.norm(2 * layer, x), cos, sin, masks[layer % 2])
            fed, aux = experts(self.norm(2 * layer + 1, x))
            x = x + fed
            auxes.append(aux)
        return self.norm(-1, x), torch.stack(auxes).mean()

    def norm(self, index: int, x: Tensor) -> Tensor:
        norm = self.norms[index]
        assert isinstance(norm, nn.RMSNorm)
        gain = norm.weight
        return F.rms_norm(x, gain.shape, gain.to(x.dtype), self.eps)


@torch.compile
def _loss_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.float()
    lse = scores.logsumexp(-1, keepdim=True)
    columns = torch.arange(logits.shape[1], device=logits.device)
    gradient = (scores - lse).exp() - (columns == targets[:, None]).float()
    return (lse[:, 0] - scores.gather(1, targets[:, None])[:, 0]).sum(), gradient.to(logits.dtype)


class ChunkedHead(torch.autograd.Function):
    """Mean cross-entropy over chunks of the head's logits; gradients are made in the forward pass."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        matrix = weight.to(h.dtype)
        dh, dweight = torch.empty_like(h), torch.zeros_like(weight)
        loss = torch.zeros((), device=h.device)
        for start in range(0, len(h), chunk):
            rows = slice(start, start + chunk)
            part, gradient = _loss_and_gradient(h[rows] @ matrix.t(), targets[rows])
            loss += part
            torch.mm(gradient, matrix, out=dh[rows])
            dweight += gradient.t() @ h[rows]
        ctx.save_for_backward(dh, dweight)
        ctx.n_tokens = len(h)
        return loss / len(h)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dh, dweight = ctx.saved_tensors
        scale = dloss / ctx.n_tokens
        return dh * scale.to(dh.dtype), dweight * scale, None, None
