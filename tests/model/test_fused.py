"""The fused path against plain PyTorch: in fp32, in Triton's interpreter on the CPU and on the GPU where there is one.

cuDNN's attention needs CUDA; in its place the CPU test puts an explicit softmax with the same contract, so that what is
ours around it (projections, RoPE, sinks, norms, gradients) is what is tested.
"""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="Triton is not installed: pip install triton==3.7.1")

from gpt_oss_lite.model.fused import attention as fused_attention_module
from gpt_oss_lite.model.fused import moe as fused_moe_module
from gpt_oss_lite.model.fused.attention import AttentionGeometry, fused_attention
from gpt_oss_lite.model.fused.block import grouped_products
from gpt_oss_lite.model.fused.moe import MoEGeometry, fused_moe
from gpt_oss_lite.model.fused.products import PRODUCTS
from gpt_oss_lite.model.fused.weights import joined_copy
from gpt_oss_lite.model.kernels.cross_entropy import cross_entropy_
from gpt_oss_lite.training.loss import head_cross_entropy, plain_chunk_kernel, triton_chunk_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5


def random(*shape, scale=1.0):
    return (torch.randn(*shape) * scale).to(DEVICE).requires_grad_()


def assert_close(actual, expected, tolerance=1e-5):
    error = (actual - expected).norm() / expected.norm().clamp_min(1e-12)
    assert error < tolerance, f"relative error {error:.2e}"


def plain_moe(x, gain, router, bias, gates, ups, downs, experts_per_token, clamped):
    """One token at a time in spirit: every expert on every token, weighted by its share."""
    h = F.rms_norm(x, (x.shape[-1],), gain, EPS)
    logits = h @ router.t() + (0 if bias is None else bias)
    probs = logits.softmax(-1)
    top, chosen = probs.topk(experts_per_token, dim=-1)
    weights = torch.zeros_like(probs).scatter(-1, chosen, top / top.sum(-1, keepdim=True))

    def expert(e):
        gate, up = h @ gates[e].t(), h @ ups[e].t()
        if clamped:
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            return (gate * torch.sigmoid(1.702 * gate) * (up + 1)) @ downs[e].t()
        return (F.silu(gate) * up) @ downs[e].t()

    n_experts = router.shape[0]
    y = x + sum(weights[..., e, None] * expert(e) for e in range(n_experts))
    if len(gates) > n_experts:
        y = y + expert(n_experts)
    load = F.one_hot(chosen, n_experts).float().sum((0, 1, 2)) / chosen.numel()
    aux = n_experts * (load * probs.mean((0, 1))).sum()
    return y, aux, logits.logsumexp(-1).square().mean(), load


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("n_shared", [0, 1])
@pytest.mark.parametrize("has_bias", [False, True])
def test_moe_and_all_gradients_equal_the_plain_computation(n_shared, has_bias, clamped):
    check_moe(4, 2, n_shared, has_bias, clamped)


@pytest.mark.parametrize(("n_experts", "used"), [(9, 3), (1, 1), (3, 3)])
def test_moe_of_any_number_of_experts_and_any_that_a_token_uses(n_experts, used):
    check_moe(n_experts, used, n_shared=0, has_bias=False, clamped=True)


def check_moe(n_experts, used, n_shared, has_bias, clamped):
    torch.manual_seed(0)
    width, hidden = 48, 40
    x, gain = random(2, 37, width), random(width)
    router = random(n_experts, width, scale=0.3)
    bias = random(n_experts) if has_bias else None
    # Large gates, so that the clamped form meets its limits.
    gates, ups = ([random(hidden, width, scale=0.6) for _ in range(n_experts + n_shared)] for _ in range(2))
    downs = [random(width, hidden, scale=0.2) for _ in range(n_experts + n_shared)]
    leaves = [x, gain, router, *([bias] if has_bias else []), *gates, *ups, *downs]

    y, aux, z_loss, load = plain_moe(x, gain, router, bias, gates, ups, downs, used, clamped)
    upstream = torch.randn_like(y)
    expected = torch.autograd.grad((y * upstream).sum() + 3.0 * aux + 0.5 * z_loss, leaves)

    geometry = MoEGeometry(n_experts, used, n_shared, EPS, clamped, PRODUCTS["triton_grouped"])
    fused_y, fused_aux, fused_z, fused_load, _ = fused_moe(x, geometry, gain, router, bias, gates, ups, downs)
    actual = torch.autograd.grad((fused_y * upstream).sum() + 3.0 * fused_aux + 0.5 * fused_z, leaves)

    assert_close(fused_y, y)
    assert_close(fused_aux, aux)
    assert_close(fused_z, z_loss)
    assert torch.equal(fused_load, load)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("capability", "name"),
    [((8, 0), "triton_grouped"), ((8, 9), "triton_grouped"), ((9, 0), "grouped"), ((10, 0), "grouped"),
     ((10, 3), "grouped"), ((11, 0), "triton_grouped"), ((12, 0), "triton_grouped")],
)  # fmt: skip
def test_auto_takes_pytorchs_grouped_products_where_they_do_not_wait_for_the_host(monkeypatch, capability, name):
    # On other cards PyTorch loops over the groups and reads their sizes for it (pytorch/pytorch#170955).
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    choose = grouped_products.__wrapped__  # without its cache
    assert choose("auto", training=True) == choose("auto", training=False) == name
    assert choose("grouped_fp8", training=True) == "grouped_fp8"
    assert choose("grouped_fp8", training=False) == name
    assert choose("triton_grouped", training=True) == choose("triton_grouped", training=False) == "triton_grouped"


def test_tied_logits_go_to_the_lowest_experts_and_idle_experts_get_zero_gradients():
    torch.manual_seed(0)
    n_experts, width, hidden = 8, 32, 24
    x, gain, router = random(1, 50, width), random(width), torch.zeros(n_experts, width, device=DEVICE).requires_grad_()
    gates, ups = ([random(hidden, width) for _ in range(n_experts)] for _ in range(2))
    downs = [random(width, hidden) for _ in range(n_experts)]
    y, aux, _, load, entropy = fused_moe(
        x, MoEGeometry(n_experts, 2, 0, EPS, False, PRODUCTS["triton_grouped"]), gain, router, None, gates, ups, downs
    )
    assert load.tolist() == [0.5, 0.5, 0, 0, 0, 0, 0, 0]
    assert aux.item() == pytest.approx(1.0, abs=1e-6)
    assert entropy.item() == pytest.approx(torch.tensor(8.0).log().item(), abs=1e-5)
    y.square().sum().backward()
    assert all(gates[e].grad.abs().max() > 0 for e in (0, 1))
    assert all(torch.equal(gates[e].grad, torch.zeros_like(gates[e])) for e in range(2, 8))


def test_an_output_that_is_kept_keeps_no_copy_of_the_weights(monkeypatch):
    """The losses of a step's micro-batches are kept until its end; each would hold 0.8 GB of the 502M model."""
    copies = []

    def recorded(groups, dtype):
        copy = joined_copy(groups, dtype)
        copies.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr(fused_moe_module, "joined_copy", recorded)
    width, hidden, n_experts = 16, 16, 2
    gates, ups = ([random(hidden, width) for _ in range(n_experts + 1)] for _ in range(2))
    downs = [random(width, hidden) for _ in range(n_experts + 1)]
    geometry = MoEGeometry(n_experts, 2, 1, EPS, False, PRODUCTS["triton_grouped"])
    y, aux, *_ = fused_moe(
        random(1, 20, width), geometry, random(width), random(n_experts, width), None, gates, ups, downs
    )
    (y.sum() + aux).backward()
    del y
    gc.collect()
    assert len(copies) == 3
    assert all(copy() is None for copy in copies)
    assert aux.grad_fn is not None


@pytest.mark.parametrize("recomputed", [False, True])
def test_recomputing_drops_the_copies_of_the_weights(monkeypatch, recomputed):
    """They live as long as the activations do, and gradients are the same either way."""
    torch.manual_seed(0)
    n_experts, width, hidden = 4, 32, 24
    x, gain, router = random(1, 20, width), random(width), random(n_experts, width, scale=0.3)
    gates, ups = ([random(hidden, width) for _ in range(n_experts + 1)] for _ in range(2))
    downs = [random(width, hidden) for _ in range(n_experts + 1)]
    leaves = [x, gain, router, *gates, *ups, *downs]
    geometry = MoEGeometry(n_experts, 2, 1, EPS, False, PRODUCTS["triton_grouped"])
    copies, joined_copy = [], fused_moe_module.joined_copy

    def observed(groups, dtype):
        joined = joined_copy(groups, dtype)
        copies.append(weakref.ref(joined))
        return joined

    monkeypatch.setattr(fused_moe_module, "joined_copy", observed)

    def forward(x):
        return fused_moe(x, geometry, gain, router, None, gates, ups, downs)[0]

    y = checkpoint(forward, x, use_reentrant=False) if recomputed else forward(x)
    routed = copies[:2]  # of the shared expert a part is kept as a view
    assert [copy() is None for copy in routed] == [recomputed] * 2
    gradients = torch.autograd.grad(y.square().sum(), leaves)
    for actual, expected in zip(gradients, torch.autograd.grad(forward(x).square().sum(), leaves), strict=True):
        assert torch.equal(actual, expected)


def test_a_step_of_a_fused_optimizer_is_seen_by_the_next_forward_pass():
    """Fused optimizers leave the parameters' version counters alone, so a copy kept by them would stay as it was."""
    torch.manual_seed(0)
    x, gain, router = random(1, 20, 32), random(32), random(4, 32)
    gates, ups = ([random(24, 32) for _ in range(5)] for _ in range(2))
    downs = [random(32, 24) for _ in range(5)]
    matrices = [*gates, *ups, *downs]
    geometry = MoEGeometry(4, 2, 1, EPS, False, PRODUCTS["triton_grouped"])
    optimizer = torch.optim.AdamW(matrices, lr=0.5, fused=True)
    before = fused_moe(x, geometry, gain, router, None, gates, ups, downs)[0]
    before.square().sum().backward()
    optimizer.step()
    after = fused_moe(x, geometry, gain, router, None, gates, ups, downs)[0]
    assert not torch.allclose(after, before, rtol=0.1)
    assert_close(after, plain_moe(x, gain, router, None, gates, ups, downs, 2, False)[0])


def softmax_forward(q, k, v):
    """An attention kernel's contract, written out: o (B, T, H, hd), lse (B, H, T)."""
    repeat = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(repeat, 1).transpose(2, 3) / q.shape[-1] ** 0.5
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])[None, :]
    scores = scores.masked_fill(distance < 0, float("-inf"))
    lse = scores.logsumexp(-1)
    o = (scores - lse[..., None]).exp() @ v.repeat_interleave(repeat, 1)
    return o.transpose(1, 2).contiguous(), lse, (scores,)


def softmax_backward(do, q, k, v, o, lse, state):
    repeat, (scores,) = q.shape[1] // k.shape[1], state
    p = (scores - lse[..., None]).exp()
    do, o = do.transpose(1, 2), o.transpose(1, 2)
    dp = do @ v.repeat_interleave(repeat, 1).transpose(2, 3)
    ds = p * (dp - (do * o).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
    heads = lambda x: x.unflatten(1, (-1, repeat)).sum(2)  # noqa: E731
    return ds @ k.repeat_interleave(repeat, 1), heads(ds.transpose(2, 3) @ q), heads(p.transpose(2, 3) @ do)


@pytest.mark.skipif(DEVICE == "cuda", reason="fp32: cuDNN's attention takes 16 bits, which test_fused_on_cuda.py tries")
@pytest.mark.parametrize(
    ("window", "has_sink", "n_heads", "n_kv", "head_dim"),
    [
        *[(window, has_sink, 4, 2, 12) for window in (None, 5, 64, 100) for has_sink in (False, True)],
        (100, True, 8, 2, 24),  # four query heads to a key head; a head in two tiles
        (100, True, 3, 1, 20),  # three; a tile with columns outside the head
        (5, False, 2, 2, 48),
    ],
)
def test_attention_and_all_gradients_equal_the_plain_computation(
    monkeypatch, window, has_sink, n_heads, n_kv, head_dim
):
    if DEVICE == "cpu":
        monkeypatch.setattr(fused_attention_module, "causal_attention", softmax_forward)
        monkeypatch.setattr(fused_attention_module, "causal_attention_backward", softmax_backward)
    torch.manual_seed(0)
    batch, seq_len, width, repeat = 2, 131, 40, n_heads // n_kv
    x, gain = random(batch, seq_len, width), random(width)
    # Two of them outside of what is clamped.
    sinks = torch.tensor([0.5, -11.0, 2.0, 16.0, -1.0, 1.0, 3.0, 0.0], device=DEVICE)[:n_heads]
    sink = sinks.requires_grad_() if has_sink else None
    q_proj, kv_proj = random(n_heads * head_dim, width, scale=0.4), random(2 * n_kv * head_dim, width, scale=0.4)
    o_proj = random(width, n_heads * head_dim)
    angle = torch.outer(torch.arange(seq_len), 0.3 ** torch.arange(head_dim // 2)).to(DEVICE)
    cos, sin = angle.cos(), angle.sin()
    leaves = [x, gain, *([sink] if has_sink else []), q_proj, kv_proj, o_proj]

    h = F.rms_norm(x, (width,), gain, EPS)
    q = (h @ q_proj.t()).view(batch, seq_len, n_heads, head_dim).transpose(1, 2)
    k, v = (h @ kv_proj.t()).view(batch, seq_len, 2, n_kv, head_dim).permute(2, 0, 3, 1, 4)

    def turn(part):
        first, second = part.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    q, k, v = turn(q), turn(k).repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = q @ k.transpose(2, 3) / head_dim**0.5
    distance = torch.arange(seq_len)[:, None] - torch.arange(seq_len)[None, :]
    scores = scores.masked_fill(((distance < 0) | (distance >= (window or 10**9))).to(DEVICE), float("-inf"))
    if has_sink:
        column = sink.clamp(-10, 15)[None, :, None, None].expand(batch, -1, seq_len, 1)
        probs = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    else:
        probs = scores.softmax(-1)
    y = x + (probs @ v).transpose(1, 2).reshape(batch, seq_len, -1) @ o_proj.t()
    upstream = torch.randn_like(y)
    expected = torch.autograd.grad((y * upstream).sum(), leaves)

    geometry = AttentionGeometry(n_heads, n_kv, head_dim, window, EPS)
    fused = fused_attention(x, geometry, cos, sin, gain, sink, q_proj, kv_proj, o_proj)
    actual = torch.autograd.grad((fused * upstream).sum(), leaves)
    assert_close(fused, y)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("vocabulary", [50, 8192, 20000])
def test_cross_entropy_and_gradient_equal_pytorchs(vocabulary):
    torch.manual_seed(0)
    logits = random(7, vocabulary, scale=5.0)
    target = torch.randint(0, vocabulary, (7,), device=DEVICE)
    target[3] = -100
    expected = F.cross_entropy(logits, target, reduction="none", ignore_index=-100)
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    replaced = logits.detach().clone()
    loss, factor = cross_entropy_(replaced, target, -100)
    assert_close(loss, expected)
    assert_close(replaced * factor[:, None], gradient)
    assert loss[3] == factor[3] == 0
    assert torch.count_nonzero(replaced[3]) == 0


def test_cross_entropy_of_logits_that_climb_far_above_where_their_row_began():
    torch.manual_seed(0)
    logits = random(6, 3 * 8192, scale=3.0).detach()
    logits[0, 8192:] += 60.0
    logits[1, 20000] = 300.0
    logits[2] += torch.arange(3, device=DEVICE).repeat_interleave(8192) * 100.0
    logits[3, 8192:] -= 500.0
    logits[4, :8192] = float("-inf")
    logits[5, 8192:] += 39.0
    target = torch.tensor([9000, 20000, 5, 10, 8192, 3], device=DEVICE)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, target, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    loss, factor = cross_entropy_(logits, target, -100)
    assert (loss - expected).abs().max() < 2e-5 * expected.abs().max()
    for ours, theirs in zip(logits * factor[:, None], gradient, strict=True):
        assert_close(ours, theirs)


def test_cross_entropy_of_logits_that_share_a_large_part_is_that_of_the_rest():
    torch.manual_seed(0)
    logits = random(4, 3000).detach() + torch.tensor([[1e4], [-1e4], [3e5], [0.0]], device=DEVICE)
    target = torch.tensor([0, 2999, 2048, 7], device=DEVICE)
    expected = F.cross_entropy(logits.double(), target, reduction="none")
    loss, _ = cross_entropy_(logits, target, -100)
    assert (loss - expected).abs().max() < 4e-6


@pytest.mark.parametrize("kernel", [plain_chunk_kernel, triton_chunk_kernel])
def test_a_chunk_of_extreme_rows_is_that_of_float64_and_its_ignored_rows_are_nothing(kernel):
    torch.manual_seed(0)
    vocabulary, steps = 4100, torch.arange(4100, device=DEVICE) // 2048
    logits = torch.randn(11, vocabulary).to(DEVICE)
    logits[0] *= 1e4
    logits[1] = 37.5
    logits[2, ::2] = float("-inf")
    logits[3, -1] = 1e4
    for row, climb in ((4, 39.0), (5, 41.0), (6, 1000.0)):
        logits[row] += climb * steps
    logits[7, 5], logits[8], logits[9], logits[10, 0] = float("nan"), float("nan"), float("-inf"), float("inf")
    target = torch.tensor([0, 4099, 2047, 4099, 4096, 2048, 0, -100, -100, -100, -100], device=DEVICE)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, target, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    loss, factor = kernel(logits, target, -100, True)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=4e-6)
    assert (logits * factor[:, None] - gradient)[:7].abs().max() < 1e-6  # PyTorch's NaN spreads from ignored rows
    assert not logits[7:].any()
    assert not factor[7:].any()
    for chunk_size in (1, 3, 11):  # the same through the head, whose rows are the logits
        h, head = exact[:7].detach().nan_to_num(neginf=-1e4).float(), torch.eye(vocabulary, device=DEVICE)
        rows = h.double().requires_grad_()
        (row_gradient,) = torch.autograd.grad(F.cross_entropy(rows, target[:7], reduction="sum"), rows)
        h.requires_grad_()
        total = head_cross_entropy(h[None], head, target[None, :7], chunk_size=chunk_size, kernel=kernel)
        assert (torch.autograd.grad(total, h)[0] - row_gradient).abs().max() < 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_cross_entropy_of_a_row_that_is_not_finite_is_nan_and_that_row_alone(bad):
    torch.manual_seed(0)
    logits = random(3, 9000).detach()
    logits[1, 8500] = bad
    loss, _ = cross_entropy_(logits, torch.tensor([1, 2, 3], device=DEVICE), -100)
    assert loss.isnan().tolist() == [False, True, False]


def test_cross_entropy_gives_a_scaled_copy_of_its_gradient_too():
    torch.manual_seed(0)
    logits = random(5, 300, scale=3.0).detach()
    target = torch.tensor([0, 299, -100, 7, 7], device=DEVICE)
    copy = torch.full_like(logits, float("nan"))
    _, factor = cross_entropy_(logits, target, -100, copy, 2.0**15)
    assert torch.equal(copy, logits * factor[:, None] * 2.0**15)
    assert copy[3, 7] < 0
    assert torch.count_nonzero(copy[2]) == 0
