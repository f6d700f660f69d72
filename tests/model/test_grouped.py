"""Experts by PyTorch's grouped products, in bf16: against a float64 loop; and compiled, once for all routings."""

import pytest
import torch
from small_models import GPT_OSS_VARIANT, SMALL, lively, relative_error

from gpt_oss_lite.model.backends import grouped, select_experts
from gpt_oss_lite.model.backends.rows import dispatch_experts
from gpt_oss_lite.model.moe import MoE
from gpt_oss_lite.model.routing import Routing
from gpt_oss_lite.model.transformer import GPTOSS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = 24


def distance(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Length of the difference beside the oracle's length."""
    return ((ours.double() - exact).norm() / exact.norm()).item()


def routing_of(kind: str, n_experts: int) -> Routing:
    """Experts 0 and 1 for all tokens, so that the others have none; or two of all at random."""
    experts = torch.rand(TOKENS, n_experts).argsort(dim=-1)[:, :2]
    if kind == "two experts take all":
        experts = torch.tensor([[0, 1]]).expand(TOKENS, 2).contiguous()
    return Routing(experts.to(DEVICE), torch.rand(TOKENS, 2).softmax(-1).to(DEVICE))


def token_by_token(x: torch.Tensor, routing: Routing, moe: MoE) -> torch.Tensor:
    """The definition, in the modules' own dtype."""
    rows = []
    for token, chosen, weights in zip(x, routing.experts_TK.tolist(), routing.weights_TK, strict=True):
        rows.append(sum(weight * moe.experts[expert](token) for expert, weight in zip(chosen, weights, strict=True)))
    return torch.stack(rows)


@pytest.mark.parametrize("config", [SMALL, GPT_OSS_VARIANT], ids=["plain", "with biases, clamped"])
@pytest.mark.parametrize("kind", ["random", "two experts take all"])
def test_outputs_and_gradients_are_within_one_percent_of_float64(config, kind):
    torch.manual_seed(0)
    moe = lively(MoE(config)).to(DEVICE)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(parameter.bfloat16())
    exact_moe = MoE(config).to(DEVICE).double()
    exact_moe.load_state_dict(moe.state_dict())
    x = torch.randn(TOKENS, config.d_model, device=DEVICE).bfloat16().requires_grad_()
    routing = routing_of(kind, config.n_experts)
    upstream = torch.randn(TOKENS, config.d_model, device=DEVICE).bfloat16()
    with torch.autocast(DEVICE, torch.bfloat16):
        y = dispatch_experts(x, routing, moe.experts, grouped.experts_on_rows)
    (y.float() * upstream.float()).sum().backward()

    exact_x = x.detach().double().requires_grad_()
    exact = token_by_token(exact_x, Routing(routing.experts_TK, routing.weights_TK.double()), exact_moe)
    (exact * upstream.double()).sum().backward()
    assert distance(y, exact) < 1e-2
    assert distance(x.grad, exact_x.grad) < 1e-2
    for (name, ours), theirs in zip(moe.experts.named_parameters(), exact_moe.experts.parameters(), strict=True):
        if theirs.grad is None:  # the loop never touched it
            assert torch.count_nonzero(ours.grad) == 0, name
        else:
            assert distance(ours.grad, theirs.grad) < 1e-2, name


def test_which_dispatch_serves():
    bf16, fp32 = torch.bfloat16, torch.float32
    names = {
        (dispatch, device, dtype): select_experts(dispatch, device, dtype).__module__.rpartition(".")[2]
        for dispatch in ("auto", "reference", "grouped", "triton_grouped")
        for device in ("cpu", "cuda")
        for dtype in (bf16, fp32)
    }
    served = {key for key, name in names.items() if name == "grouped"}
    assert served == {
        ("auto", "cuda", bf16), ("grouped", "cpu", bf16), ("grouped", "cuda", bf16), ("triton_grouped", "cpu", bf16),
        ("triton_grouped", "cuda", bf16),
    }  # fmt: skip


@pytest.mark.parametrize("config", [SMALL, GPT_OSS_VARIANT], ids=["plain", "GPT-OSS's variant"])
def test_the_model_compiles_whole_and_once_for_twenty_routings(config):
    """On a CPU without Inductor's minutes: graph breaks and recompilations are decided before it."""
    torch._dynamo.reset()
    # As in a run that compiles: neither half is the fused one.
    attention = "flex" if DEVICE == "cuda" else "reference"
    config = config.replace(moe_dispatch="grouped", n_layers=2, attention_backend=attention, expert_bias=True)
    model = lively(GPTOSS(config), std=0.1).to(DEVICE)
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(model.hidden_states, fullgraph=True, backend=backend)
    loads = []
    for step in range(22):
        ids = torch.randint(0, 61, (2, 40), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(step))
        with (
            torch.autocast(DEVICE, torch.bfloat16),
            torch._dynamo.config.patch(error_on_recompile=step >= 2),
        ):
            h, stats = compiled(ids)
        (h.float().square().mean() + stats.aux).backward()
        loads.append(stats.expert_load)
    assert len({tuple(load.flatten().tolist()) for load in loads}) > 15  # the routings do differ
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        plain, plain_stats = model.hidden_states(ids)
    # On a GPU the compiler rounds otherwise, which may send a token elsewhere.
    if DEVICE == "cpu" or torch.equal(plain_stats.expert_load, loads[-1]):
        assert relative_error(h, plain) < 0.05
