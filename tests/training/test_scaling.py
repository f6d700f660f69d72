"""The speed of several GPUs: worked out by hand from the measured row, data sheets and a ring's bytes."""

from pathlib import Path

import pytest

from gpt_oss_lite.config import load_recipe
from gpt_oss_lite.training.cluster import Cluster
from gpt_oss_lite.training.layout import Layout, usable_ranks
from gpt_oss_lite.training.scaling import micro_batch_seconds, step_time
from gpt_oss_lite.training.setting import Setting
from shared_data.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPE = load_recipe(CONFIGS / "pretrain_h200_502m.yaml")
WHOLE = Setting(32, 1, None, 16384)
# A step's windows 32 to a GPU: the recipe's on each of 8, 16 or 64.
H200 = Cluster(gpus=512, gpu="NVIDIA H200", gpu_gb=141)


def of_each(ranks: int, micro_batch: int = 32) -> Setting:
    return Setting(micro_batch, ranks, None, 16384)


@pytest.mark.parametrize(
    ("setting", "tokens", "tokens_per_s"),
    [
        (WHOLE, 131_072, 286_000),  # configs/pretrain_h200_502m.yaml
        (Setting(8, 4, 3, 8192), 32_768, 252_500),  # configs/pretrain_a100_502m.yaml
        (Setting(4, 8, None, 8192), 16_384, 146_200),  # configs/pretrain_24gb_502m.yaml
    ],
)
def test_one_h200_is_as_fast_as_measured(setting, tokens, tokens_per_s):
    seconds = micro_batch_seconds(RECIPE.model, setting, 989e12)
    assert tokens / seconds == pytest.approx(tokens_per_s, rel=0.002)


def test_one_gpu_exchanges_nothing():
    time = step_time(RECIPE, WHOLE, Layout(), H200)
    assert (time.exchange, time.exposed, time.waiting) == (0, 0, 0)
    assert time.total == time.micro_batches == micro_batch_seconds(RECIPE.model, WHOLE, 989e12)


@pytest.mark.parametrize(
    ("ranks", "rate"),
    [
        (2, 450e9),  # NVLink of a Hopper card, 900 GB/s in both directions
        (8, 450e9),
        (64, 400e9),  # eight ports of 400 Gbit/s
    ],
)
def test_replicas_send_twice_the_gradients_and_hide_all_but_the_embeddings(ranks, rate):
    time = step_time(RECIPE, of_each(ranks), Layout(ranks), H200)
    assert time.exchange == pytest.approx(2 * (ranks - 1) / ranks * 4 * 502_033_248 / (0.7 * rate))
    assert time.exposed == pytest.approx(2 * (ranks - 1) / ranks * 4 * 128_256 * 768 / (0.7 * rate))
    assert time.total == pytest.approx((time.micro_batches + time.exposed) / 0.96)


def test_a_slow_network_is_exposed_behind_the_last_backward_pass():
    """Accumulation does not make it longer: it comes once a step."""
    slow = Cluster(gpus=16, gpu="NVIDIA H200", network_gbit=1)
    micro = micro_batch_seconds(RECIPE.model, WHOLE, 989e12)
    exchange = 2 * 15 / 16 * 4 * 502_033_248 / (0.7 * 8 * 1e9 / 8)
    for accumulation in (1, 4):
        time = step_time(RECIPE, of_each(16 * accumulation), Layout(16), slow)
        assert time.exposed == pytest.approx(exchange - 0.8 * 2 / 3 * micro)
        assert time.micro_batches == pytest.approx(accumulation * micro)


def test_shards_are_gathered_twice_and_scattered_once_in_every_micro_batch():
    time = step_time(RECIPE, of_each(16), Layout(8, "fsdp"), H200)
    assert time.exchange == pytest.approx(2 * 3 * 7 / 8 * 4 * 502_033_248 / (0.7 * 450e9))


def test_small_micro_batches_wait_for_the_host():
    one, four = (micro_batch_seconds(RECIPE.model, Setting(size, 32 // size, None, 8192), 989e12) for size in (1, 4))
    assert one == four == pytest.approx(16_384 / 146_200)
    # Of three blocks one launches its forward pass, a third of its work, again.
    recomputing = micro_batch_seconds(RECIPE.model, Setting(1, 32, 3, 8192), 989e12)
    assert recomputing == pytest.approx(16_384 / 146_200 * (1 + 1 / 9))


def test_ranks_share_the_windows_evenly_and_fill_their_nodes():
    assert usable_ranks(32, 64, 8) == [1, 2, 4, 8, 16, 32]
    assert usable_ranks(64, 12, 8) == [1, 2, 4, 8]
    assert usable_ranks(48, 48, 8) == [1, 2, 3, 4, 6, 8, 16, 24, 48]
    assert usable_ranks(256, 24, 4) == [1, 2, 4, 8, 16]
    assert usable_ranks(7, 1, 8) == [1]


@pytest.mark.parametrize(
    ("gpu", "local", "across"),
    [
        ("NVIDIA A100-SXM4-80GB", 300e9, 300e9),
        ("NVIDIA H100 80GB HBM3", 450e9, 400e9),
        ("NVIDIA B200", 900e9, 400e9),
        ("NVIDIA H100 PCIe", 32e9, 32e9),
        ("NVIDIA L40S", 32e9, 32e9),
    ],
)
def test_links_of_the_data_sheets(gpu, local, across):
    cluster = Cluster(gpus=16, gpu=gpu)
    assert (cluster.link_rate(8), cluster.link_rate(16)) == (local, across)


def test_an_unknown_gpu_is_an_error_that_names_some_known_ones():
    with pytest.raises(UserError, match=r"--gpu is A100: its peak is not known; .*'NVIDIA A100-SXM4-80GB'"):
        Cluster(gpus=1, gpu="A100")
