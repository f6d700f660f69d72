"""Parameter groups by name and figure; updates equal to torch's AdamW; a non-finite step reaches nothing."""

import copy

import pytest
import tiny_run
import torch

from gpt_oss_lite.config import ModelConfig, TrainingConfig
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.optimizer import (
    clip_gradients,
    gradient_norm,
    make_optimizer,
    parameter_groups,
    update_unless,
)


@pytest.mark.parametrize(("padded", "undecayed"), [(None, 98_323_296), (128_256, 98_519_904)])
def test_groups_of_the_502m_model(padded, undecayed):
    with torch.device("meta"):
        model = GPTOSS(ModelConfig(padded_vocab_size=padded))
    decayed, others = parameter_groups(model)
    assert (len(decayed), sum(p.numel() for p in decayed.values())) == (372, 403_513_344)
    assert (len(others), sum(p.numel() for p in others.values())) == (38, undecayed)
    assert all(name.endswith(("_proj.weight", "router.weight")) for name in decayed)
    assert {name.split(".")[-2] for name in others if name.endswith(".weight")} == {
        "embed", "attn_norm", "moe_norm", "norm",
    }  # fmt: skip


def test_each_parameter_once_in_every_variant():
    config = ModelConfig(
        **{**tiny_run.MODEL, "tie_embeddings": False, "attention_bias": True, "router_bias": True, "expert_bias": True}
    )
    model = GPTOSS(config)
    optimizer = make_optimizer(model, TrainingConfig(weight_decay=0.3))
    ids = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(ids) == sorted(id(parameter) for parameter in model.parameters())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    decayed, others = parameter_groups(model)
    assert not [name for name in decayed if "bias" in name or "norm" in name or "embed" in name]
    assert "head.weight" in decayed  # untied, it is a matrix like any other
    assert any("bias" in name for name in others)


def test_update_is_torchs_adamw_in_float64_closed_form():
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2).double()
    config = TrainingConfig(lr=0.1, weight_decay=0.1, eps=1e-6, betas=(0.9, 0.95))
    optimizer = make_optimizer(layer, config)
    weight, m, v = layer.weight.detach().clone(), 0.0, 0.0
    for step in range(1, 4):
        gradient = torch.randn_like(weight)
        layer.weight.grad, layer.bias.grad = gradient.clone(), torch.zeros_like(layer.bias)
        update_unless(torch.tensor(False), optimizer)
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        weight = weight * (1 - 0.1 * 0.1)
        weight = weight - 0.1 * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-6)
    torch.testing.assert_close(layer.weight.detach(), weight, rtol=1e-12, atol=0)


def device_parameters():
    return [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", device_parameters())
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_skipped_step_leaves_weights_moments_and_counts_bitwise(poison, device):
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2).to(device)
    optimizer = make_optimizer(layer, TrainingConfig(weight_decay=0.5))
    layer(torch.ones(1, 3, device=device)).sum().backward()
    update_unless(torch.tensor(False, device=device), optimizer)
    weights, state = copy.deepcopy(layer.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    layer.weight.grad[0, 0] = poison
    norm = gradient_norm(layer.parameters())
    assert not norm.isfinite()
    clip_gradients(layer.parameters(), 1.0, norm)
    update_unless(~norm.isfinite(), optimizer)
    assert all(torch.equal(layer.state_dict()[name], weights[name]) for name in weights)
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[i][key], state[i][key]) for i in state for key in ("step", "exp_avg", "exp_avg_sq"))
    layer.zero_grad()
    layer(torch.ones(1, 3, device=device)).sum().backward()
    update_unless(torch.tensor(False, device=device), optimizer)
    assert not torch.equal(layer.weight, weights["weight"])


def test_clipping_scales_to_the_norm_and_can_be_off():
    layer = torch.nn.Linear(4, 4)
    layer.weight.grad, layer.bias.grad = torch.full((4, 4), 3.0), torch.zeros(4)
    norm = gradient_norm(layer.parameters())
    assert norm.item() == pytest.approx(12.0)
    clip_gradients(layer.parameters(), 0.0, norm)
    assert layer.weight.grad[0, 0] == 3.0
    clip_gradients(layer.parameters(), 1.0, norm)
    assert gradient_norm(layer.parameters()).item() == pytest.approx(1.0, rel=1e-5)
