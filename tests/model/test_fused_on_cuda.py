"""The fused path on a GPU in bf16: against float64, on poisoned memory, bitwise repeatable, without a host sync."""

import math

import pytest
import torch
import torch.nn.functional as F
from small_models import GROUPED_FP8, hopper, relative_error
from syncs import syncs_refused

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.model.fused.block import FusedBlock
from gpt_oss_lite.model.fused.embedding import fused_embedding
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.loss import head_cross_entropy

pytestmark = pytest.mark.gpu

FUSED = ModelConfig(
    vocab_size=1000, d_model=256, n_layers=2, n_heads=8, n_kv_heads=4, head_dim=96, expert_hidden_size=512,
    max_seq_len=512, rope_scale=4.0,
)  # fmt: skip


def poison() -> None:
    """Leave NaN in memory that the allocator hands out next."""
    blocks = [torch.full((2**26,), float("nan"), device="cuda") for _ in range(16)]
    del blocks


def make_model(config: ModelConfig, router: str = "random") -> GPTOSS:
    """A model whose parameters are bf16 numbers, so that both precisions start from the same ones."""
    torch.manual_seed(0)
    model = GPTOSS(config).cuda()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sink_bias"):
                torch.nn.init.normal_(parameter, std=2.0)
            elif "norm" not in name:
                torch.nn.init.normal_(parameter, std=0.0 if "router" in name and router == "tied" else 0.05)
            parameter.copy_(parameter.bfloat16())
    return model


def float64_attention(model: GPTOSS, layer: int, x: torch.Tensor) -> torch.Tensor:
    """x + attention(norm(x)) written out in float64."""
    block, config = model.blocks[layer], model.config
    n_heads, n_kv, head_dim = config.n_heads, config.n_kv_heads, config.head_dim
    batch, seq_len, width = x.shape
    cos, sin = (table.double() for table in model.rotary.tables(torch.arange(seq_len, device=x.device)))

    def turn(part: torch.Tensor) -> torch.Tensor:
        first, second = part.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    h = F.rms_norm(x, (width,), block.attn_norm.weight.double(), config.norm_eps)
    q = (h @ block.attn.q_proj.weight.double().t()).view(batch, seq_len, n_heads, head_dim).transpose(1, 2)
    k, v = (h @ block.attn.kv_proj.weight.double().t()).view(batch, seq_len, 2, n_kv, head_dim).permute(2, 0, 3, 1, 4)
    q, k, v = turn(q), turn(k).repeat_interleave(n_heads // n_kv, 1), v.repeat_interleave(n_heads // n_kv, 1)
    positions = torch.arange(seq_len, device=x.device)
    distance = positions[:, None] - positions[None, :]
    hidden = (distance < 0) | (distance >= (config.layer_window(layer) or math.inf))
    scores = (q @ k.transpose(2, 3) / head_dim**0.5).masked_fill(hidden, -math.inf)
    sink = block.attn.sink_bias.double().clamp(-10, 15)[None, :, None, None].expand(batch, -1, seq_len, 1)
    probs = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    return x + (probs @ v).transpose(1, 2).reshape(batch, seq_len, -1) @ block.attn.o_proj.weight.double().t()


def float64_feed_forward(model: GPTOSS, layer: int, x: torch.Tensor) -> torch.Tensor:
    """x + experts(norm(x)) written out in float64; ties go to the lowest expert.

    The norm's output is rounded to bf16, as the experts get it, so that both precisions route a token alike.
    """
    block, config = model.blocks[layer], model.config
    h = F.rms_norm(x, (x.shape[-1],), block.moe_norm.weight.double(), config.norm_eps)
    h = h + (h.bfloat16().double() - h).detach()
    logits, experts = (h @ block.moe.router.weight.double().t()).sort(dim=-1, descending=True, stable=True)
    weights = torch.zeros_like(logits).scatter(-1, experts[..., :2], logits[..., :2].softmax(-1))

    def run(expert: torch.nn.Module) -> torch.Tensor:
        gate, up = h @ expert.gate_proj.weight.double().t(), h @ expert.up_proj.weight.double().t()
        return (F.silu(gate) * up) @ expert.down_proj.weight.double().t()

    routed = sum(weights[..., e, None] * run(expert) for e, expert in enumerate(block.moe.experts))
    return x + routed + run(block.moe.shared_experts[0])


def assert_within(bound, ours, theirs, names) -> None:
    for name, mine, right in zip(names, ours, theirs, strict=True):
        if right.norm() == 0:
            assert torch.count_nonzero(mine) == 0, name
        else:
            assert relative_error(mine, right) < bound, name


def assert_equals_float64(model, prefix, n_parameters, fused, exact, bound=1e-2) -> None:
    """Output and the gradients of x and of every parameter under `prefix` of the block, which are so many."""
    x = torch.randn(2, 512, 256, device="cuda").bfloat16().requires_grad_()
    upstream = torch.randn(2, 512, 256, device="cuda").bfloat16()
    names = [name for name, _ in model.named_parameters() if name.startswith(prefix)]
    parameters = [dict(model.named_parameters())[name] for name in names]
    assert len(names) == n_parameters
    poison()
    with torch.autocast("cuda", torch.bfloat16):
        y = fused(x)
    ours = torch.autograd.grad((y.float() * upstream.float()).sum(), [x, *parameters])
    exact_x = x.detach().double().requires_grad_()
    right = exact(exact_x)
    theirs = torch.autograd.grad((right * upstream.double()).sum(), [exact_x, *parameters])
    assert_within(bound, [y, *ours], [right, *theirs], ["y", "x", *names])


@pytest.mark.parametrize("layer", [0, 1])
def test_attention_and_every_gradient_are_within_one_percent_of_float64(layer):
    model = make_model(FUSED)
    halves, rotary = FusedBlock(FUSED, layer), model.rotary.tables(torch.arange(512, device="cuda"))
    assert_equals_float64(
        model, f"blocks.{layer}.attn", 5,  # norm, queries, keys and values, output, sinks
        lambda x: halves.attention(model.blocks[layer], x, rotary),
        lambda x: float64_attention(model, layer, x),
    )  # fmt: skip


# Two of three products of numbers with 3 bits of mantissa: about 4 % each, and what follows of them.
@pytest.mark.parametrize(
    ("moe_dispatch", "bound"),
    [("grouped", 0.01), ("triton_grouped", 0.01), pytest.param("grouped_fp8", 0.1, marks=hopper)],
)
@pytest.mark.parametrize("router", ["random", "tied"])
def test_experts_and_every_gradient_are_near_float64(router, moe_dispatch, bound):
    model = make_model(FUSED.replace(moe_dispatch=moe_dispatch), router)
    halves = FusedBlock(model.config, 0)
    loads = []

    def fused(x):
        y, stats = halves.feed_forward(model.blocks[0], x)
        loads.append(stats.expert_load_E)
        return y

    # Norm, router, and three matrices of 8 experts and of the shared one.
    assert_equals_float64(model, "blocks.0.moe", 2 + 3 * 9, fused, lambda x: float64_feed_forward(model, 0, x), bound)
    if router == "tied":  # two experts with every token, six with none
        assert loads[0].tolist() == [0.5, 0.5] + [0.0] * 6


@hopper
def test_eight_bits_are_for_training_alone():
    models = [make_model(FUSED.replace(moe_dispatch=dispatch)) for dispatch in ("grouped", "grouped_fp8")]
    ids = torch.randint(0, 1000, (2, 513), device="cuda")
    trained = [full_step(model, ids)[0] for model in models]
    assert trained[0] != trained[1]
    assert trained[1].item() == pytest.approx(trained[0].item(), rel=0.01)
    evaluated = [full_step(model.eval(), ids)[0] for model in models]
    assert torch.equal(*evaluated)


@pytest.mark.parametrize("tokens", ["like words", "one id"])
def test_embedding_and_its_gradient_are_those_of_float64_and_repeat_bit_by_bit(tokens):
    torch.manual_seed(0)
    n_rows, width, shape = 128_256, 768, (4, 4096)
    if tokens == "one id":
        ids = torch.full(shape, n_rows - 1, device="cuda")
    else:
        ids = torch.multinomial(1.0 / torch.arange(1, 50_001, device="cuda"), 4 * 4096, replacement=True).view(shape)
        ids = ids * 2 + 1  # so that half of the rows, and those at the end, have none
    weight = torch.randn(n_rows, width, device="cuda", requires_grad=True)
    upstream = torch.randn(*shape, width, device="cuda").bfloat16()
    results = []
    for _ in range(2):
        poison()
        rows = fused_embedding(ids, weight, torch.bfloat16)
        results.append((rows, *torch.autograd.grad(rows, weight, upstream)))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    rows, gradient = results[0]
    assert torch.equal(rows, F.embedding(ids, weight).bfloat16())
    exact, size = (torch.zeros(n_rows, width, dtype=torch.float64, device="cuda") for _ in range(2))
    exact.index_add_(0, ids.flatten(), upstream.double().flatten(0, 1))
    size.index_add_(0, ids.flatten(), upstream.double().abs().flatten(0, 1))
    assert gradient.dtype == torch.float32
    assert ((gradient - exact).abs() <= 1e-6 * size).all()  # and so 0 where there was nothing to add


def test_embedding_of_more_than_two_to_the_31_elements():
    width = 4096
    weight = torch.zeros(2**31 // width + 2, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    ids = torch.tensor([[len(weight) - 1, 0, len(weight) - 2, len(weight) - 1]], device="cuda")
    with torch.no_grad():
        weight[-1], weight[-2] = 3.0, 2.0
    rows = fused_embedding(ids, weight, torch.bfloat16)
    assert rows[0, :, 0].tolist() == rows[0, :, -1].tolist() == [3.0, 0.0, 2.0, 3.0]
    (gradient,) = torch.autograd.grad(rows, weight, torch.ones_like(rows))
    assert gradient[[0, 1, -2, -1], -1].tolist() == [1.0, 0.0, 1.0, 2.0]
    assert gradient.sum(dtype=torch.float64) == 4 * width


def full_step(model: GPTOSS, ids: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16):
        h, stats = model.hidden_states(ids[:, :-1])
        loss = head_cross_entropy(h, model.head.weight, ids[:, 1:], chunk_size=300) / ids[:, 1:].numel()
    (loss + 0.01 * stats.aux).backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("moe_dispatch", ["auto", GROUPED_FP8])
def test_two_steps_are_bitwise_equal_with_and_without_recomputation(moe_dispatch):
    model = make_model(FUSED.replace(moe_dispatch=moe_dispatch))
    ids = torch.randint(0, 1000, (2, 513), device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        first, again = full_step(model, ids), full_step(model, ids)
        model.enable_gradient_checkpointing(1)
        recomputed = full_step(model, ids)
    finally:
        torch.use_deterministic_algorithms(False)
    for other in (again, recomputed):
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("moe_dispatch", ["auto", GROUPED_FP8])
def test_no_host_sync_whatever_the_routing(moe_dispatch):
    model = make_model(FUSED.replace(moe_dispatch=moe_dispatch))
    full_step(model, torch.randint(0, 1000, (2, 513), device="cuda"))
    batches = [torch.randint(0, 1000, (2, 513), device="cuda") for _ in range(20)]
    expected = [full_step(model, ids)[0].item() for ids in batches]
    with syncs_refused():
        losses = [full_step(model, ids)[0] for ids in batches]
    assert torch.stack(losses).tolist() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("path", ["auto", "reference"])
def test_the_tied_matrix_gets_the_gradients_of_head_and_embedding(path):
    """Those of float64 for the embedding's part, from the gradient that reaches the first block."""
    model = make_model(FUSED.replace(attention_backend=path, moe_dispatch=path))
    lookups, upstream = [], []
    model.embed.register_forward_hook(lambda *_: lookups.append(1))
    ids = torch.randint(0, 500, (2, 513), device="cuda")

    def keep_gradient(_, inputs):
        inputs[0].register_hook(upstream.append)

    model.blocks[0].register_forward_pre_hook(keep_gradient)
    tied = full_step(model, ids)[1]
    assert len(lookups) == (path == "reference")
    model.head.weight = torch.nn.Parameter(model.embed.weight.detach().clone())
    full_step(model, ids)
    exact = torch.zeros(1000, 256, dtype=torch.float64, device="cuda")
    exact.index_add_(0, ids[:, :-1].flatten(), upstream[-1].double().flatten(0, 1))
    assert relative_error(model.embed.weight.grad, exact) < 1e-5
    assert relative_error(tied, model.head.weight.grad.double() + exact) < 1e-2
    assert tied[500:].abs().max() > 0  # of the head alone


@pytest.mark.parametrize("window", [None, 128])
def test_flex_attention_equals_the_reference_within_documents(window):
    from gpt_oss_lite.model.backends import flex, reference

    torch.manual_seed(0)
    q = torch.randn(2, 8, 512, 96, device="cuda", dtype=torch.bfloat16).requires_grad_()
    k, v = (torch.randn(2, 4, 512, 96, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    sinks = torch.randn(8, device="cuda").requires_grad_()
    documents = (torch.rand(2, 512, device="cuda") < 0.02).cumsum(1)
    upstream = torch.randn(2, 8, 512, 96, device="cuda", dtype=torch.bfloat16)
    results = []
    for backend in (flex, reference):
        o = backend.sink_attention(q, k, v, sinks, window=window, document_ids_BT=documents)
        results.append([o, *torch.autograd.grad((o * upstream).float().sum(), [q, k, v, sinks])])
    for ours, theirs in zip(*results, strict=True):
        assert relative_error(ours, theirs) < 1e-2
