"""Routing and experts: a per-token loop as the oracle, exact balancing loss, and the corners where dispatch breaks."""

import logging
import math

import pytest
import torch
from small_models import GPT_OSS_VARIANT, SMALL, lively, relative_error
from torch import Tensor

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.model import backends
from gpt_oss_lite.model.backends import reference
from gpt_oss_lite.model.backends.rows import dispatch_experts
from gpt_oss_lite.model.moe import MoE
from gpt_oss_lite.model.routing import Routing, count_slots, fp32_linear, route

N_TOKENS = 37


def loop_over_tokens(moe: MoE, x_BTD: Tensor, config: ModelConfig) -> Tensor:
    """Every token by itself, from the weights alone."""
    rows = []
    for x_D in x_BTD.flatten(0, 1):
        logits_E = moe.router.weight @ x_D + (moe.router.bias if config.router_bias else 0)
        probabilities_E = logits_E.exp() / logits_E.exp().sum()
        chosen = sorted(range(config.n_experts), key=lambda e: -logits_E[e].item())[: config.experts_per_token]
        total = sum(probabilities_E[e] for e in chosen)
        used = [(probabilities_E[e] / total, moe.experts[e]) for e in chosen]
        used += [(1.0, expert) for expert in moe.shared_experts]
        out_D = torch.zeros_like(x_D)
        for weight, expert in used:
            gate, up = expert.gate_proj.weight @ x_D, expert.up_proj.weight @ x_D
            if config.expert_bias:
                gate, up = gate + expert.gate_proj.bias, up + expert.up_proj.bias
            if config.expert_activation == "clamped_swiglu":
                gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
                hidden = gate / (1 + (-1.702 * gate).exp()) * (up + 1)
            else:
                hidden = gate / (1 + (-gate).exp()) * up
            down = expert.down_proj.weight @ hidden
            out_D = out_D + weight * (down + (expert.down_proj.bias if config.expert_bias else 0))
        rows.append(out_D)
    return torch.stack(rows).view_as(x_BTD)


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        SMALL.replace(n_shared_experts=0),
        SMALL.replace(experts_per_token=1),
        SMALL.replace(experts_per_token=4),
        SMALL.replace(n_experts=1, experts_per_token=1),
        SMALL.replace(expert_activation="clamped_swiglu", expert_bias=True, router_bias=True),
        GPT_OSS_VARIANT,
    ],
    ids=["published", "no shared", "top 1", "all experts", "one expert", "clamped with biases", "gpt-oss"],
)
def test_layer_equals_a_loop_over_tokens(config: ModelConfig) -> None:
    moe = lively(MoE(config), std=0.6).double()
    x = torch.randn(2, N_TOKENS, config.d_model, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
    ours_x, theirs_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours, _ = moe(ours_x)
    theirs = loop_over_tokens(moe, theirs_x, config)
    assert relative_error(ours, theirs) < 1e-12
    names, inputs = zip(*moe.named_parameters(), strict=True)
    our_gradients = torch.autograd.grad(ours.square().sum(), [ours_x, *inputs])
    their_gradients = torch.autograd.grad(theirs.square().sum(), [theirs_x, *inputs])
    for name, ours_g, theirs_g in zip(["x", *names], our_gradients, their_gradients, strict=True):
        if config.experts_per_token == 1 and name.startswith("router"):
            assert not ours_g.any()  # a single weight is 1 whatever the logits
        else:
            assert relative_error(ours_g, theirs_g) < 1e-10, name


def test_clamp_is_exercised_by_the_loop_test() -> None:
    moe = lively(MoE(GPT_OSS_VARIANT), std=0.6)
    x = torch.randn(2 * N_TOKENS, 32, generator=torch.Generator().manual_seed(1)) * 2
    assert (moe.experts[0].gate_proj(x) > 7).any()
    assert (moe.experts[0].up_proj(x).abs() > 7).any()


def test_balanced_routing_costs_exactly_one() -> None:
    """An auxiliary loss that was off by a factor K (allenai/OLMoE#45) would give 2 here, or one half."""
    n_experts = 8
    # Token t prefers expert t and then t + 1: all experts are chosen equally often, with equal mean probabilities.
    first = torch.eye(n_experts).repeat(6, 1)
    for experts_per_token, logits in [(1, first * 50), (2, first * 3 + first.roll(1, dims=1) * 2)]:
        _, stats = route(logits, experts_per_token)
        assert stats.aux.item() == pytest.approx(1.0, abs=1e-6)
        assert torch.equal(stats.expert_load_E, torch.full((n_experts,), 1 / n_experts))


@pytest.mark.parametrize("experts_per_token", [1, 2])
def test_collapsed_routing_costs_experts_over_k(experts_per_token: int) -> None:
    logits = torch.zeros(40, 8)
    logits[:, :experts_per_token] = 60.0
    _, stats = route(logits, experts_per_token)
    assert stats.aux.item() == pytest.approx(8 / experts_per_token, abs=1e-5)


def test_statistics_equal_their_definitions() -> None:
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    routing, stats = route(logits, 2)
    probabilities = logits.softmax(-1)
    load = [sum(row.count(e) for row in routing.experts_TK.tolist()) / 100 for e in range(8)]
    assert stats.expert_load_E.tolist() == pytest.approx(load)
    assert stats.aux.item() == pytest.approx(
        8 * sum(f * p for f, p in zip(load, probabilities.mean(0).tolist(), strict=True))
    )
    assert stats.z_loss.item() == pytest.approx((logits.exp().sum(-1).log() ** 2).mean().item())
    assert stats.entropy.item() == pytest.approx(-(probabilities * probabilities.log()).sum(-1).mean().item())
    assert routing.weights_TK.sum(-1).tolist() == pytest.approx([1.0] * 50)


def test_statistics_survive_extreme_logits() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0, 0.0]])
    routing, stats = route(logits, 2)
    assert all(torch.isfinite(value).all() for value in (*stats, routing.weights_TK))
    assert stats.entropy.item() == 0.0


def test_uniform_router_has_the_entropy_of_its_experts() -> None:
    assert route(torch.zeros(5, 8), 2)[1].entropy.item() == pytest.approx(math.log(8))


def test_auxiliary_gradient_reaches_the_router_and_nothing_else() -> None:
    """It never flowed in NVIDIA-NeMo/Automodel#1408."""
    moe = lively(MoE(SMALL))
    x = torch.randn(1, N_TOKENS, 32, generator=torch.Generator().manual_seed(1))
    _, stats = moe(x)
    for loss in (stats.aux, stats.z_loss):
        moe.zero_grad(set_to_none=True)
        loss.backward(retain_graph=True)
        assert {name for name, p in moe.named_parameters() if p.grad is not None} == {"router.weight"}
        assert moe.router.weight.grad.abs().max() > 1e-5


def test_weight_of_the_auxiliary_loss_changes_the_router_gradient() -> None:
    moe = lively(MoE(SMALL))
    x = torch.randn(1, N_TOKENS, 32, generator=torch.Generator().manual_seed(1))
    gradients = []
    for weight in (0.0, 0.01):
        out, stats = moe(x)
        gradients.append(torch.autograd.grad(out.square().mean() + weight * stats.aux, moe.router.weight)[0])
    assert not torch.allclose(gradients[0], gradients[1], rtol=1e-4)


@pytest.mark.parametrize("counts", [[0, N_TOKENS, 0, 0], [N_TOKENS, 0, 0, 0], [0, 0, 1, N_TOKENS - 1], [10, 0, 27, 0]])
def test_empty_and_full_experts(counts: list[int]) -> None:
    """No tokens for one expert, all for another, on poisoned memory (NaN in pytorch/torchtitan#1237)."""
    moe = lively(MoE(SMALL.replace(experts_per_token=1)))
    poison = [torch.full((n, 32), math.nan) for n in (1, N_TOKENS, 2 * N_TOKENS)]  # freed, for the allocator to reuse
    del poison
    x = torch.randn(N_TOKENS, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    experts = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))[torch.randperm(N_TOKENS)]
    out = dispatch_experts(
        x, Routing(experts[:, None], torch.ones(N_TOKENS, 1)), moe.experts, reference.experts_on_rows
    )
    expected = torch.stack([moe.experts[e](row) for e, row in zip(experts.tolist(), x, strict=True)])
    assert relative_error(out, expected) < 1e-6
    assert (
        relative_error(*(torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in (out, expected)))
        < 1e-5
    )
    out.square().sum().backward()
    for count, expert in zip(counts, moe.experts, strict=True):
        for parameter in expert.parameters():
            assert torch.isfinite(parameter.grad).all()
            assert parameter.grad.any() == (count > 0)


def test_combination_is_the_same_bit_by_bit_every_time() -> None:
    moe = lively(MoE(SMALL))
    x = torch.randn(2, 300, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    results = []
    for _ in range(5):
        out, _ = moe(x)
        results.append((out, *torch.autograd.grad(out.square().sum(), [x, *moe.parameters()])))
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))


def test_ties_go_to_the_lower_expert() -> None:
    routing, stats = route(torch.zeros(1000, 8), 3)
    assert torch.equal(routing.experts_TK, torch.tensor([0, 1, 2]).expand(1000, 3))
    assert stats.expert_load_E.tolist() == pytest.approx([1 / 3] * 3 + [0] * 5)


def test_counts_equal_bincount() -> None:
    experts = torch.randint(0, 8, (100, 2), generator=torch.Generator().manual_seed(0))
    assert torch.equal(count_slots(experts, 8), experts.flatten().bincount(minlength=8))


def test_fp32_linear_equals_autograd_and_restores_the_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in ((9, 5), (3, 5))
    )
    torch.testing.assert_close(fp32_linear(x, w), x @ w.T)
    assert torch.autograd.gradcheck(fp32_linear, (x, w))
    torch.library.opcheck(fp32_linear, (x, w))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        fp32_linear(x.float(), w.float())
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_router_runs_in_fp32_under_autocast() -> None:
    """bf16 logits would tie, or change places, for many tokens."""
    moe = lively(MoE(SMALL))
    x = torch.randn(1, 500, 32, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        out, stats = moe(x)
    assert all(value.dtype == torch.float32 for value in stats)
    assert torch.equal(stats.expert_load_E, moe(x)[1].expert_load_E)
    assert torch.equal(stats.z_loss, moe(x)[1].z_loss)
    assert relative_error(out, moe(x)[0]) < 0.02


def test_an_absent_dispatch_falls_back_with_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    backends.select_experts.cache_clear()
    caplog.set_level(logging.WARNING)
    x = torch.randn(1, 5, 32)
    for _ in range(3):
        lively(MoE(SMALL.replace(moe_dispatch="triton_grouped")))(x)
        lively(MoE(SMALL))(x)
    assert [record.getMessage() for record in caplog.records] == [
        "moe_dispatch triton_grouped is not available in torch.float32: using reference"
    ]
