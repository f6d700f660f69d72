"""The loop's whole step on a GPU."""

import pytest
import tiny_run
import torch
from syncs import syncs_refused

from gpt_oss_lite.training.pretrain import PretrainOptions, train_step
from gpt_oss_lite.training.run import open_run, plan_run

pytestmark = pytest.mark.gpu


def test_a_step_on_the_fused_path_never_waits_for_the_device(tmp_path):
    corpus = tiny_run.make_corpus(tmp_path / "data")
    recipe = tiny_run.write_recipe(
        tmp_path / "tiny.yaml", corpus, pin_memory=True, model={"moe_dispatch": "auto", "window_size": 4}
    )
    run = open_run(plan_run(PretrainOptions(config=recipe, out=tmp_path / "run", seed=0)))
    for _ in range(3):
        train_step(run)
    with syncs_refused():
        for _ in range(3):
            train_step(run)
    assert run.state.step == 6


def test_the_peak_does_not_grow_with_accumulation(tmp_path):
    corpus = tiny_run.make_corpus(tmp_path / "data", n_documents=200)
    model = {"moe_dispatch": "auto", "d_model": 256, "expert_hidden_size": 512, "n_layers": 4}
    peaks = []
    for accumulation in (2, 8):
        recipe = tiny_run.write_recipe(
            tmp_path / "tiny.yaml", corpus, model=model, gradient_accumulation_steps=accumulation
        )
        run = open_run(plan_run(PretrainOptions(config=recipe, out=tmp_path / f"run{accumulation}", seed=0)))
        train_step(run)
        train_step(run)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        train_step(run)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del run
    assert peaks[1] < 1.05 * peaks[0]
