"""Rotary tables against transformers' YaRN, and the rotation against complex numbers."""

import math

import pytest
import torch
from oracles import transformers_config
from small_models import GPT_OSS_VARIANT, relative_error
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.model.rope import RotaryEmbedding, rotate, yarn_frequencies

SHIPPED = ModelConfig().replace(rope_scale=32.0)


def frequencies(config: ModelConfig, scale: float) -> tuple[torch.Tensor, float]:
    return yarn_frequencies(
        config.head_dim,
        config.rope_theta,
        scale,
        config.original_context,
        config.yarn_beta_fast,
        config.yarn_beta_slow,
    )


@pytest.mark.parametrize("head_dim", [8, 64, 96])
@pytest.mark.parametrize(("original", "scale"), [(4096, 32.0), (4096, 2.0), (64, 8.0), (131072, 32.0)])
def test_frequencies_equal_transformers_bit_by_bit(head_dim: int, original: int, scale: float) -> None:
    config = GPT_OSS_VARIANT.replace(head_dim=head_dim, yarn_original_max_seq_len=original, rope_scale=scale)
    theirs_P, their_factor = ROPE_INIT_FUNCTIONS["yarn"](transformers_config(config), device="cpu")
    ours_P, our_factor = frequencies(config, scale)
    assert torch.equal(ours_P, theirs_P)
    assert our_factor == their_factor


def test_scale_one_equals_transformers_plain_rope_bit_by_bit() -> None:
    theirs_P, _ = GptOssRotaryEmbedding.compute_default_rope_parameters(transformers_config(GPT_OSS_VARIANT))
    assert torch.equal(frequencies(GPT_OSS_VARIANT, 1.0)[0], theirs_P)


def test_attention_factor_is_as_published() -> None:
    assert frequencies(SHIPPED, 32.0)[1] == pytest.approx(0.1 * math.log(32) + 1)
    assert frequencies(SHIPPED, 1.0)[1] == 1.0


def test_fast_pairs_are_kept_and_slow_ones_slowed_in_full() -> None:
    plain_P, _ = frequencies(SHIPPED, 1.0)
    scaled_P, _ = frequencies(SHIPPED, 32.0)
    turns_P = plain_P * 4096 / (2 * math.pi)
    assert (turns_P > 32).any()
    assert torch.equal(scaled_P[turns_P > 32], plain_P[turns_P > 32])
    assert (turns_P < 1).any()
    assert torch.allclose(scaled_P[turns_P < 1], plain_P[turns_P < 1] / 32)


def test_tables_do_not_depend_on_the_number_of_tokens() -> None:
    """YaRN stayed off silently where T was the original length (pytorch/torchtitan#4117)."""
    rotary = RotaryEmbedding(SHIPPED)
    original = SHIPPED.original_context
    long = rotary.tables(torch.arange(2 * original))
    for n_tokens in (1, 17, original - 1, original, original + 1):
        for short_TP, long_TP in zip(rotary.tables(torch.arange(n_tokens)), long, strict=True):
            assert torch.equal(short_TP, long_TP[:n_tokens])
    plain = RotaryEmbedding(SHIPPED.replace(rope_scale=1.0)).tables(torch.arange(original))
    assert not torch.allclose(long[0][:original], plain[0])


def test_rotation_is_multiplication_by_a_complex_number() -> None:
    torch.manual_seed(0)
    x_BTHC = torch.randn(2, 7, 3, 8, dtype=torch.float64)
    rotary = RotaryEmbedding(ModelConfig(head_dim=8))
    positions_T = torch.tensor([0, 1, 2, 50, 51, 4000, 4095])
    angles_TP = positions_T[:, None] * 150_000.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    turned = (
        torch.complex(x_BTHC[..., :4], x_BTHC[..., 4:]) * torch.polar(torch.ones_like(angles_TP), angles_TP)[:, None]
    )
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    assert relative_error(rotate(x_BTHC, rotary.tables(positions_T)), expected) < 2e-4  # fp32 angles of up to 4,095 rad


def test_low_precision_activations_are_turned_in_fp32() -> None:
    torch.manual_seed(0)
    x_BTHC = torch.randn(1, 300, 1, 8)
    tables = RotaryEmbedding(ModelConfig(head_dim=8)).tables(torch.arange(300))
    low = x_BTHC.bfloat16()
    assert rotate(low, tables).dtype == torch.bfloat16
    assert torch.equal(rotate(low, tables), rotate(low.float(), tables).bfloat16())


def test_scale_can_be_changed_and_is_checked() -> None:
    rotary = RotaryEmbedding(SHIPPED)
    positions_T = torch.arange(100)
    before = rotary.tables(positions_T)
    rotary.set_scale(4.0)
    assert torch.equal(
        rotary.tables(positions_T)[0], RotaryEmbedding(SHIPPED.replace(rope_scale=4.0)).tables(positions_T)[0]
    )
    rotary.set_scale(32.0)
    assert torch.equal(rotary.tables(positions_T)[0], before[0])
    for scale in (0.5, math.nan, math.inf):
        with pytest.raises(ValueError, match="at least 1"):
            rotary.set_scale(scale)
