"""The reference path on a GPU: what only shows there (TF32, autocast's casts, kernels that add atomically)."""

import pytest
import torch
from small_models import SMALL, lively, relative_error

from gpt_oss_lite.inference.generate import generate
from gpt_oss_lite.model.routing import fp32_linear
from gpt_oss_lite.model.transformer import GPTOSS

pytestmark = pytest.mark.gpu
REFERENCE = SMALL.replace(moe_dispatch="reference")


@pytest.fixture(autouse=True)
def tf32_allowed():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def test_router_products_are_never_tf32() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(4096, 768, device="cuda"), torch.randn(8, 768, device="cuda")
    x.requires_grad_(), w.requires_grad_()
    grad = torch.randn(4096, 8, device="cuda")
    exact = [x.double() @ w.double().T, grad.double() @ w.double(), grad.double().T @ x.double()]
    logits = fp32_linear(x, w)
    for ours, theirs in zip([logits, *torch.autograd.grad(logits, [x, w], grad)], exact, strict=True):
        assert relative_error(ours, theirs) < 1e-6
    assert torch.get_float32_matmul_precision() == "high"


def test_bf16_autocast_stays_near_fp32_and_repeats_bit_by_bit() -> None:
    model = lively(GPTOSS(REFERENCE), std=0.1).cuda()
    ids = torch.randint(0, 61, (2, 600), generator=torch.Generator().manual_seed(0)).cuda()
    dtypes = []
    model.blocks[1].register_forward_pre_hook(lambda _, inputs: dtypes.append(inputs[0].dtype))
    with torch.no_grad():
        exact, _ = model(ids)
    results = []
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            logits, aux = model(ids)
        (logits.float().square().mean() + aux).backward()
        results.append([logits, *(parameter.grad.clone() for parameter in model.parameters())])
    assert dtypes == [torch.float32] + [torch.bfloat16] * 3
    assert logits.dtype == torch.bfloat16
    # A router's near-tie may go the other way in bf16 (on a CPU too), and that token's logits with it.
    off_BT = (logits.float() - exact).abs().amax(dim=-1) / exact.abs().max()
    assert off_BT.flatten().quantile(0.95) < 0.02
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))


@pytest.mark.parametrize("every", [1, 2])
def test_checkpointing_changes_no_gradient_with_an_all_tied_router(every: int) -> None:
    model = lively(GPTOSS(REFERENCE)).cuda()
    with torch.no_grad():
        for block in model.blocks:
            block.moe.router.weight.zero_()
    ids = torch.randint(0, 61, (2, 600), generator=torch.Generator().manual_seed(0)).cuda()
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.enable_gradient_checkpointing(every)
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            logits, aux = model(ids)
        (logits.float().square().mean() + aux).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_greedy_decoding_in_fp32_equals_the_cpu() -> None:
    model = lively(GPTOSS(REFERENCE.replace(dtype="fp32")))
    torch.set_float32_matmul_precision("highest")
    prompts = [[1, 2, 3], [4], [5] * 20]
    on_cpu = generate(model, prompts, 20, temperature=0)
    assert generate(model.cuda(), prompts, 20, temperature=0) == on_cpu


def test_bf16_decoding_runs_and_repeats() -> None:
    model = lively(GPTOSS(REFERENCE)).cuda()
    first = generate(model, [[1, 2, 3]] * 2, 20, seed=1, top_p=0.9)
    assert first == generate(model, [[1, 2, 3]] * 2, 20, seed=1, top_p=0.9)
    assert all(len(sample.ids) == 20 for sample in first)
