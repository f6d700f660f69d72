"""The head in 8-bit floats: exact for what the rounded numbers are, near what the unrounded ones would give."""

import pytest
import tiny_run
import torch
import torch.nn.functional as F
from tiny_run import ROOT

from gpt_oss_lite.config.recipe import load_recipe
from gpt_oss_lite.training.fp8 import GRADIENT_SCALE, _quantized, check_fp8
from gpt_oss_lite.training.loss import head_cross_entropy
from gpt_oss_lite.training.memory import estimate_recipe
from gpt_oss_lite.training.pretrain import PretrainOptions, pretrain
from shared_data.errors import UserError

pytest.importorskip("triton", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def relative_error(ours, right):
    return ((ours.double() - right.double()).norm() / right.double().norm()).item()


def rounded(x):
    """To E4M3, the largest magnitude becoming 448, and back, in float64."""
    scale = x.abs().max() / 448
    return (x / scale).to(torch.float8_e4m3fn).double() * scale.double()


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    h = torch.randn(48, 32).to(DEVICE, dtype).requires_grad_()
    weight = (torch.randn(160, 32) * 0.2).to(DEVICE).requires_grad_()
    targets = torch.randint(0, 160, (48,), device=DEVICE)
    targets[::7] = -100
    return h, weight, targets


@pytest.mark.skipif(DEVICE == "cuda", reason="in fp32, which the GPU's 8-bit products do not give out")
def test_loss_and_gradients_are_those_of_the_rounded_numbers(inputs):
    h, weight, targets = inputs
    head_cross_entropy(h, weight, targets, chunk_size=48, fp8=True).backward()

    h8, w8 = rounded(h.detach()).requires_grad_(), rounded(weight.detach())
    logits = (h8 @ w8.t()).detach().requires_grad_()
    loss = F.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)
    (gradient,) = torch.autograd.grad(loss, logits)
    with torch.no_grad():
        assert relative_error(head_cross_entropy(h, weight, targets, chunk_size=48), loss) < 0.05  # not in 8 bits
    ours = head_cross_entropy(h, weight, targets, chunk_size=48, fp8=True)
    assert relative_error(ours, loss) < 1e-5
    gradient8 = (gradient.float() * GRADIENT_SCALE).to(torch.float8_e5m2).double() / GRADIENT_SCALE
    assert relative_error(h.grad, gradient8 @ w8) < 1e-2  # a number on the edge may round either way
    assert relative_error(weight.grad, gradient.t() @ h.detach().double()) < 1e-5


def test_it_is_near_the_unrounded_computation_in_every_chunking(inputs):
    h, weight, targets = inputs
    exact_h, exact_w = h.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact = F.cross_entropy(exact_h @ exact_w.t(), targets, reduction="sum", ignore_index=-100)
    exact.backward()
    for chunk_size in (48, 16, 20):
        h.grad = weight.grad = None
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            loss = head_cross_entropy(h, weight, targets, chunk_size=chunk_size, fp8=True)
        loss.backward()
        assert relative_error(loss, exact) < 0.01
        assert relative_error(h.grad, exact_h.grad) < 0.1
        assert relative_error(weight.grad, exact_w.grad) < 0.05


def test_numbers_in_bf16_are_rounded_once_with_a_scale_in_fp32():
    torch.manual_seed(0)
    x = (torch.randn(500, 96) * 0.03).to(DEVICE, torch.bfloat16)
    x[0, 0] = 1.1  # 1.1 / 448 is no number of bf16
    x8, scale = _quantized(x)
    assert torch.equal(scale, x[0, 0].float() / 448)
    right = (x.double() / scale.double()).float().to(torch.float8_e4m3fn)
    assert (x8.float() != right.float()).double().mean() < 1e-3  # a number on the edge may round either way


@pytest.mark.gpu
def test_the_hidden_states_gradient_sums_a_whole_vocabulary():
    """Most of its 128,256 terms are tiny: an accumulator of few bits drops them, and the gradient is 70 % off."""
    torch.manual_seed(0)
    h = F.rms_norm(torch.randn(256, 768, device=DEVICE), (768,)).bfloat16().requires_grad_()
    weight = (torch.randn(128_256, 768, device=DEVICE) + torch.randn(768, device=DEVICE)) * 0.03  # with a common part
    targets = torch.randint(128_256, (256,), device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        head_cross_entropy(h, weight.requires_grad_(), targets, chunk_size=256, fp8=True).backward()
    exact_h, exact_w = h.detach().double().requires_grad_(), weight.detach().double()
    F.cross_entropy(exact_h @ exact_w.t(), targets, reduction="sum").backward()
    assert relative_error(h.grad, exact_h.grad) < 0.06


H200 = ROOT / "configs/pretrain_h200_502m.yaml"
HEAD, EXPERTS = ("training.fp8_head", "true"), ("model.moe_dispatch", "grouped_fp8")


@pytest.mark.parametrize(("key", "value"), [HEAD, EXPERTS])
def test_it_is_refused_where_it_cannot_run(tmp_path, key, value):
    if DEVICE == "cpu":
        recipe = tiny_run.write_recipe(tmp_path / "tiny.yaml", tiny_run.make_corpus(tmp_path / "corpus"))
        with pytest.raises(UserError, match=f"^the device is cpu; {key} is {value}: it needs a GPU"):
            pretrain(PretrainOptions(config=recipe, out=tmp_path / "run", overrides=[f"{key}={value}"]))
        assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match=f"^the device is cpu; {key} is {value}: it needs a GPU"):
        check_fp8(load_recipe(H200, [f"{key}={value}"]), torch.device("cpu"))
    check_fp8(load_recipe(H200), torch.device("cpu"))


@pytest.mark.parametrize(
    ("setting", "refused", "allowed"),
    [
        (HEAD, ["8.0", "8.6"], "8.9 or later (Ada, Hopper), set it to false"),
        (EXPERTS, ["8.0", "8.6", "8.9", "10.0", "10.3", "12.0"], "9.0 (Hopper), set it to auto"),
    ],
)
def test_it_is_refused_on_cards_without_such_products(monkeypatch, setting, refused, allowed):
    key, value = setting
    recipe, said = load_recipe(H200, [f"{key}={value}"]), {}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Card")
    for capability in ("8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0"):
        has = tuple(map(int, capability.split(".")))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, has=has: has)
        try:
            check_fp8(recipe, torch.device("cuda"))
        except UserError as error:
            said[capability] = str(error)
    needs = f"it needs a GPU of compute capability {allowed}"
    assert said == {one: f"Card has {one}; {key} is {value}: {needs}" for one in refused}


def test_both_keys_are_named_at_once(monkeypatch):
    recipe = load_recipe("pretrain_h200_502m_fp8")
    head = "training.fp8_head is true: it needs a GPU of compute capability 8.9 or later (Ada, Hopper), set it to false"
    experts = "model.moe_dispatch is grouped_fp8: it needs a GPU of compute capability 9.0 (Hopper), set it to auto"
    with pytest.raises(UserError) as refused:
        check_fp8(recipe, torch.device("cpu"))
    assert str(refused.value) == f"the device is cpu; {head}; {experts}"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(UserError) as refused:
        check_fp8(recipe, torch.device("cuda"))
    assert str(refused.value) == f"Card has 8.0; {head}; {experts}"


def test_both_keys_are_named_at_once_where_a_recipe_does_not_go_with_them():
    with pytest.raises(UserError) as refused:
        load_recipe("pretrain_h200_502m_fp8", ["model.dtype=fp32", "model.expert_hidden_size=1528"])
    assert str(refused.value).endswith(
        "training.fp8_head is true: it goes with model.dtype bf16, not fp32; model.moe_dispatch is grouped_fp8: it "
        "goes with model.dtype bf16, not fp32, model.expert_hidden_size is 1528, it must be a multiple of 16"
    )


@pytest.mark.parametrize(("key", "value"), [HEAD, EXPERTS])
@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("model.d_model=776", "model.d_model is 776, it must be a multiple of 16"),
        ("model.dtype=fp32", "it goes with model.dtype bf16, not fp32"),
    ],
)
def test_it_goes_with_bf16_and_multiples_of_16(key, value, other, said):
    with pytest.raises(UserError, match=f"{key} is {value}: {said}"):
        load_recipe(H200, [f"{key}={value}", other])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["model.padded_vocab_size=128264"], "model.padded_vocab_size is 128264"),
        (["model.padded_vocab_size=null", "model.vocab_size=128001"], "model.vocab_size is 128001"),
    ],
)
def test_the_head_names_the_key_that_has_its_rows(rows, said):
    with pytest.raises(UserError, match=f"training.fp8_head is true: {said}, it must be a multiple of 16"):
        load_recipe(H200, ["training.fp8_head=true", *rows])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("model.expert_hidden_size=1528", "model.expert_hidden_size is 1528, it must be a multiple of 16"),
        ("model.expert_bias=true", "it goes with model.expert_bias false"),
        ("model.residual_dtype=fp32", "it goes with model.residual_dtype bf16, not fp32"),
        ("training.expert_parallel_size=2", "it goes with training.expert_parallel_size 1, not 2"),
    ],
)
def test_experts_in_eight_bits_are_those_of_the_fused_path(other, said):
    with pytest.raises(UserError, match=f"model.moe_dispatch is grouped_fp8: {said}"):
        load_recipe(H200, ["model.moe_dispatch=grouped_fp8", other])


def test_the_estimate_counts_the_experts_eight_bit_rows():
    settings = ["training.micro_batch_size=16", "training.grad_checkpoint=true", "training.grad_checkpoint_every=1"]
    plain, fp8 = (
        estimate_recipe(load_recipe(H200, [*settings, f"model.moe_dispatch={dispatch}"])).items
        for dispatch in ("auto", "grouped_fp8")
    )
    beyond = "backward pass of the last block"
    assert fp8[beyond] - plain[beyond] == 16 * 4096 * ((1 + 2) * 768 + 3 * 2 * 1536)


def test_the_estimate_counts_the_eight_bit_copies():
    plain, fp8 = (estimate_recipe(load_recipe(H200, [f"training.fp8_head={flag}"])).items for flag in ("false", "true"))
    chunk = "head: chunk of 16,384 tokens"
    assert fp8[chunk] - plain[chunk] == 16384 * 128256 + 2 * 128256 * 768
