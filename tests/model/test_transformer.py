"""The whole model: against transformers' GPT-OSS, under gradient checkpointing, and its variants by key."""

import pytest
import torch
from oracles import to_transformers_names, transformers_twin
from small_models import GPT_OSS_VARIANT, SMALL, lively, relative_error
from torch import Tensor
from torch.nn import functional as F

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.model.documents import document_ids
from gpt_oss_lite.model.transformer import GPTOSS


def random_ids(config: ModelConfig, n_tokens: int = 40, batch: int = 2) -> Tensor:
    return torch.randint(0, config.embedding_rows, (batch, n_tokens), generator=torch.Generator().manual_seed(5))


def next_token_loss(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())


@pytest.mark.parametrize("original_context", [64, 8])
def test_gpt_oss_recipe_is_transformers_gpt_oss(original_context: int) -> None:
    """fp32, eager, equal weights: the logits, the loss, and the gradient of every parameter."""
    model = lively(GPTOSS(GPT_OSS_VARIANT.replace(yarn_original_max_seq_len=original_context)))
    twin = transformers_twin(model)
    ids = random_ids(model.config)
    logits, _ = model(ids)
    their_logits = twin(ids).logits
    assert relative_error(logits, their_logits) < 1e-5
    next_token_loss(logits, ids).backward()
    next_token_loss(their_logits, ids).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    theirs = {name: parameter.grad for name, parameter in twin.named_parameters()}
    ours = to_transformers_names(model.config, gradients)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert relative_error(gradient, theirs[name]) < 1e-5, name


def loss_and_gradients(model: GPTOSS, ids: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    model.zero_grad(set_to_none=True)
    h, stats = model.hidden_states(ids)
    loss = next_token_loss(model.head(h), ids) + 0.01 * stats.aux + 0.001 * stats.z_loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}, stats.expert_load


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("tied_router", [False, True])
def test_checkpointing_changes_no_gradient(every: int, tied_router: bool) -> None:
    """An all-tied router too, where top-k under recomputation could choose otherwise (pytorch/torchtitan#3600)."""
    model = lively(GPTOSS(SMALL))
    if tied_router:
        with torch.no_grad():
            for block in model.blocks:
                block.moe.router.weight.zero_()
    ids = random_ids(SMALL, n_tokens=300)
    loss, gradients, load = loss_and_gradients(model, ids)
    model.enable_gradient_checkpointing(every)
    loss_again, gradients_again, load_again = loss_and_gradients(model, ids)
    assert torch.equal(loss, loss_again)
    assert torch.equal(load, load_again)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, gradients_again[name]), name


@pytest.mark.parametrize("every", [None, 1, 2])
def test_expert_counts_are_not_doubled_under_checkpointing(every: int | None) -> None:
    """K slots for each token, once (pytorch/torchtitan#1593)."""
    model = lively(GPTOSS(SMALL))
    if every:
        model.enable_gradient_checkpointing(every)
    ids = random_ids(SMALL)
    _, _, load = loss_and_gradients(model, ids)
    slots = load * ids.numel() * SMALL.experts_per_token
    assert torch.allclose(slots, slots.round(), atol=1e-4)
    assert slots.sum(dim=1).tolist() == pytest.approx([2 * ids.numel()] * SMALL.n_layers)


@pytest.mark.parametrize(("every", "recomputed"), [(1, [0, 1, 2]), (2, [0, 2]), (3, [0])])
def test_every_nth_block_is_recomputed(every: int, recomputed: list[int]) -> None:
    model = GPTOSS(SMALL)
    model.enable_gradient_checkpointing(every)
    calls = [0] * SMALL.n_layers
    for layer, block in enumerate(model.blocks):
        # The norm runs once, and once more when the block is recomputed.
        block.attn_norm.register_forward_hook(lambda *_, layer=layer: calls.__setitem__(layer, calls[layer] + 1))
    loss_and_gradients(model, random_ids(SMALL))
    assert [layer for layer, count in enumerate(calls) if count == 2] == recomputed
    with torch.no_grad():
        model(random_ids(SMALL))
    assert sum(calls) == 2 * SMALL.n_layers + len(recomputed)


def test_checkpointing_wants_a_positive_number() -> None:
    with pytest.raises(ValueError, match="every is 0"):
        GPTOSS(SMALL).enable_gradient_checkpointing(0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_shared_experts": 0},
        {"expert_activation": "clamped_swiglu"},
        {"attention_bias": True},
        {"router_bias": True},
        {"expert_bias": True},
        {"sink_bias": False},
        {"window_size": None},
        {"tie_embeddings": False},
        {"rope_scale": 32.0},
        {"residual_dtype": "bf16"},
        {"document_mask": True},
    ],
    ids=str,
)
def test_variants_change_the_output_and_every_parameter_learns(changes: dict[str, object]) -> None:
    config = SMALL.replace(**changes)
    ids = random_ids(SMALL)
    documents = document_ids(ids, 3) if config.document_mask else None
    model = lively(GPTOSS(config))
    h, stats = model.hidden_states(ids, document_ids_BT=documents)
    logits = model.head(h)
    assert logits.shape == (2, 40, config.embedding_rows)
    assert all(value.dtype == torch.float32 for value in stats)
    (next_token_loss(logits, ids) + stats.aux).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
    if changes:
        plain = lively(GPTOSS(SMALL))
        shared = dict(plain.named_parameters())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in shared and shared[name].shape == parameter.shape:
                    shared[name].copy_(parameter)
            assert not torch.equal(plain(ids)[0], logits)


def test_padding_adds_rows_and_nothing_else() -> None:
    padded, plain = lively(GPTOSS(SMALL.replace(padded_vocab_size=64))), GPTOSS(SMALL)
    with torch.no_grad():
        for (name, theirs), ours in zip(padded.named_parameters(), plain.parameters(), strict=True):
            ours.copy_(theirs[:61] if name == "embed.weight" else theirs)
        logits, _ = padded(random_ids(SMALL))
        assert logits.shape == (2, 40, 64)
        assert relative_error(plain(random_ids(SMALL))[0], logits[..., :61]) < 1e-6
        assert torch.isfinite(padded(torch.tensor([[61, 62, 63]]))[0]).all()


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_residual_stream_has_its_own_dtype(name: str) -> None:
    expected = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]
    seen = []
    model = lively(GPTOSS(SMALL.replace(residual_dtype=name)))
    model.blocks[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    h, _ = model.hidden_states(random_ids(SMALL))
    with torch.autocast("cpu", torch.bfloat16):
        h_low, _ = model.hidden_states(random_ids(SMALL))
    assert seen == [expected, expected]
    assert (h.dtype, h_low.dtype) == (torch.float32, torch.bfloat16)


def test_residual_stream_follows_the_compute_dtype_by_default() -> None:
    seen = []
    model = lively(GPTOSS(SMALL), std=0.1)
    model.blocks[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    exact, _ = model(random_ids(SMALL))
    with torch.autocast("cpu", torch.bfloat16):
        low, _ = model(random_ids(SMALL))
    model.bfloat16()(random_ids(SMALL))
    assert seen == [torch.float32, torch.bfloat16, torch.bfloat16]
    # Of most tokens: where two experts are nearly tied, rounding sends a token to the other one.
    by_token = (low - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert by_token.median() < 0.02


def test_documents_of_a_window_do_not_see_each_other() -> None:
    """Each gives what it gives alone, positions included."""
    eos = 7
    config = SMALL.replace(document_mask=True)
    model = lively(GPTOSS(config))
    texts = [[3, 4, 5, 6, 8, 9, eos], [eos], [11, 12, 13, 14, 15, 16, 17, 18, 19, eos], [20, 21, 22]]
    ids = torch.tensor([[token for text in texts for token in text]])
    with torch.no_grad():
        together, _ = model(ids, document_ids_BT=document_ids(ids, eos))
        apart = torch.cat([model(torch.tensor([text]))[0] for text in texts], dim=1)
        unmasked, _ = model(ids)
    assert relative_error(together, apart) < 1e-5
    assert relative_error(unmasked, apart) > 1e-2


def test_positions_count_from_the_documents_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen at the rotary tables: attention inside a document only depends on differences, so no output shows it."""
    model = GPTOSS(SMALL.replace(document_mask=True))
    seen, tables = [], model.rotary.tables
    monkeypatch.setattr(model.rotary, "tables", lambda positions: seen.append(positions) or tables(positions))
    ids = torch.tensor([[5, 7, 5, 5, 7, 5]])
    model(ids, document_ids_BT=document_ids(ids, 7))
    assert seen[0].tolist() == [[0, 1, 0, 1, 2, 0]]


def test_document_ids_need_the_key() -> None:
    ids = random_ids(SMALL)
    with pytest.raises(ValueError, match=r"model\.document_mask is false"):
        GPTOSS(SMALL)(ids, document_ids_BT=torch.zeros_like(ids))


def test_no_token_sees_a_later_one() -> None:
    model = lively(GPTOSS(SMALL))
    ids = random_ids(SMALL)
    changed = ids.clone()
    changed[:, 25:] = (changed[:, 25:] + 1) % SMALL.vocab_size
    with torch.no_grad():
        before, after = model(ids)[0], model(changed)[0]
    assert relative_error(after[:, :25], before[:, :25]) < 1e-6
    assert relative_error(after[:, 25:], before[:, 25:]) > 1e-2


def test_forward_returns_logits_and_the_balancing_loss() -> None:
    model = lively(GPTOSS(SMALL))
    ids = random_ids(SMALL)
    logits, aux = model(ids)
    h, stats = model.hidden_states(ids)
    assert torch.equal(logits, h @ model.head.weight.T)
    assert torch.equal(aux, stats.aux)
    assert aux.shape == ()
    assert stats.expert_load.shape == (3, 4)
    assert stats.entropy.shape == (3,)
    assert not stats.expert_load.requires_grad
    assert not stats.entropy.requires_grad


def test_router_losses_are_means_over_the_layers() -> None:
    model = lively(GPTOSS(SMALL))
    layers = []
    for block in model.blocks:
        block.register_forward_hook(lambda _block, _inputs, outputs: layers.append(outputs[1]))
    _, stats = model.hidden_states(random_ids(SMALL))
    assert len(layers) == 3
    assert stats.aux.item() == pytest.approx(sum(layer.aux.item() for layer in layers) / 3)
    assert stats.z_loss.item() == pytest.approx(sum(layer.z_loss.item() for layer in layers) / 3)
    assert torch.equal(stats.entropy, torch.stack([layer.entropy for layer in layers]))
    assert torch.equal(stats.expert_load, torch.stack([layer.expert_load_E for layer in layers]))


def test_scale_changes_the_model_and_back() -> None:
    model = lively(GPTOSS(SMALL))
    ids = random_ids(SMALL)
    with torch.no_grad():
        before = model(ids)[0]
        model.set_rope_scale(4.0)
        scaled = model(ids)[0]
        model.set_rope_scale(1.0)
        assert torch.equal(model(ids)[0], before)
    assert relative_error(scaled, before) > 1e-3
