"""Helpers for the tests of export and import: small models whose every part matters, saved as checkpoints."""

from pathlib import Path

import small_models
import torch
from small_models import relative_error

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.checkpoint import CHECKPOINTS, CheckpointManager

__all__ = ["GPT_OSS", "SMALL", "ids", "lively", "relative_error", "save"]

SMALL = small_models.SMALL.replace(padded_vocab_size=64)
GPT_OSS = small_models.GPT_OSS_VARIANT.replace(padded_vocab_size=64)


def lively(config: ModelConfig, seed: int = 0) -> GPTOSS:
    """A model with large weights, all of them exact in bf16, and with sinks beyond both bounds."""
    model = GPTOSS(config)
    small_models.lively(model, seed=seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
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
