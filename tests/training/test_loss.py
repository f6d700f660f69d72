"""Head and cross-entropy over chunks, against F.cross_entropy on whole logits."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from gpt_oss_lite.training.loss import chunked_cross_entropy, head_cross_entropy, head_token_losses

N_BATCH, T, D, V = 2, 11, 6, 50


def problem(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(N_BATCH, T, D, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(0, V, (N_BATCH, T), generator=generator)
    targets[0, 3:6] = -100
    return h, weight, targets


def plain_sum(h, weight, targets):
    return F.cross_entropy((h @ weight.T).flatten(0, 1), targets.flatten(), reduction="sum")


@pytest.mark.parametrize("chunk_size", [1, 4, 7, 22, 1000])
def test_sum_and_gradients_are_those_of_whole_logits(chunk_size):
    h, weight, targets = problem()
    expected = plain_sum(h, weight, targets)
    expected_h, expected_w = torch.autograd.grad(expected / 19, (h, weight))
    loss = head_cross_entropy(h, weight, targets, chunk_size=chunk_size)
    grad_h, grad_w = torch.autograd.grad(loss / 19, (h, weight))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad_h, expected_h, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(grad_w, expected_w, rtol=1e-5, atol=1e-7)


def test_gradients_in_float64_by_finite_differences():
    h, weight, targets = problem(torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: head_cross_entropy(h, w, targets, chunk_size=5), (h, weight))


def test_extreme_logits_stay_finite():
    h, weight, targets = problem()
    loss = head_cross_entropy(h * 1e4, weight, targets, chunk_size=4)
    torch.testing.assert_close(loss, plain_sum(h * 1e4, weight, targets), rtol=1e-6, atol=0)


def test_everything_ignored_is_zero_with_zero_gradient():
    h, weight, targets = problem()
    loss = head_cross_entropy(h, weight, torch.full_like(targets, -100), chunk_size=4)
    grad_h, grad_w = torch.autograd.grad(loss, (h, weight))
    assert loss == 0
    assert not grad_h.any()
    assert not grad_w.any()


def test_nan_in_a_counted_row_is_a_nan_loss_and_in_an_ignored_row_is_none():
    h, weight, targets = problem()
    bad = h.detach().clone()
    bad[1, 2] = torch.nan
    assert head_cross_entropy(bad, weight, targets, chunk_size=4).isnan()
    ignored = h.detach().clone()
    ignored[0, 4] = torch.nan
    loss = head_cross_entropy(ignored, weight, targets, chunk_size=4)
    torch.testing.assert_close(loss, plain_sum(h, weight, targets))


def test_tied_weight_gets_both_gradients():
    _, weight, targets = problem()
    ids = targets.clamp(min=0)
    expected = torch.autograd.grad(plain_sum(F.embedding(ids, weight), weight, targets), weight)[0]
    loss = head_cross_entropy(F.embedding(ids, weight), weight, targets, chunk_size=3)
    torch.testing.assert_close(torch.autograd.grad(loss, weight)[0], expected, rtol=1e-5, atol=1e-6)


def test_autocast_computes_in_bf16_and_sums_in_fp32():
    h, weight, targets = problem()
    with torch.autocast("cpu", torch.bfloat16):
        loss = head_cross_entropy(h, weight, targets, chunk_size=4)
    grad_h, grad_w = torch.autograd.grad(loss, (h, weight))
    exact = plain_sum(h.bfloat16().double(), weight.bfloat16().double(), targets)
    assert loss.dtype == grad_h.dtype == grad_w.dtype == torch.float32
    assert loss.item() != plain_sum(h, weight, targets).item()
    torch.testing.assert_close(loss.double(), exact, rtol=5e-3, atol=0)


def test_what_multiplies_the_loss_is_not_rounded_to_the_compute_dtype():
    h, weight, targets = problem()
    with torch.autocast("cpu", torch.bfloat16):
        loss = head_cross_entropy(h, weight, targets, chunk_size=4)
    third = torch.tensor(1 / 3)  # 0.2 % larger in bf16
    whole, scaled = (torch.autograd.grad(loss, (h, weight), factor, retain_graph=True) for factor in (None, third))
    for of_one, of_third in zip(whole, scaled, strict=True):
        assert torch.equal(of_third, of_one * third)


class _LargestTensors(TorchDispatchMode):
    """Records the largest tensor that any operation returns, and how many buffers of at least `size` lived at once."""

    def __init__(self, size):
        super().__init__()
        self.size, self.largest, self.most_alive, self._seen = size, 0, 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
                if tensor.numel() >= self.size:
                    self._seen.append(weakref.ref(tensor))
        alive = {tensor.data_ptr() for ref in self._seen if (tensor := ref()) is not None}
        self.most_alive = max(self.most_alive, len(alive))
        return result


def test_never_more_than_one_chunk_of_logits_is_alive_forward_or_backward():
    n, d, v, chunk = 64, 4, 100, 8
    h = torch.randn(1, n, d, requires_grad=True)
    weight = torch.randn(v, d, requires_grad=True)
    targets = torch.randint(0, v, (1, n))
    with _LargestTensors(chunk * v) as seen:
        head_cross_entropy(h, weight, targets, chunk_size=chunk).backward()
    assert seen.largest == chunk * v  # the whole logits would be 6,400
    assert seen.most_alive == 1
    with _LargestTensors(chunk * v) as seen:
        chunked = torch.nn.functional.linear(h, weight)
        chunked_cross_entropy(chunked, targets, chunk_size=chunk).backward()
    assert seen.largest == n * v  # the measure sees what it is to see


def test_token_losses_are_those_of_pytorch():
    h, weight, targets = problem()
    expected = F.cross_entropy((h @ weight.T).flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    torch.testing.assert_close(head_token_losses(h, weight, targets, chunk_size=5), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk_size", [1, 5, 22, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunked_cross_entropy_equals_pytorchs(chunk_size, dtype):
    h, weight, targets = problem()
    logits = (h @ weight.T).detach().to(dtype).requires_grad_()
    expected = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    loss = chunked_cross_entropy(logits, targets, chunk_size=chunk_size)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], torch.autograd.grad(expected, logits)[0])


def test_chunked_cross_entropy_of_nothing_is_nan_as_in_pytorch():
    assert chunked_cross_entropy(torch.randn(3, 4), torch.full((3,), -100)).isnan()


@pytest.mark.gpu
def test_right_above_2_to_the_31_logits():
    n, d, v = 17_000, 64, 128_256  # 2.18e9 logits, in one chunk if the size allowed it
    h = torch.randn(1, n, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(v, d, device="cuda") * 0.1).requires_grad_()
    targets = torch.randint(0, v, (1, n), device="cuda")
    loss = head_cross_entropy(h, weight, targets, chunk_size=n)
    loss.backward()
    reference = sum(
        F.cross_entropy(
            h[0, s : s + 1000].float() @ weight.bfloat16().float().T, targets[0, s : s + 1000], reduction="sum"
        )
        for s in range(0, n, 1000)
    )
    torch.testing.assert_close(loss, reference, rtol=1e-4, atol=0)
    last = torch.softmax(h[0, -1].detach().float() @ weight.detach().bfloat16().float().T, -1)
    last[targets[0, -1]] -= 1
    expected = last @ weight.detach().bfloat16().float()
    assert (h.grad[0, -1].float() - expected).norm() < 1e-2 * expected.norm()
