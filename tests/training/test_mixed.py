"""Training from several corpora by weight: the shares at every step, an exact cover of each, one stream for all."""

import dataclasses
import json
from fractions import Fraction

import numpy as np
import pytest
import tiny_run
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from gpt_oss_lite import cli
from gpt_oss_lite.config.training import CorpusPart, DataConfig
from gpt_oss_lite.training.data_order import DataOrder, MicroBatchSampler, MixedOrder, turns
from gpt_oss_lite.training.dataset import PretrainDataset
from gpt_oss_lite.training.diagnosis import report_window
from gpt_oss_lite.training.mixed import MixedDataset, open_corpus
from gpt_oss_lite.training.pretrain import PretrainOptions, pretrain
from gpt_oss_lite.training.stop import ignore_stop_signals
from shared_data.console import run_app
from shared_data.errors import UserError
from shared_data.shard_writer import write_corpus

WEIGHTS = (0.7, 0.2, 0.1)


@pytest.fixture
def folders(tmp_path):
    """Three corpora of different size and text."""
    sizes = (60, 25, 8)
    return [tiny_run.make_corpus(tmp_path / f"c{n}", size, seed=n) for n, size in enumerate(sizes)]


@pytest.fixture
def parts(folders):
    return [CorpusPart(path=str(folder), weight=weight) for folder, weight in zip(folders, WEIGHTS, strict=True)]


def owners(order: MixedOrder, windows: np.ndarray) -> np.ndarray:
    """Which corpus each window lies in."""
    return np.searchsorted(np.cumsum(order.sizes), windows, side="right")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=8).map(tuple))
def test_every_corpus_is_within_one_window_of_its_share_after_any_number(shares):
    cycle, period = turns(shares), sum(shares)
    assert np.bincount(cycle.corpus, minlength=len(shares)).tolist() == list(shares)
    given = np.zeros(len(shares), np.int64)
    for place, corpus in enumerate(cycle.corpus):
        assert (given == cycle.given[place]).all()
        assert (np.abs(given * period - np.array(shares) * place) < period).all()
        given[corpus] += 1


def test_the_shares_hold_at_every_step_of_every_size_over_many_cycles():
    order = MixedOrder(93, 5, (60, 25, 8), (7, 2, 1))
    for position in range(0, 500, 7):
        seen = np.bincount(owners(order, order.windows(0, position)), minlength=3)
        assert order.given(position) == seen.tolist()
        assert all(abs(n - Fraction(share, 10) * position) < 1 for n, share in zip(seen, order.shares, strict=True))


def test_each_corpus_is_covered_exactly_epoch_by_epoch_and_newly_shuffled():
    order = MixedOrder(93, 5, (60, 25, 8), (7, 2, 1))
    stream = order.windows(0, 1000)
    starts = np.cumsum([0, *order.sizes])
    for corpus, size in enumerate(order.sizes):
        own = stream[owners(order, stream) == corpus] - starts[corpus]
        epochs = [own[begin : begin + size].tolist() for begin in range(0, len(own) - size + 1, size)]
        assert len(epochs) >= 8
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len(set(map(tuple, epochs))) == len(epochs)
    for position in (0, 60, 123, 124, 125, 1000):
        read = np.bincount(owners(order, stream[:position]), minlength=3) // order.sizes
        assert order.epoch(position) == read.min()
    assert order.passes(1000) == [700 / 60, 200 / 25, 100 / 8]


def test_corpora_of_one_size_are_not_read_in_one_order_and_the_first_is_read_as_it_is_alone():
    order = MixedOrder(40, 3, (20, 20), (1, 1))
    stream = order.windows(0, 40)
    first, second = (stream[owners(order, stream) == n] - 20 * n for n in (0, 1))
    assert first.tolist() != second.tolist()
    assert first.tolist() == DataOrder(20, 3).windows(0, 20).tolist()
    assert MixedOrder(40, 4, (20, 20), (1, 1)).windows(0, 40).tolist() != stream.tolist()


@pytest.mark.parametrize("batch", [1, 3, 7, 25])
def test_steps_cut_one_stream_without_gaps(batch):
    order = MixedOrder(93, 5, (60, 25, 8), (7, 2, 1))
    whole = order.windows(0, 300).tolist()
    cut = [window for step in range(300 // batch) for window in order.windows(step * batch, batch)]
    assert cut == whole[: len(cut)]


def test_windows_are_those_of_the_corpora_and_never_cross_them(folders, parts):
    mixed = MixedDataset(parts, tiny_run.WINDOW, tiny_run.ROWS)
    alone = [PretrainDataset(folder, tiny_run.WINDOW) for folder in folders]
    assert len(mixed) == sum(map(len, alone))
    assert mixed.total_tokens == sum(own.total_tokens for own in alone)
    expected = [own[index] for own in alone for index in range(len(own))]
    for index, pair in enumerate(expected):
        assert all(torch.equal(one, other) for one, other in zip(mixed[index], pair, strict=True))
    with pytest.raises(IndexError):
        mixed[len(mixed)]
    window = len(alone[0]) + len(alone[1])
    report, own = report_window(mixed, window), report_window(alone[2], 0)
    assert (report.shard, report.token, report.text) == (own.shard, own.token, own.text)
    assert report.sources == own.sources


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_d25_any_number_of_loader_workers_gives_the_same_stream(parts, workers):
    dataset = open_corpus(parts, tiny_run.WINDOW)
    order = dataset.order(5)
    loader = DataLoader(
        dataset, batch_sampler=MicroBatchSampler(order, 13, 4), num_workers=workers,
        worker_init_fn=ignore_stop_signals, generator=torch.Generator(),
    )  # fmt: skip
    stream = iter(loader)
    seen = torch.cat([next(stream)[0] for _ in range(30)])
    expected = torch.stack([dataset[int(window)][0] for window in order.windows(13, 120)])
    assert torch.equal(seen, expected)


def options_for(tmp_path, parts, out, **changes):
    data = {"train_data_path": [part.model_dump() for part in parts], **changes.pop("data", {})}
    recipe = tiny_run.write_recipe(tmp_path / f"{out}.yaml", tmp_path, data=data, **changes)
    return PretrainOptions(config=recipe, out=tmp_path / out, seed=1)


def test_20_steps_are_10_and_a_resume_and_10_bitwise_with_other_workers(tmp_path, parts):
    whole, cut = (options_for(tmp_path, parts, out) for out in ("whole", "cut"))
    assert pretrain(whole) == 0
    assert pretrain(dataclasses.replace(cut, max_steps=10)) == 0
    resumed = dataclasses.replace(cut, resume_latest=True, overrides=["training.num_workers=2"])
    assert pretrain(resumed) == 0
    assert tiny_run.digests(tmp_path / "whole", 20) == tiny_run.digests(tmp_path / "cut", 20)
    assert tiny_run.rows(tmp_path / "whole") == tiny_run.rows(tmp_path / "cut")


def test_resuming_with_other_weights_corpora_or_one_of_them_alone_is_refused_with_both_values(tmp_path, parts):
    options = options_for(tmp_path, parts, "run")
    assert pretrain(dataclasses.replace(options, max_steps=2)) == 0
    path = json.dumps(
        [{**part.model_dump(), "weight": weight} for part, weight in zip(parts, (0.5, 0.4, 0.1), strict=True)]
    )
    others = {
        path: ["'weight': 0.7", "'weight': 0.5"],
        parts[0].path: ["'weight': 0.7", f"is {parts[0].path}"],
    }
    for value, named in others.items():
        again = dataclasses.replace(options, resume_latest=True, overrides=[f"data.train_data_path={value}"])
        with pytest.raises(UserError) as refused:
            pretrain(again)
        assert all(words in str(refused.value) for words in [*named, "--allow-changed"])
    write_corpus(tmp_path / "c1", tiny_run.corpus_info(), [([1, 2, 3] * 50, 0, 9)])
    with pytest.raises(UserError, match="corpus's sha256 was"):
        pretrain(dataclasses.replace(options, resume_latest=True))


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"eos_token_id": 61}, "has eos_token_id 62, but .* has 61"),
     ({"tokenizer_name": "another"}, "has tokenizer_name tiny, but .* has another")],
)  # fmt: skip
def test_corpora_of_two_tokenizers_are_refused(tmp_path, folders, changes, named):
    other = tiny_run.make_corpus(tmp_path / "other", **changes)
    parts = [CorpusPart(path=str(folder), weight=0.5) for folder in (folders[0], other)]
    with pytest.raises(UserError, match=f"{named}; corpora that are mixed must have one tokenizer"):
        open_corpus(parts, tiny_run.WINDOW)


def test_one_corpus_under_two_names_is_refused(tmp_path, folders):
    (tmp_path / "link").symlink_to(folders[0])
    for name in (f"{folders[0]}/", f"{folders[0]}/../{folders[0].name}", str(tmp_path / "link")):
        parts = [CorpusPart(path=path, weight=0.5) for path in (str(folders[0]), name)]
        with pytest.raises(UserError, match=r"are one corpus: name it once, with the sum of the weights"):
            open_corpus(parts, tiny_run.WINDOW)


def test_each_corpus_is_checked_against_the_model_and_the_mixture(tmp_path, folders, parts):
    options = options_for(tmp_path, parts, "run", data={"data_mix": "tiny"})
    tiny_run.make_corpus(folders[2], 8, mixture="other")
    with pytest.raises(UserError, match=r"data_mix is 'tiny', but .*c2/manifest\.json says .* 'other'"):
        pretrain(options)
    (folders[1] / "shard_00000.bin").unlink()
    with pytest.raises(UserError, match=r"c1/shard_00000\.bin is not there"):
        pretrain(options)


def test_doctor_tells_of_each_corpus_how_often_it_is_read(tmp_path, parts, capsys):
    options = options_for(tmp_path, parts, "run")
    assert run_app(cli.app, ["doctor", "--config", str(options.config), "--out", str(options.out), "--json"]) == 0
    found = [own["text"] for own in json.loads(capsys.readouterr().out)["findings"] if own["check"] == "corpus"]
    alone = [PretrainDataset(part.path, tiny_run.WINDOW) for part in parts]
    read = [56, 16, 8]  # of 20 steps of 4 windows
    assert found == [
        f"{own.path}: {own.total_tokens:,} tokens, {len(own):,} windows; the run reads {count / len(own):.2f} epochs"
        for own, count in zip(alone, read, strict=True)
    ]


def test_without_a_validation_path_of_its_own_an_evaluation_is_refused(tmp_path, parts):
    options = options_for(tmp_path, parts, "run", eval_interval=5)
    with pytest.raises(UserError, match=r"set data\.validation_data_path"):
        pretrain(options)
    path = f"data.validation_data_path={parts[0].path}/validation"
    assert pretrain(dataclasses.replace(options, overrides=[path], max_steps=5)) == 0
    assert len(tiny_run.events(options.out, "eval")) == 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            [{"path": "a", "weight": 0.7}, {"path": "b", "weight": 0.2}],
            "train_data_path has weights that add up to 0.9",
        ),
        (
            [{"path": "a", "weight": 0.70001}, {"path": "b", "weight": 0.29999}],
            "at least 0.0001 and have at most four decimals",
        ),
        ([{"path": "a", "weight": 1.0}, {"path": "b", "weight": 1e-11}], "weight is 1e-11: it must be at least 0.0001"),
        ([{"path": "a", "weight": 0.5}, {"path": "a", "weight": 0.5}], "train_data_path names a twice"),
        ([{"path": "a", "weight": 1.0}], "at least 2"),
    ],
)
def test_wrong_weights_are_refused(value, message):
    with pytest.raises(ValueError, match=message):
        DataConfig.model_validate({"train_data_path": value})
