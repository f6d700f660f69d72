"""Spikes of loss and gradient norm: found by z-score, logged, skipped where asked, and the same after a resume."""

import dataclasses
import statistics

import pytest
import tiny_run
import torch
from syncs import syncs_refused

from gpt_oss_lite.training.late import LAG_STEPS
from gpt_oss_lite.training.pretrain import PretrainOptions, train
from gpt_oss_lite.training.run import open_run, plan_run
from gpt_oss_lite.training.spikes import SpikeWatch
from gpt_oss_lite.training.stop import StopRequest

CPU = torch.device("cpu")


def feed(watch, values, start=1):
    """Observe steps whose loss and norm are equal; what `observe` said of each."""
    return [bool(watch.observe(step, 10 * step, torch.tensor([v, v]))) for step, v in enumerate(values, start)]


def test_the_z_score_is_that_of_the_steps_before():
    watch = SpikeWatch(3.0, 8, CPU)
    values = [2.0, 2.5, 1.5, 2.2, 1.8, 2.4, 1.6, 2.0]
    assert not any(feed(watch, values))
    assert feed(watch, [4.0], start=9) == [True]
    spikes = watch.read(everything=True)
    assert [(s.step, s.position, s.signal, s.value) for s in spikes] == [(9, 90, "ce", 4.0), (9, 90, "grad_norm", 4.0)]
    expected = (4.0 - statistics.mean(values)) / statistics.pstdev(values)
    assert spikes[0].zscore == pytest.approx(expected, rel=1e-6)


def test_the_first_steps_falls_and_non_finite_values_are_no_spikes():
    watch = SpikeWatch(3.0, 8, CPU)
    assert not any(feed(watch, [9.0, 100.0, 3.0, 2.0, 2.1, 2.0, 1.9, 2.0, *[2.0] * 40]))
    assert not any(feed(watch, [0.1, float("nan"), float("inf")]))
    assert feed(watch, [500.0]) == [True]


def test_one_spike_does_not_hide_the_next_and_a_lasting_change_is_taken_up():
    watch = SpikeWatch(4.0, 20, CPU)
    noise = torch.randn(60, generator=torch.Generator().manual_seed(0)) * 0.1
    feed(watch, (2 + noise).tolist())
    assert feed(watch, [50.0, 2.0, 50.0]) == [True, False, True]
    after = feed(watch, (3 + noise).tolist())
    assert after[0]
    assert not any(after[30:])


def test_spikes_are_read_late():
    watch = SpikeWatch(3.0, 2, CPU)
    feed(watch, [1.0, 1.1, 1.0, 50.0])
    assert watch.read() == []
    feed(watch, [1.0] * LAG_STEPS, start=5)
    assert [spike.step for spike in watch.read()] == [4, 4]


def test_statistics_go_on_bitwise_from_a_checkpoints_numbers():
    a, b = SpikeWatch(3.0, 5, CPU), SpikeWatch(3.0, 5, CPU)
    feed(a, [0.1, 0.7, 0.3, 0.9, 0.2, 0.35, 0.333])
    b.load(a.state())
    feed(a, [0.41, 0.5]), feed(b, [0.41, 0.5])
    assert a.state() == b.state()


@pytest.fixture
def options(tmp_path):
    corpus = tiny_run.make_corpus(tmp_path / "corpus")
    recipe = tiny_run.write_recipe(
        tmp_path / "r.yaml", corpus, total_steps=24, save_interval=8, spike_window=8, spike_zscore=6.0
    )
    return PretrainOptions(config=recipe, out=tmp_path / "run", seed=1)


def run_spiking(options, call=41):  # step 21, second micro-batch
    run = open_run(plan_run(options))
    tiny_run.blow_up(run, [call], factor=30.0)  # finite, and far from what the model has learnt
    with StopRequest() as stop:
        assert train(run, stop) == 0
    return run


def test_a_spike_is_an_event_and_can_be_skipped(options, capsys):
    run_spiking(options)
    events = tiny_run.events(options.out, "spike")
    assert {(event["step"], event["skipped"]) for event in events} == {(21, False)}
    assert "grad_norm" in {event["signal"] for event in events}
    assert events[0]["position"] == 80
    assert events[0]["zscore"] > 6
    assert "step 21: grad_norm is" in capsys.readouterr().err

    skipping = dataclasses.replace(
        options, out=options.out.with_name("skip"), overrides=["training.skip_spikes=true", "training.save_interval=1",
                                                               "training.keep_last_n=30"]
    )  # fmt: skip
    run_spiking(skipping)
    (before, after) = (tiny_run.digests(skipping.out, step) for step in (20, 21))
    assert before["model_step_20.safetensors"] == after["model_step_21.safetensors"]
    moments = [torch.load(skipping.out / f"checkpoints/optim_step_{step}.pt")["state"] for step in (20, 21)]
    assert all(torch.equal(moments[0][n][k], moments[1][n][k]) for n in moments[0] for k in moments[0][n])
    assert tiny_run.digests(skipping.out, 22)["model_step_22.safetensors"] != after["model_step_21.safetensors"]
    assert all(event["skipped"] for event in tiny_run.events(skipping.out, "spike"))
    assert tiny_run.rows(skipping.out)[:20] == tiny_run.rows(options.out)[:20]


def test_resuming_changes_nothing_about_spikes(options):
    options = dataclasses.replace(options, overrides=["training.skip_spikes=true"])
    run_spiking(options)
    halves = dataclasses.replace(options, out=options.out.with_name("halves"))
    with StopRequest() as stop:
        assert train(open_run(plan_run(dataclasses.replace(halves, max_steps=16))), stop) == 0
    run_spiking(dataclasses.replace(halves, resume_latest=True), call=41 - 32)
    assert tiny_run.rows(halves.out) == tiny_run.rows(options.out)
    assert tiny_run.digests(halves.out, 24) == tiny_run.digests(options.out, 24)
    assert tiny_run.events(halves.out, "spike")[0]["zscore"] == tiny_run.events(options.out, "spike")[0]["zscore"]


@pytest.mark.gpu
def test_observing_on_the_gpu_does_not_wait():
    watch = SpikeWatch(3.0, 2, torch.device("cuda"))
    calm, high = torch.tensor([1.0, 2.0], device="cuda"), torch.tensor([1.0, 9.0], device="cuda")
    with syncs_refused():
        for step, values in enumerate([calm, calm, calm, high]):
            watch.observe(step, 0, values)
    (spike,) = watch.read(everything=True)
    assert (spike.step, spike.signal, spike.value) == (3, "grad_norm", 9.0)
