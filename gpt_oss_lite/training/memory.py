"""How much device memory a training step needs, item by item, before anything is allocated.

The peak of a step is in one of two places: between forward and backward pass, where on top of parameters, gradients,
moments and all that the blocks have saved lies the head with one chunk of logits; or in the backward pass of the last
block, when the chunk is gone. The estimate is the larger of the two. There is no KV cache in training.

Several GPUs: the estimate is of one of them. Replicas (DDP) keep all of the state; under FSDP each rank keeps its share
and gathers a block's weights when it needs them (Zhao et al., 2023); ranks that share a layer's routed experts keep
only theirs.

Muon's stack (`muon`) is there when a step's passes are over and their memory is free again. It counts only where it is
larger than all that they take, as in no recipe here: a stack has at most 0.4 GB, or one matrix.
"""

from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import torch

from gpt_oss_lite.config import ModelConfig, Recipe
from gpt_oss_lite.model.fused.block import why_not_fused_attention, why_not_fused_moe
from gpt_oss_lite.model.transformer import DTYPES, GPTOSS, ROUTED
from gpt_oss_lite.training.layout import ONE_GPU, Layout
from gpt_oss_lite.training.muon import STACK_BYTES, stacks
from gpt_oss_lite.training.optimizer import muon_matrices
from gpt_oss_lite.training.setting import Setting
from shared_data.console import say

FP32 = 4
# What the allocator, cuBLAS and the CUDA context's own buffers take whatever the model.
CUDA_RUNTIME_BYTES = 96 * 2**20


# Under FSDP, blocks whose weights are gathered at one time: the one at work and the next, which is fetched meanwhile.
GATHERED_BLOCKS = 2

HEADROOM = 0.95
"""Share of a GPU's memory that a proposed setting may fill by the estimate: it was 1 % too low at worst, and neither
NCCL's buffers nor gaps between the allocator's blocks are in it."""


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
    layout: Layout = ONE_GPU,
) -> MemoryEstimate:
    """Estimate the peak memory of training `model`, on each GPU where there are several.

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
        layout: how several GPUs share the state.

    Returns:
        MemoryEstimate, whose total_gb is the figure in GB of 10^9 bytes.
    """
    every = grad_checkpoint_every if grad_checkpoint else None
    setting = Setting(batch_size, 1, every, loss_chunk_size)
    counts = _ParameterCounts.of(model, optimizer)
    return _estimate(model.config, counts, setting, seq_len, device_type, fp8_head, layout)


def _estimate(
    config: ModelConfig,
    counts: "_ParameterCounts",
    setting: Setting,
    seq_len: int,
    device_type: str,
    fp8_head: bool,
    layout: Layout,
) -> MemoryEstimate:
    """See `estimate_model_memory_gb`."""
    tokens, every = seq_len * setting.micro_batch_size, setting.grad_checkpoint_every
    state = _state_elements(counts, layout)
    compute = FP32 if device_type == "cpu" or config.dtype == "fp32" else 2
    recomputed = len(range(0, config.n_layers, every)) if every else 0
    fused = _fused_halves(config, device_type)
    if layout.expert_ranks > 1:
        fused = fused._replace(moe=False)
    block_saved = tokens * _saved_bytes_per_token(config, compute, fused)
    stream = tokens * config.d_model * compute
    kept_blocks = config.n_layers - recomputed
    last_recomputed = every is not None and (config.n_layers - 1) % every == 0
    copies_at_head = copies_in_block = state.used
    if fused.attention and fused.moe:  # a block's copies go with its activations, the head's with its chunks
        copies_at_head = kept_blocks * state.block + counts.outside
        copies_in_block = (kept_blocks + last_recomputed) * state.block

    chunk_tokens = min(setting.loss_chunk_size, tokens)
    head_weight_gradient = config.embedding_rows * config.d_model * FP32
    # The last block's backward pass holds about one gradient for each saved element, and where it is recomputed these
    # too. A recomputed block before it comes when the last one's are gone.
    block_backward = tokens * _backward_bytes_per_token(config, compute, fused) + last_recomputed * block_saved
    # A tied head's gradient waits for the embedding's, and that of shared-out weights for the end of the pass.
    waiting = head_weight_gradient if config.tie_embeddings or layout.fully_sharded else 0
    exchanged = 2 * tokens * config.experts_per_token * config.d_model * compute if layout.expert_ranks > 1 else 0

    saved = {
        f"saved activations ({kept_blocks} blocks)": kept_blocks * block_saved,
        f"inputs of {recomputed} recomputed blocks": recomputed * stream,
        "rows between the experts' ranks": exchanged,
    }
    copies = f"weights in {config.dtype} for the products"
    at_head = {
        copies: compute * copies_at_head if compute != FP32 else 0,
        "gathered weights: embedding (fp32)": FP32 * counts.outside if layout.fully_sharded else 0,
        **saved,
        "final norm: input and output": 2 * stream,
        f"head: chunk of {chunk_tokens:,} tokens": _head_chunk_bytes(config, chunk_tokens, compute, fused, fp8_head),
        "head: gradients of weight and hidden states": head_weight_gradient + stream,
    }
    in_block = {
        copies: compute * copies_in_block if compute != FP32 else 0,
        "gathered weights: embedding and two blocks (fp32)": FP32 * state.gathered,
        **saved,
        "head: gradient of weight": waiting,
        "backward pass of the last block": block_backward,
        "a block's gradients on their way to their ranks (fp32)": FP32 * state.sent,
        "a block's gradients before they are added (fp32)": FP32 * state.block if device_type == "cuda" else 0,
    }
    passes = max(at_head, in_block, key=lambda items: sum(items.values()))
    stack = STACK_BYTES * counts.stack if state.momenta else 0
    updating = {"Muon's stack beyond the passes' own": max(0, stack - sum(passes.values()))}
    items = {**_held(state, device_type), **passes, **updating}
    return MemoryEstimate({name: size for name, size in items.items() if size})


def _held(state: "_StateElements", device_type: str) -> dict[str, int]:
    """What is there all the time."""
    return {
        "weights (fp32)": FP32 * state.kept,
        "gradients (fp32)": FP32 * state.kept,
        "AdamW moments (2 x fp32)": 2 * FP32 * (state.kept - state.momenta),
        "Muon momentum (fp32)": FP32 * state.momenta,
        "runtime": CUDA_RUNTIME_BYTES if device_type == "cuda" else 0,
    }


def _head_chunk_bytes(
    config: ModelConfig, chunk_tokens: int, compute: int, fused: "_FusedHalves", fp8_head: bool
) -> int:
    """Logits of a chunk and their gradient, and what 8-bit products take besides."""
    # The Triton kernel's logits are in 16 bits and become their gradient in place; the plain one's are in fp32, and
    # their gradient lies beside them in the compute type where that is another one.
    logit = compute if fused.head else FP32 + (compute if compute != FP32 else 0)
    n_bytes = chunk_tokens * config.embedding_rows * logit
    if fp8_head:  # the gradient and the head, in 8 bits
        n_bytes += chunk_tokens * config.embedding_rows + 2 * config.embedding_rows * config.d_model
    return n_bytes


class _ParameterCounts(NamedTuple):
    """Parameters of a model by where they are."""

    routed: int
    """In routed experts."""
    block: int
    """In the rest of one block."""
    outside: int
    """Outside the blocks."""
    n_layers: int
    muon: int
    """In matrices that Muon updates, routed experts left out; those it updates too, or none."""
    stack: int
    """In the largest stack of matrices that Muon updates together; ranks that share experts may have less."""

    @classmethod
    def of(cls, model: GPTOSS, optimizer: str) -> "_ParameterCounts":
        """Those of a model, on any device."""
        matrices = muon_matrices(model) if optimizer == "muon" else {}
        muon = sum(matrix.numel() for name, matrix in matrices.items() if ROUTED not in name)
        routed = blocks = total = 0
        for name, parameter in model.named_parameters():
            total += parameter.numel()
            blocks += parameter.numel() if name.startswith("blocks.") else 0
            routed += parameter.numel() if ROUTED in name else 0
        n_layers = model.config.n_layers
        stack = max((sum(matrix.numel() for matrix in one) for one in stacks(matrices.values())), default=0)
        return cls(routed, (blocks - routed) // n_layers, total - blocks, n_layers, muon, stack)


class _StateElements(NamedTuple):
    """Elements of parameters that a rank holds."""

    kept: int
    """Whose weights, gradients and moments it keeps."""
    momenta: int
    """Of them, those with one moment in place of two."""
    used: int
    """Which its passes multiply by, so that it copies them into the compute dtype."""
    block: int
    """Of them, in one block."""
    gathered: int
    """Whole fp32 weights that it holds beside what it keeps."""
    sent: int
    """Of gradients on their way to the ranks that keep them."""


def _state_elements(counts: _ParameterCounts, layout: Layout) -> _StateElements:
    block = counts.block + counts.routed // layout.expert_ranks // counts.n_layers
    used = counts.outside + counts.n_layers * block
    if not layout.fully_sharded:
        momenta = counts.muon + counts.routed // layout.expert_ranks if counts.muon else 0
        return _StateElements(used, momenta, used, block, 0, 0)
    gathered = counts.outside + GATHERED_BLOCKS * block  # and no momenta: Muon takes whole matrices
    return _StateElements(-(-used // layout.ranks), 0, used, block, gathered, block)


@lru_cache(maxsize=8)
def meta_model(config: ModelConfig) -> GPTOSS:
    """A model without memory, for counting: the same one each time, not to be changed."""
    with torch.device("meta"):
        return GPTOSS(config)


def estimate_recipe(
    recipe: Recipe,
    batch_size: int | None = None,
    seq_len: int | None = None,
    device_type: str = "cuda",
    layout: Layout = ONE_GPU,
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
        layout=layout,
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


def fastest_that_fits(
    recipe: Recipe, available_bytes: int, layout: Layout = ONE_GPU
) -> tuple[Setting, MemoryEstimate] | None:
    """The setting with the recipe's windows per step that is fastest within a memory, by the estimate.

    As measured on an H200 (docs/performance.md), recomputing costs more than small micro-batches, and those more than
    small chunks; so as little is recomputed as possible, then the micro-batch is as large as it can be, then the chunk.

    Args:
        recipe: its windows per step are shared by the GPUs, each of which gets as many.
        available_bytes: of each GPU; the estimate may fill HEADROOM of it.
        layout: how several GPUs share the state.

    Returns:
        The setting and its estimate; None where nothing fits.
    """
    of_all = recipe.training.windows_per_step
    windows = of_all // layout.ranks
    assert windows * layout.ranks == of_all, layout
    counts = _ParameterCounts.of(meta_model(recipe.model), recipe.training.optimizer)
    for every in (None, 3, 2, 1):
        for micro_batch in (size for size in range(windows, 0, -1) if windows % size == 0):
            for chunk in (16384, 8192, 4096, 2048):
                setting = Setting(micro_batch, of_all // micro_batch, every, chunk)
                estimate = _estimate(
                    recipe.model, counts, setting, recipe.model.max_seq_len, "cuda", recipe.training.fp8_head, layout
                )
                if estimate.total_bytes <= HEADROOM * available_bytes:
                    return setting, estimate
    return None


def beside_the_recipe(recipe: Recipe, setting: Setting, available_bytes: int, layout: Layout = ONE_GPU) -> str:
    """A setting of `fastest_that_fits` held against the recipe's own; where they differ, a second line says why."""
    own = Setting.of(recipe)
    if own == setting:
        return "as the recipe has it"
    need = estimate_recipe(recipe, layout=layout).total_bytes
    fits = "fits too" if need <= HEADROOM * available_bytes else "does not fit"
    return (
        f"the recipe has {own.words()}: {need / 1e9:.1f} GB, {fits}\n"
        f"chosen: least recomputed, then largest micro-batch, then largest chunk, in {HEADROOM:.0%} of the memory"
    )


def _saved_bytes_per_token(config: ModelConfig, compute: int, fused: _FusedHalves) -> int:
    """Bytes that one block keeps for its backward pass, per token; `compute` is the size of the compute dtype."""
    width, hidden = config.d_model, config.expert_hidden_size
    queries, keys = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    routed, used = config.experts_per_token, config.experts_per_token + config.n_shared_experts
    # Output of the norm and its input, which PyTorch's norm keeps in fp32; rotated q and k, v, and the output: the
    # softmax is recomputed.
    attention = compute * (width + 2 * queries + 2 * keys) + (compute if fused.attention else FP32) * width
    if fused.attention:
        attention += FP32 * (1 + config.n_heads)  # 1 / rms, and the log-sum-exps
    # The reference path also keeps silu(gate) and the experts' outputs, which are weighted last.
    moe = compute * (width + (1 if fused.moe else 2) * routed * width + (3 if fused.moe else 4) * used * hidden)
    moe += (compute if fused.moe else FP32) * width
    if fused.moe:
        moe += FP32 * (2 + config.n_experts + 4 * routed)  # 1 / rms, log-sum-exp, probabilities, the slots' places
    return attention + moe


def _backward_bytes_per_token(config: ModelConfig, compute: int, fused: _FusedHalves) -> int:
    """Bytes of the temporaries in a block's backward pass, per token: about one gradient for each saved element."""
    if not fused.moe:
        return _saved_bytes_per_token(config, compute, fused)
    width, hidden = config.d_model, config.expert_hidden_size
    routed = config.experts_per_token * (2 * width + 3 * hidden)  # of the rows' outputs, hidden layers and inputs
    n_bytes = compute * (routed + config.n_shared_experts * 3 * hidden + 2 * width)
    if config.moe_dispatch == "grouped_fp8":  # of the output, for tokens and rows, and of the hidden layers
        used = config.experts_per_token + config.n_shared_experts
        n_bytes += (1 + config.experts_per_token) * width + used * 2 * hidden
    return n_bytes


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
