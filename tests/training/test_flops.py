"""Operations per token, device peaks and MFU, against figures worked out by hand and vendors' data sheets."""

import pytest

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.training.cluster import card_memory_gb
from gpt_oss_lite.training.flops import device_peak_flops, flops_per_token, format_mfu, mfu

CONFIG = ModelConfig(padded_vocab_size=128256)
# Active parameters without norms and sinks; 12 operations per unit of attention width (8 heads x 96) and position.
ACTIVE = 247_209_984


@pytest.mark.parametrize(
    ("seq_len", "flops"),
    [
        (4096, 1_603_584_000),
        (4096, 6 * ACTIVE + 12 * 768 * (6 * 128 + 6 * 2048)),
        (32768, 6 * ACTIVE + 12 * 768 * (6 * 128 + 6 * 16384)),  # 2,396,307,456: only the full layers grow
        (128, 6 * ACTIVE + 12 * 768 * 12 * 64),  # a window as long as the sequence is full attention
    ],
)
def test_flops_per_token_count_the_window(seq_len, flops):
    assert flops_per_token(CONFIG, seq_len) == flops


def test_without_windows_every_layer_is_full():
    assert flops_per_token(CONFIG.replace(window_size=None), 4096) == 6 * ACTIVE + 12 * 768 * 12 * 2048


def test_only_the_experts_in_use_count():
    per_expert_and_layer = 6 * 3 * 768 * 1536
    base = flops_per_token(CONFIG, 4096)
    assert flops_per_token(CONFIG.replace(n_experts=16), 4096) - base == 6 * 12 * 768 * 8  # the router's new columns
    assert flops_per_token(CONFIG.replace(experts_per_token=3), 4096) - base == 12 * per_expert_and_layer
    assert base - flops_per_token(CONFIG.replace(n_shared_experts=0), 4096) == 12 * per_expert_and_layer


def test_an_untied_head_costs_what_a_tied_one_does():
    assert flops_per_token(CONFIG.replace(tie_embeddings=False), 4096) == 1_603_584_000


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("A100-PCIE-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A800-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 3090", 71),
    ],
)
def test_peaks_are_the_dense_bf16_ones_of_the_data_sheets(name, tflops):
    assert device_peak_flops(name) == tflops * 1e12


@pytest.mark.parametrize(
    "name",
    ["NVIDIA H20", "NVIDIA H2000", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA A10G", "NVIDIA GeForce RTX 4090 D",
     "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 Laptop GPU", "Tesla V100-SXM2-16GB", "NVIDIA L400",
     "cpu", ""],
)  # fmt: skip
def test_a_device_that_is_not_known_has_no_peak_and_no_mfu(name):
    assert device_peak_flops(name) is None
    share = mfu(1e5, CONFIG, 4096, device_peak_flops(name))
    assert format_mfu(share) == "n/a"


@pytest.mark.parametrize(
    ("name", "memory_gb"),
    [
        ("NVIDIA A100-SXM4-80GB", 80), ("NVIDIA A100-SXM4-40GB", 40), ("A100-PCIE-40GB", 40),
        ("NVIDIA A100 80GB PCIe", 80), ("NVIDIA A100 PCIe", None), ("NVIDIA H100 80GB HBM3", 80),
        ("NVIDIA H100 PCIe", 80), ("NVIDIA H100 NVL", 94), ("NVIDIA H200", 141), ("NVIDIA GH200 480GB", 96),
        ("NVIDIA B200", 180), ("NVIDIA L4", 24), ("NVIDIA L40S", 48), ("NVIDIA GeForce RTX 4090", 24),
        ("NVIDIA GeForce RTX 5090", 32), ("NVIDIA H20", None), ("cpu", None),
    ],
)  # fmt: skip
def test_memory_is_that_of_the_data_sheets(name, memory_gb):
    assert card_memory_gb(name) == memory_gb


def test_mfu_is_the_measured_share_of_the_peak():
    # 243,500 tokens/s on an H200 were 39.5 % (the recipe's windows of 4,096).
    assert format_mfu(mfu(243_500, CONFIG, 4096, device_peak_flops("NVIDIA H200"))) == "39.5%"
