"""Helpers for the tests of export and import: small models whose every part matters, saved as checkpoints."""

from pathlib import Path

import torch

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.checkpoint import CHECKPOINTS, CheckpointManager

SMALL = ModelConfig(
    vocab_size=61,
    padded_vocab_size=64,
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
GPT_OSS = SMALL.replace(
    n_shared_experts=0,
    expert_activation="clamped_swiglu",
    attention_bias=True,
    router_bias=True,
    expert_bias=True,
    tie_embeddings=False,
    rope_scale=32.0,
)


def lively(config: ModelConfig, seed: int = 0) -> GPTOSS:
    """A model with large weights, since at an initialisation of 0.02 most mistakes drown in the residual; all of them
    exact in bf16, and with sinks beyond both bounds."""
    model = GPTOSS(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
            if "sink_bias" in name:
                parameter[:2] = torch.tensor([40.0, -40.0])
            parameter.copy_(parameter.bfloat16())
    return model.eval()


def save(model: GPTOSS, run: Path, step: int = 3) -> Path:
    """Write the model as a checkpoint of a run; the run's folder."""
    meta = {"model": model.config.model_dump(mode="json"), "rope_scale": model.config.rope_scale, "tokens": 1234}
    CheckpointManager(run / CHECKPOINTS).save(model, torch.optim.AdamW(model.parameters()), step, extra_meta=meta)
    return run


def ids(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random token ids of the small vocabulary."""
    return torch.randint(0, SMALL.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference beside the largest value of the oracle."""
    assert ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
