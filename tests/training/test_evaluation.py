"""Held-out figures against sums taken by hand."""

import math

import numpy as np
import pytest
import tiny_run
import torch
import torch.nn.functional as F

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.dataset import PretrainDataset
from gpt_oss_lite.training.evaluation import Score, evaluate
from shared_data.manifest import Manifest, read_sidecar


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPTOSS(ModelConfig(**tiny_run.MODEL))


def by_hand(model, dataset):
    """Loss of every target of every window in order, (windows * T,)."""
    with torch.no_grad():
        losses = [F.cross_entropy(model(x[None])[0][0], y, reduction="none") for x, y in dataset]
    return torch.cat(losses).double().numpy()


def test_loss_and_bits_per_byte_overall_and_by_source(tmp_path, model):
    folder = tiny_run.make_corpus(tmp_path)
    dataset = PretrainDataset(folder, tiny_run.WINDOW)
    losses = by_hand(model, (dataset[i] for i in range(len(dataset))))
    sources, n_bytes = [], []
    for path in Manifest.load(folder).shard_paths(folder):
        sidecar = read_sidecar(path)
        for source, length, size in zip(sidecar.source_index, sidecar.lengths, sidecar.n_bytes, strict=True):
            sources += [sidecar.sources[source]] * length
            n_bytes += [size / length] * length
    sources, n_bytes = np.array(sources[1 : len(losses) + 1]), np.array(n_bytes[1 : len(losses) + 1])
    result = evaluate(model, dataset, micro_batch_size=3, chunk_size=7)
    assert result.total.tokens == len(losses)
    assert result.total.loss == pytest.approx(losses.mean(), rel=1e-6)
    assert result.total.perplexity == pytest.approx(math.exp(losses.mean()), rel=1e-6)
    assert result.total.bits_per_byte == pytest.approx(losses.sum() / math.log(2) / n_bytes.sum(), rel=1e-6)
    assert list(result.by_source) == ["code", "prose"]
    for name, score in result.by_source.items():
        mine = sources == name
        assert score.tokens == mine.sum()
        assert score.loss == pytest.approx(losses[mine].mean(), rel=1e-6)
        assert score.bits_per_byte == pytest.approx(losses[mine].sum() / math.log(2) / n_bytes[mine].sum(), rel=1e-6)


def test_some_windows_are_spread_over_the_corpus(tmp_path, model):
    dataset = PretrainDataset(tiny_run.make_corpus(tmp_path), tiny_run.WINDOW)
    chosen = [index * len(dataset) // 4 for index in range(4)]
    expected = by_hand(model, (dataset[i] for i in chosen)).mean()
    result = evaluate(model, dataset, max_windows=4)
    assert result.total.tokens == 4 * tiny_run.WINDOW
    assert result.total.loss == pytest.approx(expected, rel=1e-6)
    assert evaluate(model, dataset, max_windows=10**9).total.tokens == len(dataset) * tiny_run.WINDOW


def test_a_file_without_sidecars_has_no_bits_per_byte(tmp_path, model):
    np.arange(33, dtype="<u4").tofile(tmp_path / "tokens.bin")
    result = evaluate(model, PretrainDataset(tmp_path / "tokens.bin", 16))
    assert result.total.bits_per_byte is None
    assert result.by_source == {}
    assert result.as_dict()["loss"] == pytest.approx(math.log(64), rel=0.05)


def test_mode_and_gradients_are_left_as_they_were(tmp_path, model):
    dataset = PretrainDataset(tiny_run.make_corpus(tmp_path), tiny_run.WINDOW)
    model.train()
    state = torch.get_rng_state()
    evaluate(model, dataset, max_windows=2)
    assert model.training
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_perplexity_beyond_floats_is_infinite():
    assert Score(nats=1e6, tokens=1).perplexity == math.inf
