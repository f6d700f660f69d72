"""Inconsistent model blocks are refused by name, value and what is allowed; consistent small ones are easy to write."""

import pytest

from gpt_oss_lite.config import ModelConfig


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"n_heads": 7}, "n_heads is 7: it must be a multiple of n_kv_heads (4)"),
        ({"head_dim": 95}, "head_dim is 95: it must be even"),
        ({"experts_per_token": 9}, "experts_per_token is 9: it must lie between 1 and n_experts (8)"),
        ({"padded_vocab_size": 127999}, "padded_vocab_size is 127999: it must be at least vocab_size (128000)"),
        (
            {"yarn_scale_factor": 16.0, "yarn_original_max_seq_len": 4096, "yarn_target_seq_len": 131072},
            "yarn_scale_factor is 16: it must be yarn_target_seq_len / yarn_original_max_seq_len (131072 / 4096 = 32)",
        ),
        (
            {"max_seq_len": 64, "yarn_target_seq_len": 131072},
            "(131072 / max_seq_len, since it is null: 64 = 2048)",
        ),
        ({"eval_max_seq_len": 131073}, "eval_max_seq_len is 131073: it must be at most yarn_target_seq_len (131072)"),
        ({"rope_scale": 33.0}, "rope_scale is 33: it must lie between 1 and yarn_scale_factor (32)"),
        ({"yarn_beta_slow": 32.0}, "yarn_beta_slow is 32: it must be less than yarn_beta_fast (32)"),
    ],
)
def test_inconsistent_pairs_are_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        ModelConfig(**keys)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"yarn_scale_factor": 32.0, "yarn_original_max_seq_len": 4096, "yarn_target_seq_len": 131072},
        {"max_seq_len": 64},
        {"max_seq_len": 64, "yarn_original_max_seq_len": 4096, "yarn_target_seq_len": 131072},
        {"max_seq_len": 100, "yarn_scale_factor": 1.5},
        {"max_seq_len": 96, "yarn_scale_factor": 4 / 3, "yarn_target_seq_len": 128},
        {"max_seq_len": 8192, "yarn_original_max_seq_len": 4096},
        {"padded_vocab_size": 128000},
        {"n_experts": 1, "experts_per_token": 1},
        {"window_size": None},
    ],
)
def test_consistent_blocks_are_taken_as_they_are_and_their_lengths_fit_yarns_scale(keys: dict[str, object]) -> None:
    config = ModelConfig(**keys)
    assert {key: getattr(config, key) for key in keys} == keys
    # s = L' / L (Peng et al., 2023, section 3.1), whichever of the three are null.
    assert config.original_context * config.yarn_scale_factor == pytest.approx(config.target_context, abs=0.5)


def test_null_lengths_follow_from_the_others() -> None:
    config = ModelConfig()
    assert (config.original_context, config.target_context, config.eval_context) == (4096, 131072, 131072)
    small = config.replace(max_seq_len=64)
    assert (small.original_context, small.target_context, small.eval_context) == (64, 2048, 2048)
    stated = small.replace(yarn_original_max_seq_len=32, eval_max_seq_len=500)
    assert (stated.original_context, stated.target_context, stated.eval_context) == (32, 1024, 500)


def test_embedding_rows() -> None:
    assert ModelConfig().embedding_rows == 128_000
    assert ModelConfig(padded_vocab_size=128256).embedding_rows == 128_256
