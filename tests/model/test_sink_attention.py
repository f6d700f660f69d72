"""Attention with sinks, window and grouped keys: outputs and gradients against explicit float64 and transformers."""

import itertools

import pytest
import torch
from oracles import explicit_attention, transformers_config
from small_models import GPT_OSS_VARIANT, SMALL, lively, relative_error
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

from gpt_oss_lite.model.attention import Attention
from gpt_oss_lite.model.backends import reference
from gpt_oss_lite.model.backends.reference import sink_attention
from gpt_oss_lite.model.documents import document_ids, positions_in_documents
from gpt_oss_lite.model.rope import RotaryEmbedding

N_TOKENS = 23


def random_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (2, 4, N_TOKENS, 8), (2, 2, N_TOKENS, 8), (2, 2, N_TOKENS, 8), (4,)
    q, k, v, sinks = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q * 2, k, v, sinks * 2


def gradients(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return list(torch.autograd.grad((output * weights.to(output.dtype)).sum(), inputs))


@pytest.mark.parametrize("window", [None, 1, 5, N_TOKENS, 100])
@pytest.mark.parametrize("with_sinks", [True, False])
@pytest.mark.parametrize("query_block", [4, 23, 256])
@pytest.mark.parametrize("with_documents", [False, True])
def test_outputs_and_gradients_equal_an_explicit_softmax(
    monkeypatch: pytest.MonkeyPatch, window: int | None, with_sinks: bool, query_block: int, with_documents: bool
) -> None:
    """The gradient through the log-sum-exp, dropped with sinks in pytorch/torchtitan#4796, included."""
    monkeypatch.setattr(reference, "QUERY_BLOCK", query_block)
    inputs = [tensor.requires_grad_() for tensor in random_inputs()[: 4 if with_sinks else 3]]
    q, k, v, sinks = (*inputs, None)[:4]
    documents = torch.tensor([[0] * 9 + [1] * 14, [3] * 22 + [4]]) if with_documents else None
    ours = sink_attention(q, k, v, sinks, window=window, document_ids_BT=documents)
    theirs = explicit_attention(q, k, v, sinks, window, documents)
    assert relative_error(ours, theirs) < 1e-12
    for mine, explicit in zip(gradients(ours, inputs), gradients(theirs, inputs), strict=True):
        assert relative_error(mine, explicit) < 1e-12


def test_single_precision_stays_within_rounding() -> None:
    q, k, v, sinks = (tensor.requires_grad_() for tensor in random_inputs(torch.float32))
    ours = sink_attention(q, k, v, sinks, window=5)
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v, sinks)]
    theirs = explicit_attention(*wide, 5, None)
    assert relative_error(ours, theirs) < 1e-6
    for mine, explicit in zip(gradients(ours, [q, k, v, sinks]), gradients(theirs, wide), strict=True):
        assert relative_error(mine, explicit) < 1e-6


def test_bf16_inputs_are_worked_on_in_fp32_under_autocast_too() -> None:
    q, k, v, sinks = random_inputs(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        ours = sink_attention(q, k, v, sinks.float(), window=None)
    exact = explicit_attention(q.double(), k.double(), v.double(), sinks.double(), None, None)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, sink_attention(q.float(), k.float(), v.float(), sinks.float(), window=None).bfloat16())
    assert relative_error(ours, exact) < 2**-8


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("scale", [1.0, 32.0])
def test_layer_equals_transformers_attention(layer: int, scale: float) -> None:
    """fp32 and eager, with equal weights: the output, and the gradient of the input and of every weight."""
    config = GPT_OSS_VARIANT.replace(rope_scale=scale, yarn_original_max_seq_len=16)
    ours = lively(Attention(config, layer))
    theirs = GptOssAttention(transformers_config(config), layer)
    with torch.no_grad():
        theirs.sinks.copy_(ours.sink_bias)
        for kind in ("weight", "bias"):
            k, v = getattr(ours.kv_proj, kind).chunk(2)
            for name, value in {"k_proj": k, "v_proj": v}.items():
                getattr(getattr(theirs, name), kind).copy_(value)
            for name in ("q_proj", "o_proj"):
                getattr(getattr(theirs, name), kind).copy_(getattr(getattr(ours, name), kind))
    x = torch.randn(2, N_TOKENS, 32, generator=torch.Generator().manual_seed(3))
    ours_x, theirs_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    cos, sin = RotaryEmbedding(config).tables(torch.arange(N_TOKENS))
    distance = torch.arange(N_TOKENS)[:, None] - torch.arange(N_TOKENS)
    hidden = (distance < 0) | (distance >= config.window_size if layer == 0 else False)
    mask = torch.zeros(N_TOKENS, N_TOKENS).masked_fill(hidden, -torch.inf)[None, None]
    our_output = ours(ours_x, (cos, sin))
    their_output, _ = theirs(theirs_x, (cos[None], sin[None]), mask)
    assert relative_error(our_output, their_output) < 1e-5
    our_gradients = dict(zip(_names(ours), gradients(our_output, [ours_x, *ours.parameters()]), strict=True))
    their_gradients = dict(zip(_names(theirs), gradients(their_output, [theirs_x, *theirs.parameters()]), strict=True))
    our_gradients["sinks"] = our_gradients.pop("sink_bias")
    for kind in ("weight", "bias"):
        k, v = our_gradients.pop(f"kv_proj.{kind}").chunk(2)
        our_gradients |= {f"k_proj.{kind}": k, f"v_proj.{kind}": v}
    # A bias on the keys moves all logits of a query but the sink's: with sinks its gradient is not zero.
    assert our_gradients.keys() == their_gradients.keys()
    for name, gradient in our_gradients.items():
        assert relative_error(gradient, their_gradients[name]) < 1e-5, name


def _names(module: torch.nn.Module) -> list[str]:
    return ["x", *(name for name, _ in module.named_parameters())]


def test_sinks_are_clamped() -> None:
    """To [-10, 15]; beyond, a sink gets no gradient."""
    torch.manual_seed(0)
    attention = Attention(SMALL, 1)
    rotary = RotaryEmbedding(SMALL).tables(torch.arange(6))
    x = torch.randn(1, 6, 32)

    def run(*sinks: float) -> Tensor:
        with torch.no_grad():
            attention.sink_bias.copy_(torch.tensor(sinks))
        return attention(x, rotary)

    assert torch.equal(run(-50.0, 50.0, 0.0, 0.0), run(-10.0, 15.0, 0.0, 0.0))
    assert not torch.equal(run(-9.0, 15.0, 0.0, 0.0), run(-10.0, 15.0, 0.0, 0.0))
    run(-50.0, 50.0, 0.0, 0.0).square().sum().backward()
    assert (attention.sink_bias.grad[:2] == 0).all()
    assert (attention.sink_bias.grad[2:] != 0).all()


def test_without_sinks_there_is_no_sink_parameter() -> None:
    attention = Attention(SMALL.replace(sink_bias=False), 0)
    assert "sink_bias" not in dict(attention.named_parameters())


def test_queries_may_be_the_last_of_the_keys() -> None:
    """As in decoding: the last three queries alone give what they gave among all."""
    q, k, v, sinks = random_inputs()
    for window in (None, 5):
        whole = sink_attention(q, k, v, sinks, window=window)
        assert relative_error(sink_attention(q[:, :, -3:], k, v, sinks, window=window), whole[:, :, -3:]) < 1e-12


def test_a_windowed_layer_never_touches_keys_outside_its_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cost grows with T * (window + block): the keys handed to a block are no more than that."""
    sizes = []
    attend = reference._attend
    monkeypatch.setattr(reference, "QUERY_BLOCK", 4)
    monkeypatch.setattr(reference, "_attend", lambda q, k, *rest: sizes.append(k.shape[2]) or attend(q, k, *rest))
    q, k, v, sinks = random_inputs()
    sink_attention(q, k, v, sinks, window=5)
    assert max(sizes) == 4 + 5 - 1
    sizes.clear()
    sink_attention(q, k, v, sinks, window=None)
    assert sizes == [4, 8, 12, 16, 20, 23]


def test_backward_keeps_no_logits_of_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What autograd saves grows with T, not with T squared."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()  # views of the inputs count once
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    n_heads, n_tokens = 2, 200
    q, k, v = (torch.randn(1, n_heads, n_tokens, 8, requires_grad=True) for _ in range(3))
    saved_bytes = {}
    for query_block in (n_tokens, 20):
        monkeypatch.setattr(reference, "QUERY_BLOCK", query_block)
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            sink_attention(q, k, v, torch.zeros(n_heads, requires_grad=True), window=None)
        saved_bytes[query_block] = sum(saved.values())
    assert saved_bytes[n_tokens] > 4 * n_heads * n_tokens**2
    assert saved_bytes[20] < 1.1 * (q.nbytes + k.nbytes + v.nbytes)


def test_document_numbers_and_positions() -> None:
    eos = 9
    ids = torch.tensor([[1, 2, eos, 3, eos, eos, 4, 5], [eos, 1, 1, 1, 1, 1, 1, eos]])
    documents = document_ids(ids, eos)
    assert documents.tolist() == [[0, 0, 0, 1, 1, 2, 3, 3], [0, 1, 1, 1, 1, 1, 1, 1]]
    assert positions_in_documents(documents).tolist() == [[0, 1, 2, 0, 1, 0, 0, 1], [0, 0, 1, 2, 3, 4, 5, 6]]


def test_documents_agree_with_a_plain_count() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 4, (3, 50), generator=generator)
    documents = document_ids(ids, 0)
    for row, numbers, positions in zip(
        ids.tolist(), documents.tolist(), positions_in_documents(documents).tolist(), strict=True
    ):
        number = position = 0
        for token, (got_number, got_position) in zip(row, zip(numbers, positions, strict=True), strict=True):
            assert (got_number, got_position) == (number, position)
            number, position = (number + 1, 0) if token == 0 else (number, position + 1)


def test_explicit_oracle_sums_to_less_than_one_with_a_sink() -> None:
    """The oracle itself: values of one make the output the share that is not the sink's."""
    q, k, v, sinks = random_inputs()
    share = explicit_attention(q, k, torch.ones_like(v), sinks, 5, None)
    for b, h in itertools.product(range(2), range(4)):
        first = (q[b, h, 0] @ k[b, h // 2, 0] / 8**0.5).exp()
        assert share[b, h, 0, 0].item() == pytest.approx((first / (first + sinks[h].exp())).item())
