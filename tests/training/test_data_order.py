"""The stream of windows: golden, an exact cover of each epoch, the same whatever reads it."""

import pytest
import tiny_run
import torch
from torch.utils.data import DataLoader

from gpt_oss_lite.training.data_order import DataOrder, MicroBatchSampler
from gpt_oss_lite.training.dataset import PretrainDataset
from gpt_oss_lite.training.stop import ignore_stop_signals


def philox4x64(counter, key, rounds=10):
    """Philox as its paper defines it (Salmon et al., SC 2011), in plain integers."""
    mask = 2**64 - 1
    c, k = list(counter), list(key)
    for _ in range(rounds):
        product0, product1 = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(product1 >> 64) ^ c[1] ^ k[0], product1 & mask, (product0 >> 64) ^ c[3] ^ k[1], product0 & mask]
        k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
    return c


def test_the_order_is_that_of_philox_words():
    """An order that changes with a library's release would make every old run impossible to resume."""
    # Random123's known-answer file, philox4x64-10 with counter and key 0.
    assert philox4x64([0] * 4, [0] * 2)[0] == 0x16554D9ECA36314C
    for epoch in (0, 1):
        words = [word for block in (1, 2, 3) for word in philox4x64([block, 0, 0, 0], [42, epoch])][:10]
        expected = sorted(range(10), key=words.__getitem__)
        assert DataOrder(10, seed=42).windows(10 * epoch, 10).tolist() == expected


@pytest.mark.parametrize("batch", [1, 3, 7, 10, 25])
def test_d25_steps_cut_one_stream_without_gaps_or_ragged_ends(batch):
    order = DataOrder(10, seed=3)
    whole = order.windows(0, 50).tolist()
    cut = [window for step in range(50 // batch) for window in order.windows(step * batch, batch)]
    assert cut == whole[: len(cut)]
    epochs = [whole[10 * epoch : 10 * epoch + 10] for epoch in range(5)]
    assert all(sorted(windows) == list(range(10)) for windows in epochs)
    assert len(set(map(tuple, epochs))) == 5
    assert [order.epoch(position) for position in (0, 9, 10, 49)] == [0, 0, 1, 4]


def test_seeds_differ():
    assert DataOrder(100, 1).windows(0, 100).tolist() != DataOrder(100, 2).windows(0, 100).tolist()


def test_permutation_is_uniform():
    """Chi-square over the 6 orders of 3 windows: 6,000 epochs, 5 degrees of freedom, 99.99 % point 25.7."""
    orders = [tuple(DataOrder(3, seed=7).windows(3 * epoch, 3).tolist()) for epoch in range(6000)]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 6
    assert sum((count - 1000) ** 2 / 1000 for count in counts) < 25.7


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_d25_any_number_of_loader_workers_gives_the_same_stream(tmp_path, workers):
    dataset = PretrainDataset(tiny_run.make_corpus(tmp_path, 30), tiny_run.WINDOW)
    order = DataOrder(len(dataset), seed=5)
    start = 13
    loader = DataLoader(
        dataset,
        batch_sampler=MicroBatchSampler(order, start, 4),
        num_workers=workers,
        worker_init_fn=ignore_stop_signals,
        generator=torch.Generator(),
    )
    before = torch.get_rng_state()
    stream = iter(loader)
    seen = torch.cat([next(stream)[0] for _ in range(15)])
    expected = torch.stack([dataset[int(w)][0] for w in order.windows(start, 60)])
    assert torch.equal(seen, expected)
    assert torch.equal(torch.get_rng_state(), before)  # loading draws nothing from the generator that is saved


def test_the_worked_example_in_the_documentation_is_true():
    page = (tiny_run.ROOT / "docs" / "training.md").read_text()
    order = DataOrder(n_windows=10, seed=42)
    assert f"({', '.join(str(order.windows(4 * step, 4).tolist()) for step in range(3))})" in page
