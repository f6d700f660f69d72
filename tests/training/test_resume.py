"""A run that is killed and gone on with is the unbroken run, bit for bit. Each run is its own process."""

import json
import signal

import pytest
import tiny_run

from gpt_oss_lite.training.pretrain import PretrainOptions, pretrain


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """A corpus of few windows, so that 20 steps cross epochs, a recipe, and the unbroken run's log and files."""
    folder = tmp_path_factory.mktemp("resume")
    corpus = tiny_run.make_corpus(folder / "corpus", n_documents=25)
    recipe = tiny_run.write_recipe(folder / "tiny.yaml", corpus, save_interval=5)
    code, stderr = tiny_run.finish(tiny_run.ForkedRun(config=recipe, out=folder / "unbroken", seed=7))
    assert code == 0, stderr
    return folder, recipe, tiny_run.rows(folder / "unbroken"), tiny_run.digests(folder / "unbroken", 20)


def test_20_steps_are_10_then_sigkill_then_10(setting):
    folder, recipe, rows, digests = setting
    run = folder / "killed"
    process = tiny_run.ForkedRun(config=recipe, out=run, seed=7)
    tiny_run.kill_after_step(process, run, 12, checkpoint=10)
    assert tiny_run.finish(process)[0] == -signal.SIGKILL
    assert len(tiny_run.rows(run)) >= 11
    code, stderr = tiny_run.finish(tiny_run.ForkedRun(config=recipe, out=run, resume_from=10))
    assert code == 0, stderr
    assert "[resume] from step 10" in stderr
    (resumed,) = tiny_run.events(run, "resume")
    assert (resumed["step"], resumed["stop_step"], len(tiny_run.events(run, "start"))) == (10, 20, 1)
    assert "[knobs]" not in stderr
    assert "fused" not in stderr
    assert tiny_run.rows(run) == rows
    assert tiny_run.digests(run, 20) == digests
    assert {row["epoch"] for row in rows} > {0}


def test_stopped_by_signal_resumed_with_workers_and_killed_again(setting):
    folder, recipe, rows, digests = setting
    run = folder / "stopped"
    process = tiny_run.ForkedRun(config=recipe, out=run, seed=7, overrides=["training.num_workers=2"])
    tiny_run.kill_after_step(process, run, 3, signal.SIGTERM)
    assert tiny_run.finish(process)[0] == 3
    process = tiny_run.ForkedRun(config=recipe, out=run, auto_resume=True, overrides=["training.num_workers=1"])
    tiny_run.kill_after_step(process, run, 8)
    tiny_run.finish(process)
    code, stderr = tiny_run.finish(tiny_run.ForkedRun(config=recipe, out=run, auto_resume=True))
    assert code == 0, stderr
    assert tiny_run.rows(run) == rows
    assert tiny_run.digests(run, 20) == digests


def test_killed_before_the_first_checkpoint_starts_over_from_the_recorded_seed(setting):
    folder, recipe, rows, digests = setting
    run = folder / "early"
    process = tiny_run.ForkedRun(config=recipe, out=run, seed=7)
    tiny_run.kill_after_step(process, run, 1)
    tiny_run.finish(process)
    for path in (run / "checkpoints").glob("meta_*"):  # were it quicker than the signal
        path.unlink()
    code, stderr = tiny_run.finish(tiny_run.ForkedRun(config=recipe, out=run, resume_latest=True))
    assert code == 0, stderr
    assert tiny_run.rows(run) == rows
    assert tiny_run.digests(run, 20) == digests


def test_positions_of_the_stream_follow_each_other(setting):
    _, _, rows, _ = setting
    assert [row["position"] for row in rows] == [4 * step for step in range(1, 21)]


def test_every_checkpoint_holds_random_state_and_position(setting):
    folder, _, _, _ = setting
    for step in (5, 10, 15, 20):
        meta = json.loads((folder / "unbroken" / "checkpoints" / f"meta_step_{step}.json").read_text())
        assert meta["position"] == 4 * step
        assert f"rng_step_{step}.pt" in meta["files"]


def test_muons_momentum_is_saved_and_gone_on_with(tmp_path):
    corpus = tiny_run.make_corpus(tmp_path / "corpus", n_documents=25)
    recipe = tiny_run.write_recipe(tmp_path / "muon.yaml", corpus, optimizer="muon", total_steps=8, save_interval=4)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert pretrain(PretrainOptions(config=recipe, out=whole, seed=7)) == 0
    assert pretrain(PretrainOptions(config=recipe, out=parts, seed=7, max_steps=4)) == 0
    assert pretrain(PretrainOptions(config=recipe, out=parts, resume_latest=True)) == 0
    assert tiny_run.rows(parts) == tiny_run.rows(whole)
    assert tiny_run.digests(parts, 8) == tiny_run.digests(whole, 8)
    assert tiny_run.rows(whole)[-1]["ce"] < tiny_run.rows(whole)[0]["ce"] - 0.3
