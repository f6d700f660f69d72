"""Rows in 8-bit floats: Triton's kernels against PyTorch's rounding, and the experts' products against float64.

The interpreter on a CPU cuts numbers off where it should round them to E4M3, and has no 8-bit products. There the same
kernels write fp32 in place of E4M3, scaled alike, which holds their scales and the way that rows and scales take.
"""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from small_models import hopper, relative_error

pytest.importorskip("triton", reason="Triton is not installed: pip install triton==3.7.1")

from gpt_oss_lite.model.fused.moe import MoEGeometry, fused_moe
from gpt_oss_lite.model.fused.products import PRODUCTS, Products
from gpt_oss_lite.model.kernels.eight_bits import E4M3, Rows, to_eight_bits
from gpt_oss_lite.model.kernels.permute import tokens_to_rows
from gpt_oss_lite.model.kernels.swiglu import swiglu, swiglu_backward

ON_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if ON_CUDA else "cpu"
DTYPE = E4M3 if ON_CUDA else torch.float32


def assert_eight_bits_of(exact: torch.Tensor, eight: torch.Tensor, scale: torch.Tensor) -> None:
    """Each row's largest magnitude became 448, and the rest was scaled alike and rounded once."""
    right = exact.abs().amax(-1).clamp(min=1e-12) / 448
    torch.testing.assert_close(scale, right, rtol=1e-5, atol=0.0)
    assert eight.dtype == DTYPE
    back = eight.float() * scale[:, None]
    # Half a step: 2^-4 of a normal number, 2^-10 below 2^-6.
    bound = torch.maximum(exact.abs() / 16, right[:, None] * 2**-10) if ON_CUDA else exact.abs() * 1e-5
    assert ((back - exact).abs() <= bound * 1.001).all()


def lively(*shape: int) -> torch.Tensor:
    """Rows of very different sizes, one of them zero."""
    torch.manual_seed(0)
    rows = torch.randn(*shape, device=DEVICE) * torch.logspace(-4, 3, shape[0], device=DEVICE)[:, None]
    rows[len(rows) // 2] = 0
    return rows


@pytest.mark.parametrize("shape", [(1, 16), (37, 48), (5, 3072)])
def test_rows_are_scaled_by_their_largest_magnitude(shape):
    x = lively(*shape)
    assert_eight_bits_of(x, *to_eight_bits(x, DTYPE))


@pytest.mark.gpu
def test_rounding_is_pytorchs():
    x = lively(512, 768)
    eight, scale = to_eight_bits(x)
    right = (x.double() / scale.double()[:, None]).float().to(E4M3)
    # The kernel multiplies by the inverse: a number between two may fall to the other.
    assert (eight.float() != right.float()).float().mean() < 1e-4


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_so_and_the_others_are_as_they_were(value):
    x = lively(6, 32)
    x[1, 3] = value
    eight, scale = to_eight_bits(x, DTYPE)
    back = eight.float() * scale[:, None]
    assert not back[1].isfinite().all()
    rest = [0, 2, 3, 4, 5]
    assert_eight_bits_of(x[rest], eight[rest], scale[rest])


def test_tokens_take_their_eight_bits_and_scales_to_their_rows():
    x = lively(37, 48)
    place = torch.randperm(74, device=DEVICE).to(torch.int32).view(37, 2)
    rows = tokens_to_rows(Rows(x, *to_eight_bits(x, DTYPE)), place)
    token_of_row = place.flatten().argsort() // 2
    assert torch.equal(rows.x_RI, x[token_of_row])
    assert_eight_bits_of(x[token_of_row], rows.eight_RI, rows.scale_R)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("clamped", [True, False])
@pytest.mark.parametrize("hidden", [40, 1536])
def test_swiglu_gives_both_forms_forward_and_backward(hidden, clamped, weighted):
    torch.manual_seed(0)
    gate_up = torch.randn(11, 2 * hidden, device=DEVICE) * 5
    weight = torch.rand(11, device=DEVICE) if weighted else None
    upstream = torch.randn(11, hidden, device=DEVICE)
    plain = swiglu(gate_up, weight, clamped)
    both = swiglu(gate_up, weight, clamped, DTYPE)
    assert plain.eight_RI is None
    torch.testing.assert_close(both.x_RI, plain.x_RI)
    assert_eight_bits_of(both.x_RI, both.eight_RI, both.scale_R)
    gradient, dweight = swiglu_backward(upstream, gate_up, weight, clamped)
    gradients, dweight_again = swiglu_backward(upstream, gate_up, weight, clamped, DTYPE)
    torch.testing.assert_close(gradients.x_RI, gradient.x_RI)
    if weighted:
        torch.testing.assert_close(dweight_again, dweight, rtol=1e-4, atol=1e-4)
    assert_eight_bits_of(gradients.x_RI, gradients.eight_RI, gradients.scale_R)


@pytest.mark.parametrize("eight_bits", [None, DTYPE])
@pytest.mark.parametrize("clamped", [True, False])
def test_what_is_not_a_number_in_a_hidden_layer_stays_so(clamped, eight_bits):
    """The clamped form's limits are no numbers to take instead, on a GPU neither. Three rows: gate, up and no fault."""
    gate_up = torch.ones(3, 2 * 24, device=DEVICE)
    gate_up[0, 5] = gate_up[1, 24 + 5] = float("nan")
    at_fault = torch.zeros(3, 24, dtype=torch.bool)
    at_fault[:2, 5] = True
    weight, upstream = torch.ones(3, device=DEVICE), torch.ones(3, 24, device=DEVICE)
    a = swiglu(gate_up, weight, clamped, eight_bits)
    gradients, dweight = swiglu_backward(upstream, gate_up, weight, clamped, eight_bits)
    assert torch.equal(a.x_RI.isnan().cpu(), at_fault)
    assert torch.equal(gradients.x_RI.view(3, 2, 24).isnan().any(1).cpu(), at_fault)
    assert dweight.isnan().tolist() == [True, True, False]
    if eight_bits is not None:
        for rows in (a, gradients):
            assert rows.eight_RI.float().isnan().any(1).tolist() == [True, True, False]


def plain_grouped(rows: Rows, w_EIO: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    """What the 8-bit products compute, by loops over the scaled rows and matrices."""
    starts = [0, *offsets_E.tolist()]
    parts = [plain_dense(Rows(*(part[a:b] for part in rows)), w_EIO[e])
             for e, (a, b) in enumerate(pairwise(starts))]  # fmt: skip
    return torch.cat(parts)


def plain_dense(rows: Rows, w_IO: torch.Tensor) -> torch.Tensor:
    w_OI, scale_O = to_eight_bits(w_IO.t().contiguous(), DTYPE)
    return (rows.eight_RI.float() @ w_OI.float().t()) * rows.scale_R[:, None] * scale_O[None, :]


@pytest.mark.skipif(ON_CUDA, reason="there the real products run, in the tests below")
@pytest.mark.parametrize("n_shared", [0, 1])
def test_scales_are_where_they_belong_so_that_without_rounding_all_is_exact(n_shared):
    torch.manual_seed(0)
    width, hidden, n_experts = 32, 24, 4
    x, gain = torch.randn(1, 29, width, requires_grad=True), torch.rand(width, requires_grad=True)
    router = torch.randn(n_experts, width, requires_grad=True)
    gates, ups = ([torch.randn(hidden, width, requires_grad=True) for _ in range(n_experts + n_shared)] for _ in "ab")
    downs = [torch.randn(width, hidden, requires_grad=True) for _ in range(n_experts + n_shared)]
    leaves = [x, gain, router, *gates, *ups, *downs]
    upstream = torch.randn_like(x)

    def run(products: Products) -> list[torch.Tensor]:
        geometry = MoEGeometry(n_experts, 2, n_shared, 1e-6, False, products)
        y, *_ = fused_moe(x, geometry, gain, router, None, gates, ups, downs)
        return [y, *torch.autograd.grad((y * upstream).sum(), leaves)]

    exact = PRODUCTS["triton_grouped"]
    scaled = exact._replace(grouped=plain_grouped, dense=plain_dense, eight_bits=torch.float32)
    for ours, right in zip(run(scaled), run(exact), strict=True):
        assert relative_error(ours, right) < 1e-5


GROUPS = {
    "uneven": [0, 700, 701, 1400, 1400, 1999, 2048, 2048],
    "one has all": [0, 0, 2048, 2048, 2048, 2048, 2048, 2048],
}


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("groups", GROUPS)
def test_grouped_products_are_those_of_the_rounded_numbers(groups, transposed):
    torch.manual_seed(0)
    x = torch.randn(2048, 768, device="cuda").bfloat16()
    w = (torch.randn(8, 1536, 768, device="cuda") * 0.05).bfloat16().transpose(1, 2)
    w = w if transposed else w.contiguous()
    offsets = torch.tensor(GROUPS[groups], dtype=torch.int32, device="cuda")
    products = PRODUCTS["grouped_fp8"]
    ours = products.grouped(products.rows(x), w, offsets)
    assert ours.dtype == torch.bfloat16
    starts = [0, *GROUPS[groups]]
    right = torch.cat([x[a:b].double() @ w[e].double() for e, (a, b) in enumerate(pairwise(starts))])
    assert relative_error(ours, right) < 0.05  # two operands rounded to 3 bits, each 2.6 % in the mean
    rounded = plain_grouped(products.rows(x), w, offsets)
    assert relative_error(ours, rounded) < 0.01


@pytest.mark.gpu
@hopper
def test_dense_products_are_those_of_the_rounded_numbers():
    torch.manual_seed(0)
    x, w = torch.randn(512, 1536, device="cuda").bfloat16(), torch.randn(1536, 768, device="cuda").bfloat16()
    products = PRODUCTS["grouped_fp8"]
    ours = products.dense(products.rows(x), w)
    assert relative_error(ours, x.double() @ w.double()) < 0.05
    assert relative_error(ours, plain_dense(products.rows(x), w)) < 0.01


@pytest.mark.gpu
@hopper
def test_rows_of_a_product_lose_nothing_against_float64_beyond_their_rounding_with_tiny_and_huge_rows():
    x = lively(256, 768).bfloat16()
    w = (torch.randn(768, 512, device="cuda") * torch.logspace(-3, 2, 512, device="cuda")).bfloat16()
    products = PRODUCTS["grouped_fp8"]
    ours, right = products.dense(products.rows(x), w).double(), x.double() @ w.double()
    size = x.double().norm(dim=1)[:, None] * w.double().norm(dim=0)[None, :]
    assert ((ours - right).abs() <= 0.02 * size).all()
    assert F.cosine_similarity(ours.flatten(), right.flatten(), dim=0) > 0.999
