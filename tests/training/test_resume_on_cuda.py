"""Exact resume on a GPU's fused path, with `training.deterministic: true`; the same proof as test_resume.py's."""

import signal

import pytest
import tiny_run
import torch

from gpt_oss_lite.config.recipe import load_recipe
from gpt_oss_lite.model.fused.block import why_not_fused_attention, why_not_fused_moe

pytestmark = pytest.mark.gpu

# Twenty steps of the tiny model end sooner than a test can look at its log twice.
SLOWLY = """
import time
from gpt_oss_lite.training import pretrain as loop
step = loop.train_step
loop.train_step = lambda run: (time.sleep(0.1), step(run))[1]
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cuda")
    corpus = tiny_run.make_corpus(folder / "data")
    model = {"moe_dispatch": "auto", "attention_backend": "auto"}
    path = tiny_run.write_recipe(folder / "tiny.yaml", corpus, deterministic=True, model=model)
    config = load_recipe(path).model
    assert why_not_fused_attention(config, "cuda", torch.bfloat16) is None
    assert why_not_fused_moe(config, "cuda", torch.bfloat16) is None
    return path


def unbroken(recipe, folder):
    code, stderr = tiny_run.finish(tiny_run.start_run(config=recipe, out=folder, seed=3))
    assert code == 0, stderr
    return tiny_run.rows(folder), tiny_run.digests(folder, 20)


@pytest.fixture(scope="module")
def first_run(recipe, tmp_path_factory):
    return unbroken(recipe, tmp_path_factory.mktemp("unbroken") / "run")


def test_two_runs_are_bitwise_equal(recipe, first_run, tmp_path):
    assert unbroken(recipe, tmp_path / "run") == first_run


def test_20_steps_are_10_then_sigkill_then_10(recipe, first_run, tmp_path):
    run = tmp_path / "broken"
    process = tiny_run.start_run(SLOWLY, config=recipe, out=run, seed=3)
    tiny_run.kill_after_step(process, run, step=12, checkpoint=10)
    assert tiny_run.finish(process)[0] == -signal.SIGKILL
    code, stderr = tiny_run.finish(tiny_run.start_run(config=recipe, out=run, resume_from=10))
    assert code == 0, stderr
    assert (tiny_run.rows(run), tiny_run.digests(run, 20)) == first_run
