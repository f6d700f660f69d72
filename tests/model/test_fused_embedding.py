"""The fused embedding against PyTorch's lookup and float64 sums: in fp32 and fp16, in Triton's interpreter on the CPU
and on the GPU where there is one. Memory that nothing was written to is NaN throughout."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is not installed: pip install triton==3.7.1")

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.model.fused.block import why_not_fused_ends
from gpt_oss_lite.model.fused.embedding import fused_embedding
from gpt_oss_lite.model.kernels.embedding import CHUNK

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def nan_in_fresh_memory():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def lookup_and_gradient(ids, weight, dtype, upstream):
    weight = weight.clone().requires_grad_()
    rows = fused_embedding(ids, weight, dtype)
    (gradient,) = torch.autograd.grad(rows, weight, upstream)
    return rows, gradient


def float64_gradient(ids, n_rows, upstream):
    sums = torch.zeros(n_rows, upstream.shape[-1], dtype=torch.float64, device=DEVICE)
    return sums.index_add(0, ids.flatten(), upstream.double().flatten(0, 1))


def zipf(n_tokens, n_rows):
    """Ids as frequent as words: the commonest spans many chunks, most others lie within one."""
    weights = 1.0 / torch.arange(1, n_rows + 1)
    ids = torch.multinomial(weights, n_tokens, replacement=True)
    return torch.randperm(n_rows)[ids]


IDS = {
    "one token": torch.tensor([6]),
    "all different": torch.arange(3 * CHUNK).flip(0),
    "runs that end with the chunks": torch.arange(4).repeat_interleave(CHUNK),
    "runs that end one later": torch.arange(5).repeat_interleave(CHUNK)[: 4 * CHUNK + 1].roll(1),
    "one id": torch.full((CHUNK * (CHUNK + 1) + 5,), 3),
    "two ids, the last in more chunks than are added at a time": torch.tensor([5] + [99] * (CHUNK * (2 * CHUNK + 1))),
}


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS.keys())
def test_gradient_is_the_sum_of_float64_whatever_the_runs(ids):
    torch.manual_seed(0)
    ids = ids[None].to(DEVICE)
    weight, upstream = (torch.randn(*shape).to(DEVICE) for shape in ((100, 24), (*ids.shape, 24)))
    rows, gradient = lookup_and_gradient(ids, weight, torch.float32, upstream)
    assert torch.equal(rows, F.embedding(ids, weight))
    torch.testing.assert_close(gradient.double(), float64_gradient(ids, 100, upstream), rtol=1e-5, atol=1e-4)


# First tokens of windows, which is what T = 1 leaves, and every second of one window: both stay views when flattened.
@pytest.mark.parametrize("ids", [torch.arange(20).view(10, 2)[:, :-1], torch.arange(20)[None, ::2]])
def test_ids_that_do_not_lie_together_are_read_by_their_strides(ids):
    ids, weight = ids.to(DEVICE), torch.randn(20, 24).to(DEVICE)
    upstream = torch.randn(*ids.shape, 24).to(DEVICE)
    rows, gradient = lookup_and_gradient(ids, weight, torch.float32, upstream)
    assert torch.equal(rows, F.embedding(ids, weight))
    assert torch.equal(gradient.double(), float64_gradient(ids, 20, upstream))


@pytest.mark.parametrize("width", [40, 128, 200])
def test_rows_and_gradient_in_16_bits_of_frequencies_like_words(width):
    torch.manual_seed(0)
    ids = zipf(2 * 300, 500).view(2, 300).to(DEVICE)
    weight, upstream = torch.randn(500, width).to(DEVICE), torch.randn(2, 300, width).half().to(DEVICE)
    rows, gradient = lookup_and_gradient(ids, weight, torch.float16, upstream)
    assert torch.equal(rows, F.embedding(ids, weight).half())
    expected = float64_gradient(ids, 500, upstream)
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-5)
    absent = torch.ones(500, dtype=torch.bool, device=DEVICE).index_fill(0, ids.flatten(), False)
    assert absent.sum() > 100
    assert torch.count_nonzero(gradient[absent]) == 0
    assert torch.equal(lookup_and_gradient(ids, weight, torch.float16, upstream)[1], gradient)


def test_a_gradient_that_is_not_finite_stays_in_its_row_and_strides_do_not_matter():
    torch.manual_seed(0)
    ids = zipf(130, 20)[None].to(DEVICE)
    rare = ids.flatten().bincount(minlength=20)[ids].argmin()
    upstream = torch.randn(24, 130).to(DEVICE).t()[None]
    upstream[0, rare] = float("nan")
    _, gradient = lookup_and_gradient(ids, torch.randn(20, 24).to(DEVICE), torch.float32, upstream)
    assert gradient.isnan().all(dim=1).nonzero().flatten().tolist() == [ids[0, rare].item()]
    assert gradient.isnan().any(dim=1).sum() == 1


@pytest.mark.skipif(DEVICE == "cuda", reason="there the device raises, and is of no more use to the process")
@pytest.mark.parametrize("bad", [-1, 7])
def test_an_id_outside_the_matrix_is_an_error(bad):
    with pytest.raises(RuntimeError, match=r"a token id is not in \[0, 7\)"):
        fused_embedding(torch.tensor([[0, bad, 6]]), torch.randn(7, 8), torch.float32)


def test_it_serves_where_a_half_of_the_blocks_is_fused():
    def why_not(**keys):
        return why_not_fused_ends(ModelConfig(**keys), "cuda", torch.bfloat16)

    assert why_not() is why_not(moe_dispatch="reference") is why_not(attention_backend="reference") is None
    assert "reference" in why_not(moe_dispatch="reference", attention_backend="reference")
    assert "residual_dtype" in why_not(residual_dtype="fp32")
    assert "cpu" in why_not_fused_ends(ModelConfig(), "cpu", torch.bfloat16)
