"""What a row says of experts and sinks, against figures taken from the model itself, micro-batch by micro-batch."""

import pytest
import tiny_run
import torch

from gpt_oss_lite.training.pretrain import PretrainOptions, log_step, sink_means, train_step
from gpt_oss_lite.training.run import open_run, plan_run


@pytest.fixture
def run(tmp_path):
    recipe = tiny_run.write_recipe(tmp_path / "r.yaml", tiny_run.make_corpus(tmp_path / "corpus"))
    return open_run(plan_run(PretrainOptions(config=recipe, out=tmp_path / "run", seed=1)))


def test_expert_figures_are_over_the_steps_micro_batches(run):
    windows = [int(window) for window in run.order.windows(0, 4)]
    halves = [torch.stack([run.dataset[window][0] for window in part]) for part in (windows[:2], windows[2:])]
    with torch.no_grad():
        stats = [run.model.hidden_states(ids_BT)[1] for ids_BT in halves]
    log_step(run, train_step(run))
    (row,) = tiny_run.rows(run.folder)

    load = (stats[0].expert_load + stats[1].expert_load) / 2
    assert torch.tensor(row["expert_load"]) == pytest.approx(load)
    assert row["expert_load"] != stats[1].expert_load.tolist()  # the last micro-batch alone would be another figure
    assert row["router_entropy"] == pytest.approx(
        [(a + b).item() / 2 for a, b in zip(*(s.entropy for s in stats), strict=True)]
    )
    assert row["expert_imbalance"] == pytest.approx([max(layer) * len(layer) for layer in row["expert_load"]], rel=1e-5)


def test_sink_means_are_of_the_logits_that_attention_uses(run, tmp_path):
    with torch.no_grad():
        run.model.blocks[0].attn.sink_bias.copy_(torch.tensor([1.0, 2.0]))
        run.model.blocks[1].attn.sink_bias.copy_(torch.tensor([-30.0, 40.0]))  # clamped to [-10, 15]
    assert sink_means(run.model) == pytest.approx([1.5, 2.5])


def test_a_model_without_sinks_has_none(run, tmp_path):
    recipe = tiny_run.write_recipe(tmp_path / "n.yaml", tmp_path / "corpus", model={"sink_bias": False}, total_steps=4)
    other = open_run(plan_run(PretrainOptions(config=recipe, out=tmp_path / "none", seed=1)))
    log_step(other, train_step(other))
    assert tiny_run.rows(other.folder)[0]["sink_mean"] is None
