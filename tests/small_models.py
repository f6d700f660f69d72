"""Small models whose every part matters, for the tests of model, export and import."""

from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

from gpt_oss_lite.config import ModelConfig

Module = TypeVar("Module", bound=nn.Module)

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper = pytest.mark.skipif(not ON_HOPPER, reason="experts in 8 bits need a GPU of compute capability 9.0")
GROUPED_FP8 = pytest.param("grouped_fp8", marks=hopper)

SMALL = ModelConfig(
    vocab_size=61,
    d_model=32,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    max_seq_len=64,
    window_size=5,
    n_experts=4,
    experts_per_token=2,
    expert_hidden_size=16,
)

GPT_OSS_VARIANT = SMALL.replace(
    n_shared_experts=0,
    expert_activation="clamped_swiglu",
    attention_bias=True,
    router_bias=True,
    expert_bias=True,
    tie_embeddings=False,
    rope_scale=32.0,
)


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference beside the largest value of the oracle (beside one, where the oracle is all zeros)."""
    assert ours.shape == theirs.shape
    difference, scale = (ours.double() - theirs.double()).abs().max().item(), theirs.double().abs().max().item()
    return difference / (scale or 1.0)


def lively(module: Module, std: float = 0.3, seed: int = 0) -> Module:
    """Draw every parameter anew, gains around 1: at an initialisation of 0.02 most mistakes drown in the residual."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, std, generator=generator)
    return module
