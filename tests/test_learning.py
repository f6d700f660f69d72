"""The experiments of docs/learning.md in miniature."""

import pytest
from tiny_run import events, make_corpus, rows, write_recipe

from gpt_oss_lite.config import load_recipe
from gpt_oss_lite.training.pretrain import PretrainOptions, pretrain

GPT_OSS = {"n_experts": 5, "experts_per_token": 3, "n_shared_experts": 0, "expert_activation": "clamped_swiglu"}


def test_transformers_gpt_oss_learns_step_by_step_as_our_loop_does(tmp_path):
    from learning_peer import train_peer

    corpus = make_corpus(tmp_path / "corpus")
    recipe = write_recipe(
        tmp_path / "recipe.yaml", corpus, model=GPT_OSS, total_steps=12, eval_interval=12, save_interval=100
    )
    run = tmp_path / "run"
    assert pretrain(PretrainOptions(config=recipe, out=run, seed=3)) == 0
    peer = train_peer(load_recipe(recipe), seed=3)
    ours = rows(run)
    assert ours[-1]["ce"] < ours[0]["ce"] - 0.3
    for key in ("ce", "aux", "grad_norm", "lr"):
        assert [row[key] for row in peer["rows"]] == pytest.approx([row[key] for row in ours], rel=2e-4), key
    assert peer["final"]["loss"] == pytest.approx(events(run, "eval")[-1]["loss"], rel=2e-4)
