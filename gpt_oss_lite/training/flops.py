"""Floating-point operations of a training step, and how much of a device's peak they use.

Counting follows PaLM (Chowdhery et al., 2022, appendix B): 6 operations per parameter of a matrix and token, forward
and backward, plus attention's two products, 12 per unit of head width and position in the context. It flatters less in
two ways: only the experts that a token uses count, and a context is what the mask lets a token see (half the window of
a causal layer, window_size of a windowed one). Recomputation by checkpointing is not counted.
"""

import re

from gpt_oss_lite.config import ModelConfig

# Dense bf16 tensor-core peak with fp32 accumulation, in TFLOP/s, by the name that CUDA reports. A pattern takes the
# whole name: an H200 is no H20, and a slice of a card ("... MIG 1g.10gb") is not the card. From NVIDIA's data sheets,
# which for most cards print the figure with 2:4 sparsity, twice the dense one; RTX from the Ampere GA102, Ada and
# Blackwell architecture papers.
_PEAKS_TFLOPS = {
    r"A[18]00-(SXM4|PCIE)-\d+GB|A[18]00( 80GB)? PCIe": 312.0,
    r"H[18]00 PCIe": 756.0,
    r"H[18]00 NVL": 835.0,
    r"H[18]00( 80GB HBM[23]e?)?|H100 SXM5( 80GB)?|GH200 \d+GB": 989.0,
    r"H200": 989.0,
    r"H200 NVL": 835.0,
    r"B200": 2250.0,
    r"GB200": 2500.0,
    r"A10": 125.0,
    r"A40": 149.7,
    r"RTX A6000": 154.8,
    r"L4": 121.0,
    r"L40": 181.0,
    r"L40S": 362.0,
    r"RTX 3090": 71.0,
    r"RTX 4090": 165.2,
    r"RTX 5090": 209.5,
}


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Operations per token, forward and backward, at windows of `seq_len` tokens."""
    attention_width = config.n_heads * config.head_dim
    projections = config.d_model * (2 * attention_width + 2 * config.n_kv_heads * config.head_dim)
    experts = (config.experts_per_token + config.n_shared_experts) * 3 * config.d_model * config.expert_hidden_size
    router = config.d_model * config.n_experts
    head = config.d_model * config.embedding_rows
    matrix_parameters = config.n_layers * (projections + router + experts) + head

    full_context = seq_len // 2
    windows = (config.layer_window(layer) for layer in range(config.n_layers))
    positions = sum(full_context if window is None else min(window, full_context) for window in windows)
    return 6 * matrix_parameters + 12 * attention_width * positions


def card_name(name: str) -> str:
    """A device's CUDA name without its maker and brand: `H200` for `NVIDIA H200`."""
    return re.sub(r"^(NVIDIA|Tesla|GeForce| )+", "", name).strip()


def device_peak_flops(name: str) -> float | None:
    """Dense bf16 peak of a device in FLOP/s by its CUDA name; None when the name is not known."""
    card = card_name(name)
    for pattern, tflops in _PEAKS_TFLOPS.items():
        if re.fullmatch(pattern, card):
            return tflops * 1e12
    return None


def mfu(tokens_per_s: float, config: ModelConfig, seq_len: int, peak_flops: float | None) -> float | None:
    """Model FLOPs utilisation as a share of 1; None where the device's peak is not known."""
    if not peak_flops:
        return None
    return tokens_per_s * flops_per_token(config, seq_len) / peak_flops


def format_mfu(share: float | None) -> str:
    """`39.5%`, or `n/a`."""
    return "n/a" if share is None else f"{share:.1%}"
