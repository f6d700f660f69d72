"""RMSNorm: the gain counts in fp32 whatever the activations' dtype; the fused one against PyTorch's."""

import pytest
import torch
import torch.nn.functional as F
from small_models import relative_error

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.model.layers import RMSNorm
from gpt_oss_lite.model.transformer import GPTOSS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5


def learnt(width: int) -> RMSNorm:
    """With gains near 1: bf16 has no number between 1 and 1.0078."""
    norm = RMSNorm(width, EPS).to(DEVICE)
    torch.nn.init.normal_(norm.weight, 1.0, 0.003)
    return norm


def right_values(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """In float64, rounded once."""
    x = x.double()
    return (x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * gain.double()).bfloat16()


def test_gains_that_bf16_does_not_have_count_in_bf16():
    torch.manual_seed(0)
    x, norm = torch.randn(50, 96, device=DEVICE).bfloat16(), learnt(96)
    y = norm(x)
    assert y.dtype == torch.bfloat16
    assert (y != right_values(x, norm.weight)).double().mean() < 0.01  # a number on the edge may round either way


@pytest.mark.parametrize("shape", [(2, 7, 20), (1, 1, 96)])
def test_the_fused_norm_and_its_gradients_are_pytorchs(shape):
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton==3.7.1")
    from gpt_oss_lite.model.fused.norm import fused_rms_norm

    torch.manual_seed(0)
    whole = torch.randn(shape[0], 2 * shape[1], shape[2], device=DEVICE).requires_grad_()
    gain, upstream = learnt(shape[2]).weight, torch.randn(shape, device=DEVICE)
    results = []
    for norm in (lambda x: fused_rms_norm(x, gain, EPS), lambda x: F.rms_norm(x, x.shape[-1:], gain, EPS)):
        y = norm(whole[:, ::2])  # rows that do not lie together
        results.append([y, *torch.autograd.grad((y * upstream).sum(), [whole, gain])])
    for ours, theirs in zip(*results, strict=True):
        assert relative_error(ours, theirs) < 1e-5


@pytest.mark.gpu
def test_the_norm_before_the_head_has_its_gain_in_fp32():
    config = ModelConfig(
        vocab_size=100, d_model=64, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=32, expert_hidden_size=64,
        max_seq_len=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model, seen = GPTOSS(config).cuda(), []
    torch.nn.init.normal_(model.norm.weight, 1.0, 0.003)
    model.blocks[-1].register_forward_hook(lambda _, __, output: seen.append(output[0]))
    with torch.autocast("cuda", torch.bfloat16):
        h, _ = model.hidden_states(torch.randint(0, 100, (2, 64), device="cuda"))
    assert (h != right_values(seen[0], model.norm.weight)).double().mean() < 0.01
