"""What a run does about faults while it trains: a diagnosis when it gives up, a lower rate after a rollback, one
decision on every rank, signals at any time, loader workers that are killed."""

import dataclasses
import json
import os
import signal
import threading
import time

import psutil
import pytest
import tiny_run
import torch
from torch import distributed, multiprocessing

from gpt_oss_lite.training import pretrain as loop
from gpt_oss_lite.training.dataset import PretrainDataset
from gpt_oss_lite.training.diagnosis import NOT_AGAIN, Diagnosis, diagnose, first_non_finite, report_window
from gpt_oss_lite.training.distributed import Ranks
from gpt_oss_lite.training.nan_guard import SkippedStep, micro_batch_flags
from gpt_oss_lite.training.optimizer import update_unless
from gpt_oss_lite.training.pretrain import PretrainOptions, pretrain, train
from gpt_oss_lite.training.run import open_run, plan_run
from gpt_oss_lite.training.stop import StopRequest
from shared_data.shard_writer import write_corpus


@pytest.fixture
def corpus(tmp_path):
    return tiny_run.make_corpus(tmp_path / "corpus")


def options_for(tmp_path, corpus, *, out="run", **training):
    recipe = tiny_run.write_recipe(tmp_path / f"{out}.yaml", corpus, **training)
    return PretrainOptions(config=recipe, out=tmp_path / out, seed=1)


def open_for(tmp_path, corpus, **changes):
    return open_run(plan_run(options_for(tmp_path, corpus, **changes)))


class TestDiagnosis:
    @pytest.mark.parametrize(
        ("parameter", "expected"),
        [
            ("embed.weight", "the weight embed.weight itself (1 NaN, 0 infinite of 1024)"),
            ("blocks.1.moe.router.weight", "the weight blocks.1.moe.router.weight itself"),
        ],
    )
    def test_a_bad_weight_is_named(self, tmp_path, corpus, parameter, expected):
        run = open_for(tmp_path, corpus)
        with torch.no_grad():
            run.model.get_parameter(parameter).view(-1)[3] = torch.nan
        ids, targets = next(run.batches)
        assert first_non_finite(run.model, run.dataset, ids, targets, 8).startswith(expected)

    def test_the_first_layer_in_the_order_of_computation_is_named(self, tmp_path, corpus):
        run = open_for(tmp_path, corpus)
        with torch.no_grad():
            run.model.blocks[1].moe_norm.weight.fill_(3e38)  # finite, and infinite when multiplied
        ids, targets = next(run.batches)
        found = first_non_finite(run.model, run.dataset, ids, targets, 8)
        assert found.startswith("the output of blocks.1.moe_norm")

    def test_a_gradient_that_overflows_under_a_finite_loss_is_named(self, tmp_path, corpus):
        run = open_for(tmp_path, corpus)
        run.model.blocks[1].attn.o_proj.weight.register_hook(lambda gradient: gradient * torch.inf)
        ids, targets = next(run.batches)
        found = first_non_finite(run.model, run.dataset, ids, targets, 8)
        assert found.startswith("the gradient of blocks.1.attn.o_proj.weight")
        assert "with a finite loss" in found

    def test_what_does_not_come_again_is_said(self, tmp_path, corpus):
        run = open_for(tmp_path, corpus)
        ids, targets = next(run.batches)
        assert first_non_finite(run.model, run.dataset, ids, targets, 8) == NOT_AGAIN
        assert all(parameter.grad is None for parameter in run.model.parameters())

    def test_windows_are_those_of_the_flagged_micro_batch_with_place_and_sources(self, tmp_path, corpus):
        run = open_for(tmp_path, corpus)
        report = diagnose(run.model, run.dataset, run.order, SkippedStep(3, 8, [1]), 2, 8)
        assert [window.window for window in report.windows] == run.order.windows(10, 2).tolist()
        window = report_window(run.dataset, 20)  # tokens 320 to 335: over 100 a shard, so by the manifest's counts
        starts = [0]
        for shard in run.dataset.manifest.shards:
            starts.append(starts[-1] + shard.n_tokens)
        at = max(index for index, start in enumerate(starts) if start <= 320)
        assert (window.shard, window.token) == (run.dataset.manifest.shards[at].path, 320 - starts[at])
        assert sum(window.sources.values()) == tiny_run.WINDOW
        assert set(window.sources) <= {"prose", "code"}
        ids = run.dataset[20][0].tolist()
        assert window.text == f"ids {' '.join(map(str, ids))}"  # this corpus's tokenizer is not at hand

    def test_the_documents_of_a_window_are_named(self, tmp_path):
        info = tiny_run.corpus_info(shard_size_tokens=24)
        documents = [([1] * 9, 0, 9), ([2] * 11, 1, 11), ([3] * 14, 0, 14), ([4] * 12, 0, 12)]  # an EOS follows each
        write_corpus(tmp_path, info, documents, names=["p-0", "https://example.org/c", "p-2", "p-3"])
        dataset = PretrainDataset(tmp_path, tiny_run.WINDOW)
        assert [len(dataset.shards), dataset.total_tokens] == [3, 50]
        found = [report_window(dataset, window).documents for window in range(3)]
        assert found == [
            ["prose: p-0", "code: https://example.org/c"],
            ["code: https://example.org/c", "prose: p-2"],
            ["prose: p-2", "prose: p-3"],
        ]
        report = report_window(dataset, 1)
        lines = list(Diagnosis(3, 0, [report], "a weight").lines())
        assert lines[-1] == "    documents: code: https://example.org/c, prose: p-2"

    def test_text_is_decoded_where_the_tokenizer_is_known(self, tmp_path):
        import command_line

        dataset = PretrainDataset(command_line.write_text_corpus(tmp_path / "text"), 16)
        assert "number" in report_window(dataset, 0).text or "return" in report_window(dataset, 0).text

    def test_giving_up_writes_the_diagnosis(self, tmp_path, corpus, capsys):
        run = open_for(tmp_path, corpus, nan_guard_max_rollbacks=0)
        tiny_run.blow_up(run, range(8, 1000))
        with StopRequest() as stop:
            assert train(run, stop) == 4
        (event,) = tiny_run.events(tmp_path / "run", "give_up")
        diagnosis = event["diagnosis"]
        assert diagnosis["step"] == 7
        assert diagnosis["first_non_finite"] == NOT_AGAIN  # the poison is not in the model
        assert len(diagnosis["windows"]) == 2
        stderr = capsys.readouterr().err
        assert "step 7, micro-batch" in stderr
        assert f"window {diagnosis['windows'][0]['window']} (shard_" in stderr


def test_a_lower_rate_for_a_while_after_a_rollback_also_after_a_resume(tmp_path, corpus):
    options = options_for(
        tmp_path, corpus, total_steps=20, nan_guard_lr_factor=0.25, nan_guard_lr_steps=6, save_interval=5
    )
    run = open_run(plan_run(dataclasses.replace(options, max_steps=10)))
    tiny_run.blow_up(run, range(13, 18))  # back to step 5
    with StopRequest() as stop:
        assert train(run, stop) == 0
        assert train(open_run(plan_run(dataclasses.replace(options, resume_latest=True))), stop) == 0
    multiplier = run.scheduler.lr_lambdas[0]
    expected = [0.01 * multiplier(step) * (0.25 if 5 <= step < 11 else 1.0) for step in range(20)]
    assert [row["lr"] for row in tiny_run.rows(tmp_path / "run")] == pytest.approx(expected)


def _rank(rank, folder):
    """One of two ranks: a NaN loss on rank 1 only; the same decision must keep both ranks' weights."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=False)
    results = []
    for losses in ([1.0, float("nan") if rank == 1 else 2.0], [1.0, 2.0]):
        weight.grad = torch.full((3,), losses[1])
        flags = Ranks(rank, size=2).any(micro_batch_flags(torch.tensor(losses), torch.tensor(1.0)))
        update_unless(flags.any(), optimizer)
        results.append((flags.tolist(), weight.tolist()))
    with open(f"{folder}/rank{rank}.json", "w") as file:
        json.dump(results, file)
    distributed.destroy_process_group()


def test_a_nan_on_one_rank_makes_every_rank_skip(tmp_path):
    multiprocessing.spawn(_rank, (str(tmp_path),), nprocs=2)
    results = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert results[0] == results[1]
    (skipped, updated) = results[0]
    assert skipped == [[False, True], [1.0, 1.0, 1.0]]
    assert updated[0] == [False, False]
    assert updated[1] != [1.0, 1.0, 1.0]


class TestSignals:
    """A signal finishes the step, saves and exits 3 whatever the run is doing."""

    @pytest.mark.parametrize("where", ["evaluate_now", "save", "first forward pass (compilation)", "open_stream"])
    def test_during(self, tmp_path, corpus, monkeypatch, where):
        options = options_for(tmp_path, corpus, total_steps=1000, eval_interval=2, save_interval=2)
        sent = []

        def send():
            if not sent:
                sent.append(True)
                signal.raise_signal(signal.SIGTERM)

        if where in ("evaluate_now", "save"):
            real = getattr(loop, where)

            def interrupted(run):
                send()
                real(run)
                send()

            monkeypatch.setattr(loop, where, interrupted)
        real_open = loop.open_run

        def open_interrupted(plan):
            if where == "open_stream":
                send()
            run = real_open(plan)
            if where.startswith("first"):
                forward = run.parallel.forward
                tiny_run.replace_forward(run, lambda *words, **names: (send(), forward(*words, **names))[1])
            return run

        monkeypatch.setattr(loop, "open_run", open_interrupted)
        assert pretrain(options) == 3
        (stop,) = tiny_run.events(tmp_path / "run", "stop")
        run = loop.open_run(plan_run(dataclasses.replace(options, resume_latest=True)))
        assert run.state.step == stop["step"] == run.checkpoints.newest_good()

    def test_while_a_checkpoint_is_being_written_both_are_whole(self, tmp_path, corpus, monkeypatch):
        from gpt_oss_lite.training import checkpoint

        options = options_for(tmp_path, corpus, total_steps=1000, save_interval=3)
        real, first = checkpoint.save_file, threading.Event()

        def slow(*words, **names):
            if not first.is_set():
                first.set()
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.3)
            real(*words, **names)

        monkeypatch.setattr(checkpoint, "save_file", slow)
        assert pretrain(options) == 3
        steps = checkpoint.CheckpointManager(tmp_path / "run" / "checkpoints").list_checkpoints()
        assert steps[0] == 3
        assert steps[-1] == tiny_run.events(tmp_path / "run", "stop")[0]["step"] > 3

    def test_max_hours_too(self, tmp_path, corpus):
        options = options_for(tmp_path, corpus, total_steps=10**6, save_interval=10**6, log_interval=10**6)
        assert pretrain(dataclasses.replace(options, max_hours=0.7 / 3600)) == 3
        (stop,) = tiny_run.events(tmp_path / "run", "stop")
        assert stop["step"] > 1


def test_a_killed_loader_worker_is_one_clear_line_and_the_run_is_the_unbroken_one(tmp_path, corpus):
    recipe = tiny_run.write_recipe(tmp_path / "r.yaml", corpus, num_workers=1, total_steps=300, save_interval=300)
    overrides = ["training.log_interval=1"]
    process = tiny_run.start_run(config=recipe, out=tmp_path / "run", seed=1, overrides=overrides)
    tiny_run.kill_after_step(process, tmp_path / "run", 5, how=0)
    workers = psutil.Process(process.pid).children()
    assert workers
    for worker in workers:
        worker.kill()
    code, stderr = tiny_run.finish(process)
    assert code == 0, stderr
    lines = [line for line in stderr.splitlines() if "loader worker" in line]
    assert len(lines) == 1, stderr
    assert "warning: a loader worker was killed" in lines[0]
    assert "Traceback" not in stderr
    (event,) = tiny_run.events(tmp_path / "run", "worker_died")
    assert event["position"] == 4 * event["step"]
    unbroken = PretrainOptions(
        config=recipe, out=tmp_path / "unbroken", seed=1, overrides=[*overrides, "training.num_workers=0"]
    )
    assert pretrain(unbroken) == 0
    assert tiny_run.rows(tmp_path / "run") == tiny_run.rows(tmp_path / "unbroken")


def test_workers_that_are_killed_again_and_again_end_the_run_with_one_line(tmp_path, corpus):
    code = (
        "import os, signal\nfrom gpt_oss_lite.training.dataset import PretrainDataset\n"
        "real = PretrainDataset.__getitem__\n"
        "def deadly(self, index):\n"
        "    if index == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return real(self, index)\nPretrainDataset.__getitem__ = deadly\n"
    )
    recipe = tiny_run.write_recipe(tmp_path / "r.yaml", corpus, num_workers=1, total_steps=40)
    code, stderr = tiny_run.finish(tiny_run.start_run(code, config=recipe, out=tmp_path / "run", seed=1))
    assert code == 1
    assert "Traceback" not in stderr
    last = stderr.splitlines()[-1]
    assert last.startswith("error: a loader worker was killed")
    assert "twice at step" in last
    assert "--resume latest" in last
