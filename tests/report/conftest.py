"""Real runs of the tiny recipe for the pages and the monitor: one stopped and gone on with, one that went back."""

import dataclasses
import json

import pytest
import tiny_run

from gpt_oss_lite.training.pretrain import PretrainOptions, pretrain, train
from gpt_oss_lite.training.run import open_run, plan_run
from gpt_oss_lite.training.stop import StopRequest


@pytest.fixture(scope="session")
def run_folders(tmp_path_factory):
    """(stopped and gone on with, gone back); 60 and 40 steps, each logged, evaluated every 10."""
    folder = tmp_path_factory.mktemp("runs")
    corpus = tiny_run.make_corpus(folder / "corpus")
    calm = tiny_run.write_recipe(folder / "calm.yaml", corpus, total_steps=60, eval_interval=10, save_interval=20)
    options = PretrainOptions(config=calm, out=folder / "calm", seed=1, max_steps=30)
    assert pretrain(options) == 0
    assert pretrain(dataclasses.replace(options, seed=None, max_steps=None, resume_latest=True)) == 0

    rough = tiny_run.write_recipe(
        folder / "rough.yaml", corpus, total_steps=40, eval_interval=10, save_interval=10, lr=3e-3, aux_loss_alpha=0.1
    )
    run = open_run(plan_run(PretrainOptions(config=rough, out=folder / "rough", seed=2)))
    tiny_run.blow_up(run, [5, *range(31, 36)])
    with StopRequest() as stop:
        assert train(run, stop) == 0
    with open(folder / "rough/samples.jsonl", "w") as file:
        text = "<script>document.title = 'taken'</script> & \ud800 " + 100 * "long"
        file.write(json.dumps({"step": 40, "prompt": "<b>import ", "text": text}) + "\n")
    return folder / "calm", folder / "rough"
