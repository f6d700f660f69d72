"""Held-out scores against a loop over single tokens: exact counts, exact bytes, whatever the micro-batch."""

import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import SMALL, lively

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.inference.perplexity import by_position, evaluate
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.dataset import PretrainDataset
from shared_data.errors import UserError
from shared_data.manifest import CorpusInfo, SourceInfo
from shared_data.shard_writer import write_corpus

EOS = 63
WINDOW = 16
SOURCES = ["web", "code", "math"]
CONFIG = SMALL.replace(padded_vocab_size=64, n_layers=2, max_seq_len=WINDOW, window_size=6)


def make_model(config: ModelConfig = CONFIG) -> GPTOSS:
    return lively(GPTOSS(config), std=0.2)


def make_corpus(folder: Path, n_documents: int = 23) -> list[tuple[list[int], int, int]]:
    """Documents of 1 to 12 tokens over several shards; sources and bytes that no formula gives away."""
    generator = np.random.default_rng(0)
    documents = [
        (generator.integers(0, 61, generator.integers(1, 13)).tolist(), int(source), int(n_bytes))
        for source, n_bytes in zip(
            generator.integers(0, 2, n_documents), generator.integers(1, 90, n_documents), strict=True
        )
    ]
    info = CorpusInfo(
        corpus="test",
        mixture="test",
        tokenizer_name="test",
        vocab_size=61,
        eos_token_id=EOS,
        pad_token_id=62,
        shard_size_tokens=50,
        sources=[SourceInfo(id=name, weight=1 / 3) for name in SOURCES],
    )
    write_corpus(folder, info, documents, split="validation")
    return documents


def score_token_by_token(
    model: GPTOSS, documents: list[tuple[list[int], int, int]]
) -> dict[str, tuple[float, int, int]]:
    """Nats, tokens and bytes of each source, each token predicted by a forward pass of its own."""
    stream = [(token, source) for ids, source, _ in documents for token in [*ids, EOS]]
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0, 0])
    for position in range(1, len(stream)):
        start = (position - 1) // WINDOW * WINDOW
        context = [token for token, _ in stream[start:position]]
        if model.config.document_mask and EOS in context[:-1]:
            # What precedes the last end of a document is out of sight; that EOS itself ends it.
            last = max(i for i, token in enumerate(context[:-1]) if token == EOS)
            context = context[last + 1 :]
        with torch.no_grad():
            logits, _ = model(torch.tensor([context]))
        token, source = stream[position]
        sums[SOURCES[source]][0] -= logits[0, -1].double().log_softmax(-1)[token].item()
        sums[SOURCES[source]][1] += 1
    for _, source, n_bytes in documents:
        sums[SOURCES[source]][2] += n_bytes
    return {name: tuple(values) for name, values in sums.items()}


@pytest.mark.parametrize("micro_batch_size", [1, 3, 100])
@pytest.mark.parametrize("document_mask", [False, True])
def test_every_token_but_the_first_is_scored_once(tmp_path: Path, micro_batch_size: int, document_mask: bool) -> None:
    documents = make_corpus(tmp_path)
    model = make_model(CONFIG.replace(document_mask=document_mask))
    dataset = PretrainDataset(tmp_path, WINDOW)
    assert len(dataset.shards) > 2
    assert (dataset.total_tokens - 1) % WINDOW  # there is a ragged end
    result = evaluate(model, dataset, micro_batch_size=micro_batch_size)
    expected = score_token_by_token(model, documents)
    n_tokens = sum(len(ids) + 1 for ids, _, _ in documents)
    assert result.total.tokens == n_tokens - 1
    assert result.total.n_bytes == sum(n_bytes for _, _, n_bytes in documents)
    assert result.by_source.keys() == expected.keys() == {"web", "code"}
    for name, (nats, tokens, n_bytes) in expected.items():
        score = result.by_source[name]
        assert (score.tokens, score.n_bytes) == (tokens, n_bytes)
        assert score.nats == pytest.approx(nats, rel=1e-5)
        assert score.bits_per_byte == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-5)
    assert result.total.loss == pytest.approx(sum(nats for nats, _, _ in expected.values()) / (n_tokens - 1), rel=1e-5)
    assert result.total.perplexity == pytest.approx(math.exp(result.total.loss))


@pytest.mark.parametrize("n_tokens", [WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 1, 2 * WINDOW + 2, 5 * WINDOW])
def test_counts_at_the_edges_of_windows_in_one_file(tmp_path: Path, n_tokens: int) -> None:
    path = tmp_path / "tokens.bin"
    np.random.default_rng(0).integers(0, 61, n_tokens).astype("<u4").tofile(path)
    result = evaluate(make_model(), PretrainDataset(path, WINDOW), micro_batch_size=2)
    assert result.total.tokens == n_tokens - 1
    assert result.total.bits_per_byte is None
    assert result.by_source == {}


def test_a_uniform_model_needs_log_of_the_rows(tmp_path: Path) -> None:
    documents = make_corpus(tmp_path)
    model = make_model()
    with torch.no_grad():
        model.norm.weight.zero_()
    result = evaluate(model, PretrainDataset(tmp_path, WINDOW))
    n_predicted, n_bytes = sum(len(ids) + 1 for ids, _, _ in documents) - 1, sum(size for _, _, size in documents)
    assert result.total.loss == pytest.approx(math.log(64))
    assert result.total.perplexity == pytest.approx(64)
    assert result.total.bits_per_byte == pytest.approx(6 * n_predicted / n_bytes)


def test_a_missing_sidecar_is_named(tmp_path: Path) -> None:
    make_corpus(tmp_path)
    dataset = PretrainDataset(tmp_path, WINDOW)
    (tmp_path / "shard_00001.idx").unlink()
    with pytest.raises(UserError, match=r"shard_00001\.idx"):
        evaluate(make_model(), dataset)


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    make_corpus(tmp_path)
    model = make_model().train()
    state = torch.get_rng_state()
    evaluate(model, PretrainDataset(tmp_path, WINDOW))
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_loss_by_position_is_that_of_single_tokens_in_spans_that_double(tmp_path):
    make_corpus(tmp_path, n_documents=70)
    width = 4 * WINDOW + 20  # beyond the training window, and no power of 2
    dataset = PretrainDataset(tmp_path, width, CONFIG.embedding_rows)
    model = make_model()
    spans = by_position(model, dataset, rope_scale=8.0, micro_batch_size=3)
    assert model.rotary.scale == CONFIG.rope_scale
    assert [(span.start, span.stop) for span in spans] == [(0, 64), (64, width)]
    model.set_rope_scale(8.0)
    nats = torch.zeros(width, dtype=torch.float64)
    with torch.no_grad():
        for ids_T, targets_T in (dataset[index] for index in range(len(dataset))):
            logits = model(ids_T[None])[0][0]
            nats += torch.nn.functional.cross_entropy(logits, targets_T, reduction="none").double()
    for span in spans:
        mean = nats[span.start : span.stop].sum() / (len(dataset) * (span.stop - span.start))
        assert span.loss == pytest.approx(float(mean), rel=1e-5)
        assert span.tokens == len(dataset) * (span.stop - span.start)


def test_windows_beyond_the_trained_context_take_the_scale_that_covers_them(tmp_path):
    make_corpus(tmp_path, n_documents=70)
    dataset = PretrainDataset(tmp_path, 4 * WINDOW, CONFIG.embedding_rows)
    model = make_model()
    assert by_position(model, dataset) == by_position(model, dataset, rope_scale=4.0)
    assert by_position(model, dataset, max_windows=2)[0].tokens == 2 * 4 * WINDOW
