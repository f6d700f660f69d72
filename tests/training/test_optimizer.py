"""Parameter groups by name and figure; updates equal to torch's AdamW; a non-finite step reaches nothing."""

import copy

import pytest
import tiny_run
import torch

from gpt_oss_lite.config import ModelConfig, TrainingConfig
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.optimizer import (
    gradient_norm,
    make_optimizer,
    make_scheduler,
    muon_matrices,
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


def adamw_parameters():
    """Device, and whether AdamW is fused: the loop has it plain on a CPU, but PyTorch has a fused one there too."""
    return [("cpu", False), ("cpu", True), pytest.param("cuda", True, marks=pytest.mark.gpu)]


def layer_and_adamw(device, fused, **keys):
    torch.manual_seed(0)
    layer = torch.nn.Linear(37, 5).to(device)
    if device == "cuda" or not fused:
        optimizer = make_optimizer(layer, TrainingConfig(**keys))
        assert bool(optimizer.defaults["fused"]) == fused
        return layer, optimizer
    return layer, torch.optim.AdamW(layer.parameters(), fused=True, **keys)


@pytest.mark.parametrize(("device", "fused"), adamw_parameters())
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_skipped_step_leaves_weights_moments_and_counts_bitwise(poison, device, fused):
    layer, optimizer = layer_and_adamw(device, fused, weight_decay=0.5)
    layer(torch.ones(1, 37, device=device)).sum().backward()
    update_unless(torch.tensor(False, device=device), optimizer)
    weights, state = copy.deepcopy(layer.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    layer.weight.grad[0, 0] = poison
    norm = gradient_norm(layer.parameters())
    assert not norm.isfinite()
    update_unless(~norm.isfinite(), optimizer, norm, 1.0)
    assert all(torch.equal(layer.state_dict()[name], weights[name]) for name in weights)
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[i][key], state[i][key]) for i in state for key in ("step", "exp_avg", "exp_avg_sq"))
    layer.zero_grad()
    layer(torch.ones(1, 37, device=device)).sum().backward()
    update_unless(torch.tensor(False, device=device), optimizer)
    assert not torch.equal(layer.weight, weights["weight"])


@pytest.mark.parametrize("skip", [None, False])
@pytest.mark.parametrize("max_norm", [0.0, 1e-3, 1.0, 1000.0])
@pytest.mark.parametrize(("device", "fused"), adamw_parameters())
def test_steps_with_clipping_are_those_of_pytorchs_clipping_and_adamw_in_float64(device, fused, max_norm, skip):
    """Norms below and far above the limit: the moments tell which of them were clipped."""
    keys = {"lr": 0.1, "weight_decay": 0.2, "eps": 1e-3, "betas": (0.9, 0.95)}
    layer, optimizer = layer_and_adamw(device, fused, **keys)
    exact = copy.deepcopy(layer).double()
    decay = [group["weight_decay"] for group in optimizer.param_groups for _ in group["params"]]
    groups = [{"params": [p], "weight_decay": w} for p, w in zip(exact.parameters(), decay, strict=True)]
    theirs = torch.optim.AdamW(groups, foreach=False, fused=False, **{**keys, "weight_decay": 0.0})
    for scale in (0.003, 300.0, 1.0, 0.01):
        for parameter, other in zip(layer.parameters(), exact.parameters(), strict=True):
            parameter.grad = scale * torch.randn_like(parameter)
            other.grad = parameter.grad.double()
        norm = gradient_norm(layer.parameters())
        if max_norm > 0:
            torch.nn.utils.clip_grad_norm_(exact.parameters(), max_norm)
        update_unless(None if skip is None else torch.tensor(skip, device=device), optimizer, norm, max_norm)
        theirs.step()
        for parameter, other in zip(layer.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(parameter.double(), other, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(parameter.grad.double(), other.grad, rtol=1e-6, atol=0)


MUON = TrainingConfig(optimizer="muon", lr=0.02, weight_decay=0.1)


def model_and_gradients(seed: int = 0) -> GPTOSS:
    torch.manual_seed(seed)
    model = GPTOSS(ModelConfig(**tiny_run.MODEL))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def test_muon_takes_the_projections_and_experts_of_the_502m_model():
    with torch.device("meta"):
        model = GPTOSS(ModelConfig())
    matrices = muon_matrices(model)
    assert len(matrices) == 372 - 12
    assert {name.split(".")[-2] for name in matrices} == {
        "q_proj", "kv_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    untied = GPTOSS(ModelConfig(**{**tiny_run.MODEL, "tie_embeddings": False}))
    assert "head.weight" not in muon_matrices(untied)


def test_muons_update_is_orthogonal_and_of_adamws_size_and_the_rest_is_adamws():
    model, plain = model_and_gradients(), model_and_gradients()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(model, MUON)
    ids = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(ids) == sorted(id(parameter) for parameter in model.parameters())
    update_unless(torch.tensor(False), optimizer)
    update_unless(torch.tensor(False), make_optimizer(plain, TrainingConfig(lr=0.02, weight_decay=0.1)))
    matrices, others = muon_matrices(model), dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        if name not in matrices:
            assert torch.equal(parameter, others[name]), name
            continue
        rows, columns = parameter.shape
        update = (before[name] * (1 - 0.02 * 0.1) - parameter.detach()) / (0.02 * 0.2 * max(rows, columns) ** 0.5)
        # Five steps of the quintic iteration bring all but the smallest singular values near 1 (Jordan et al., 2024).
        values = torch.linalg.svdvals(update)
        assert 0.7 < values.square().mean().sqrt() < 1.2, name
        assert values.max() < 1.4, name
        # The first momentum is the gradient but for its size, and so the directions are the gradient's.
        left, _, right = torch.linalg.svd(others[name].grad, full_matrices=False)
        assert (update * (left @ right)).sum() / min(rows, columns) > 0.7


@pytest.mark.parametrize("device", device_parameters())
def test_a_step_skipped_under_muon_leaves_weights_and_state_bitwise(device):
    model = model_and_gradients().to(device)
    optimizer = make_optimizer(model, MUON)
    update_unless(torch.tensor(False, device=device), optimizer)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    for parameter in model.parameters():
        parameter.grad.fill_(float("nan"))
    update_unless(torch.tensor(True, device=device), optimizer)
    assert all(torch.equal(model.state_dict()[name], weights[name]) for name in weights)
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[i][key], state[i][key]) for i in state for key in state[i])
    assert {len(entry) for entry in state.values()} == {1, 3}


def test_rates_of_the_schedule_reach_muon_and_a_loaded_state_is_gone_on_with():
    model, other = model_and_gradients(), model_and_gradients()
    optimizer, second = make_optimizer(model, MUON), make_optimizer(other, MUON)
    scheduler = make_scheduler(optimizer, TrainingConfig(optimizer="muon", lr=0.02, warmup_steps=4, total_steps=9))
    before = copy.deepcopy(model.state_dict())
    update_unless(torch.tensor(False), optimizer)  # at rate 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    scheduler.step()
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one in (optimizer, second):
        update_unless(torch.tensor(False), one)
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
        assert not torch.equal(parameter, before[name]), name
