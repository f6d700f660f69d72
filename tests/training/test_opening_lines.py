"""What a run says before its first step of how it computes."""

import pytest
import tiny_run
import torch

from gpt_oss_lite.config import load_recipe
from gpt_oss_lite.training.layout import ONE_GPU
from gpt_oss_lite.training.run import describe_paths, fallbacks

CUDA = torch.device("cuda")
IN_VAIN = "[model] training.compile is true, without effect: "
BIASES = "model.attention_bias=true"
PLAIN = "model.moe_dispatch=reference"


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ([], "attention and experts on fused kernels, and only a model without any is compiled"),
        ([PLAIN], "attention on fused kernels, and only a model without any is compiled"),
        ([BIASES], "experts on fused kernels, and only a model without any is compiled"),
        ([BIASES, PLAIN], None),
        (["training.compile=false"], None),
    ],
)
def test_a_gpus_run_says_where_it_is_not_compiled_although_it_should_be(overrides, why):
    recipe = load_recipe("pretrain_a100_502m", overrides)  # compile: true
    reasons = fallbacks(recipe.model, ONE_GPU, CUDA)
    lines = list(describe_paths(recipe.training, CUDA, reasons))
    assert [line.split(":")[0] for line in lines[:2]] == ["[model] attention", "[model] experts"]
    assert lines[2:] == ([] if why is None else [IN_VAIN + why])


def test_so_does_a_run_without_a_gpu(tmp_path):
    corpus = tiny_run.make_corpus(tmp_path / "data")
    recipe = tiny_run.write_recipe(tmp_path / "tiny.yaml", corpus, compile=True)
    run = tiny_run.start_run(config=recipe, out=tmp_path / "run", max_steps=1, seed=0)
    code, stderr = tiny_run.finish(run)
    assert code == 0, stderr
    if not torch.cuda.is_available():
        assert IN_VAIN + "there is no GPU" in stderr.splitlines()
