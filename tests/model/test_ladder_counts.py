"""The ladder's recipes: sizes by hand arithmetic, tokens by one rule, and layers that the fused kernels take."""

from pathlib import Path

import pytest
import torch

from gpt_oss_lite.config import Recipe, load_recipe
from gpt_oss_lite.model.fused.block import why_not_fused_attention, why_not_fused_moe
from gpt_oss_lite.model.transformer import GPTOSS

ROOT = Path(__file__).parents[2]
# By name: width, layers, query heads, experts, and the published counts, total and active per token.
RUNGS = {
    "pretrain_150m": (384, 12, 4, 8, 150_156_720, 86_455_728),
    "pretrain_a100_502m": (768, 12, 8, 8, 502_033_248, 247_229_280),
    "pretrain_1_5b": (1152, 18, 12, 8, 1_509_568_344, 649_604_952),
    "pretrain_7b": (1536, 28, 16, 16, 7_134_107_584, 1_585_043_392),
}


def recipe_of(name: str) -> Recipe:
    return load_recipe(ROOT / f"configs/{name}.yaml")


@pytest.mark.parametrize("name", RUNGS)
def test_counts_of_a_model_built_on_the_meta_device(name: str) -> None:
    width, layers, heads, experts, total, active = RUNGS[name]
    with torch.device("meta"):
        model = GPTOSS(recipe_of(name).model)
    # Heads are width / 96, half as many for keys and values; an expert is three matrices of width x 2 width.
    assert heads * 96 == width
    expert = 3 * width * 2 * width
    projections = width * width + width * 2 * (heads // 2) * 96 + width * width
    layer = projections + experts * width + (experts + 1) * expert + 2 * width + heads
    assert 128_256 * width + layers * layer + width == total
    assert total - layers * (experts - 2) * expert == active
    assert (model.num_parameters(), model.num_active_parameters()) == (total, active)


@pytest.mark.parametrize("name", RUNGS)
def test_sixteen_tokens_a_parameter_in_whole_thousands_of_steps(name: str) -> None:
    training = recipe_of(name).training
    tokens_a_step = 4096 * training.micro_batch_size * training.gradient_accumulation_steps
    assert training.total_steps == 16 * RUNGS[name][4] // tokens_a_step // 1000 * 1000
    assert training.warmup_steps == pytest.approx(training.total_steps / 20, rel=0.03)


@pytest.mark.parametrize("name", RUNGS)
def test_the_family_is_one(name: str) -> None:
    """But for its sizes, a rung's model is the 502M recipe's."""
    sizes = ("d_model", "n_layers", "n_heads", "n_kv_heads", "n_experts", "expert_hidden_size")
    base, rung = recipe_of("pretrain_a100_502m").model, recipe_of(name).model
    assert rung.replace(**{key: getattr(base, key) for key in sizes}) == base
    assert rung.n_layers % 2 == 0
    assert [rung.layer_window(0), rung.layer_window(1)] == [128, None]


@pytest.mark.parametrize("name", RUNGS)
def test_nothing_in_a_rung_keeps_it_from_the_fused_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt_oss_lite.model.fused.block.find_spec", lambda _: object())
    config = recipe_of(name).model
    for why_not in (why_not_fused_attention, why_not_fused_moe):
        assert why_not.__wrapped__(config, "cuda", torch.bfloat16) is None
