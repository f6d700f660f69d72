"""How much device memory a training step needs, item by item, before anything is allocated.

The peak of a step lies between forward and backward: parameters with their gradients and moments, what every block has
saved for its backward pass, and on top of it the head with one chunk of logits. A block's own backward pass comes
later, when the chunk is gone, and counts only where it is the larger of the two. There is no KV cache in training.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import torch

from gpt_oss_lite.config import ModelConfig, Recipe
from gpt_oss_lite.model.fused.block import why_not_fused_attention, why_not_fused_moe
from gpt_oss_lite.model.transformer import DTYPES, GPTOSS
from gpt_oss_lite.training.optimizer import muon_matrices
from shared_data.console import say

FP32 = 4
# What the allocator, cuBLAS and the CUDA context's own buffers take whatever the model.
CUDA_RUNTIME_BYTES = 256 * 2**20


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by item."""

    items: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Sum of the items."""
        return sum(self.items.values())

    @property
    def total_gb(self) -> float:
        """Sum of the items in GB of 10^9 bytes."""
        return self.total_bytes / 1e9

    def table(self) -> str:
        """One line an item, the total last, in GB of 10^9 bytes."""
        rows = [*self.items.items(), ("total", self.total_bytes)]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {size / 1e9:9.3f} GB" for name, size in rows)


def estimate_model_memory_gb(
    model: GPTOSS,
    seq_len: int,
    batch_size: int,
    grad_checkpoint: bool = False,
    grad_checkpoint_every: int = 3,
    loss_chunk_size: int = 8192,
    device_type: str = "cuda",
    fp8_head: bool = False,
    optimizer: str = "adamw",
) -> MemoryEstimate:
    """Estimate the peak memory of training `model`.

    Args:
        model: built on any device, "meta" included.
        seq_len: tokens of a window.
        batch_size: windows of a micro-batch.
        grad_checkpoint: whether the blocks i with i % grad_checkpoint_every == 0 are recomputed.
        grad_checkpoint_every: see there.
        loss_chunk_size: tokens whose logits are alive at one time.
        device_type: "cuda" computes in the model's dtype beside fp32 parameters, "cpu" in fp32 throughout.
        fp8_head: whether the head's products take 8-bit floats.
        optimizer: training.optimizer.

    Returns:
        MemoryEstimate, whose total_gb is the figure in GB of 10^9 bytes.
    """
    config = model.config
    tokens = seq_len * batch_size
    parameters = model.num_parameters()
    matrices = muon_matrices(model) if optimizer == "muon" else {}
    momenta = sum(matrix.numel() for matrix in matrices.values())
    compute = FP32 if device_type == "cpu" or config.dtype == "fp32" else 2
    fused = _fused_halves(config, device_type)
    block_saved = tokens * _saved_bytes_per_token(config, compute, fused)
    recomputed = len(range(0, config.n_layers, grad_checkpoint_every)) if grad_checkpoint else 0
    block_input = tokens * compute * config.d_model

    head_rows = config.embedding_rows
    chunk_tokens = min(loss_chunk_size, tokens)
    # The Triton kernel's logits are in 16 bits and become their gradient in place; the plain one's are in fp32, and
    # their gradient lies beside them in the compute type where that is another one.
    head_chunk = chunk_tokens * head_rows * (compute if fused.head else FP32 + (compute if compute != FP32 else 0))
    if fp8_head:
        head_chunk += chunk_tokens * head_rows + 2 * head_rows * config.d_model  # the gradient and the head, in 8 bits
    head_gradients = tokens * config.d_model * compute + head_rows * config.d_model * FP32
    # A block's backward pass holds about one gradient for each saved element, and its saved elements where recomputed.
    block_backward = tokens * _backward_bytes_per_token(config, compute, fused) + (block_saved if recomputed else 0)

    items = {
        "weights (fp32)": FP32 * parameters,
        "gradients (fp32)": FP32 * parameters,
        "AdamW moments (2 x fp32)": 2 * FP32 * (parameters - momenta),
        "Muon momentum (fp32)": FP32 * momenta,
        f"weights in {config.dtype} for the products": compute * parameters if compute != FP32 else 0,
        f"saved activations ({config.n_layers - recomputed} blocks)": (config.n_layers - recomputed) * block_saved,
        f"inputs of {recomputed} recomputed blocks": recomputed * block_input,
        f"head: chunk of {chunk_tokens:,} tokens": head_chunk,
        "head: gradients of weight and hidden states": head_gradients,
        "backward pass of a block beyond the head's": max(0, block_backward - head_chunk - head_gradients),
        "runtime": CUDA_RUNTIME_BYTES if device_type == "cuda" else 0,
    }
    return MemoryEstimate({name: size for name, size in items.items() if size})


def meta_model(config: ModelConfig) -> GPTOSS:
    """A model without memory, for counting."""
    with torch.device("meta"):
        return GPTOSS(config)


def estimate_recipe(
    recipe: Recipe, batch_size: int | None = None, seq_len: int | None = None, device_type: str = "cuda"
) -> MemoryEstimate:
    """The estimate for a recipe, at its own micro-batch and window where no others are given."""
    training = recipe.training
    return estimate_model_memory_gb(
        meta_model(recipe.model),
        seq_len=seq_len or recipe.model.max_seq_len,
        batch_size=batch_size or training.micro_batch_size,
        grad_checkpoint=training.grad_checkpoint,
        grad_checkpoint_every=training.grad_checkpoint_every,
        loss_chunk_size=training.loss_chunk_size,
        device_type=device_type,
        fp8_head=training.fp8_head,
        optimizer=training.optimizer,
    )


class _FusedHalves(NamedTuple):
    """Which parts of a step take the fused path."""

    attention: bool
    moe: bool
    head: bool


def _fused_halves(config: ModelConfig, device_type: str) -> _FusedHalves:
    dtype = DTYPES[config.dtype]
    return _FusedHalves(
        attention=why_not_fused_attention(config, device_type, dtype) is None,
        moe=why_not_fused_moe(config, device_type, dtype) is None,
        head=device_type == "cuda" and dtype != torch.float32 and find_spec("triton") is not None,
    )


class Setting(NamedTuple):
    """How a recipe's step is cut to fit."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    grad_checkpoint_every: int | None
    """Recompute every n-th block; None: none."""
    loss_chunk_size: int

    def overrides(self) -> list[str]:
        """The setting as `--set` words."""
        every = self.grad_checkpoint_every
        return [
            f"training.micro_batch_size={self.micro_batch_size}",
            f"training.gradient_accumulation_steps={self.gradient_accumulation_steps}",
            f"training.grad_checkpoint={'false' if every is None else 'true'}",
            *([] if every is None else [f"training.grad_checkpoint_every={every}"]),
            f"training.loss_chunk_size={self.loss_chunk_size}",
        ]


def fastest_that_fits(recipe: Recipe, available_bytes: int) -> tuple[Setting, MemoryEstimate] | None:
    """The setting with the recipe's windows per step that is fastest within a memory, by the estimate.

    As measured on an H200 (docs/performance.md), recomputing costs more than small micro-batches, and those more than
    small chunks; so as little is recomputed as possible, then the micro-batch is as large as it can be.

    Returns:
        The setting and its estimate; None where nothing fits.
    """
    windows = recipe.training.micro_batch_size * recipe.training.gradient_accumulation_steps
    model = meta_model(recipe.model)
    for every in (None, 3, 2, 1):
        for micro_batch in (size for size in range(windows, 0, -1) if windows % size == 0):
            for chunk in (16384, 8192, 4096, 2048):
                estimate = estimate_model_memory_gb(
                    model, recipe.model.max_seq_len, micro_batch, every is not None, every or 1, chunk,
                    fp8_head=recipe.training.fp8_head,
                    optimizer=recipe.training.optimizer,
                )  # fmt: skip
                if estimate.total_bytes <= available_bytes:
                    return Setting(micro_batch, windows // micro_batch, every, chunk), estimate
    return None


def _saved_bytes_per_token(config: ModelConfig, compute: int, fused: _FusedHalves) -> int:
    """Bytes that one block keeps for its backward pass, per token; `compute` is the size of the compute dtype."""
    width, hidden = config.d_model, config.expert_hidden_size
    queries, keys = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    routed, used = config.experts_per_token, config.experts_per_token + config.n_shared_experts
    # Input and output of the norm; rotated q and k, v, and the output: the softmax is recomputed.
    attention = compute * (2 * width + 2 * queries + 2 * keys)
    if fused.attention:
        attention += FP32 * (1 + config.n_heads)  # 1 / rms, and the log-sum-exps
    # The reference path also keeps silu(gate) and the experts' outputs, which are weighted last.
    moe = compute * (2 * width + (1 if fused.moe else 2) * routed * width + (3 if fused.moe else 4) * used * hidden)
    if fused.moe:
        moe += FP32 * (2 + config.n_experts + 4 * routed)  # 1 / rms, log-sum-exp, probabilities, the slots' places
    return attention + moe


def _backward_bytes_per_token(config: ModelConfig, compute: int, fused: _FusedHalves) -> int:
    """Bytes of the temporaries in a block's backward pass, per token: about one gradient for each saved element."""
    if not fused.moe:
        return _saved_bytes_per_token(config, compute, fused)
    width, hidden = config.d_model, config.expert_hidden_size
    routed = config.experts_per_token * (2 * width + 3 * hidden)  # of the rows' outputs, hidden layers and inputs
    return compute * (routed + config.n_shared_experts * 3 * hidden + 2 * width)


def assert_fits_in_available_gpu(estimate: MemoryEstimate) -> bool:
    """Warn with one line when an estimate is beyond the GPU's memory. It never stops the run: it is an estimate.

    Returns:
        Whether it fits; True without a GPU.
    """
    if not torch.cuda.is_available():
        return True
    available, _ = torch.cuda.mem_get_info()
    available += torch.cuda.memory_reserved()
    if estimate.total_bytes <= available:
        return True
    say(
        f"warning: the step is estimated at {estimate.total_gb:.1f} GB, and the GPU has {available / 1e9:.1f} GB free; "
        f"`gpt-oss-lite estimate --gpu-gb {available / 1e9:.0f}` with the recipe finds what fits"
    )
    return False
