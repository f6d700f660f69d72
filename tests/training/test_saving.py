"""Saving in the background: what is written is one instant, a failed write is loud, unmarked and tried again, a full
disk is foreseen."""

import dataclasses
import errno
import os
import threading
import time

import pytest
import tiny_run
import torch
from test_checkpoint import files, save, trained

from gpt_oss_lite.config import TrainingConfig
from gpt_oss_lite.training import checkpoint, disk
from gpt_oss_lite.training.background import BackgroundWriter
from gpt_oss_lite.training.checkpoint import CheckpointManager
from gpt_oss_lite.training.pretrain import PretrainOptions, pretrain, train
from gpt_oss_lite.training.run import open_run, plan_run
from gpt_oss_lite.training.saving import Saver
from gpt_oss_lite.training.snapshot import HostBuffers, take_snapshot
from gpt_oss_lite.training.stop import StopRequest
from gpt_oss_lite.training.weights import load_model
from shared_data.errors import UserError


@pytest.fixture
def options(tmp_path):
    corpus = tiny_run.make_corpus(tmp_path / "corpus")
    recipe = tiny_run.write_recipe(tmp_path / "tiny.yaml", corpus, total_steps=12, save_interval=4)
    return PretrainOptions(config=recipe, out=tmp_path / "run", seed=1)


class Gate:
    """Holds every write of model weights until it is opened."""

    def __init__(self, monkeypatch):
        self.open, self.reached = threading.Event(), threading.Event()
        real = checkpoint.save_file

        def save_file(*words, **names):
            self.reached.set()
            assert self.open.wait(timeout=30)
            real(*words, **names)

        monkeypatch.setattr(checkpoint, "save_file", save_file)


def test_training_goes_on_while_a_snapshot_of_one_instant_is_written(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    model, optimizer, scheduler = trained(steps=2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moments = {i: {k: v.clone() for k, v in s.items()} for i, s in optimizer.state_dict()["state"].items()}
    rng, rate = torch.get_rng_state(), scheduler.get_last_lr()
    manager = CheckpointManager(tmp_path)
    saver = Saver(manager)
    meta = {"position": 8}
    saver.save(model, optimizer, 2, scheduler, meta)
    assert gate.reached.wait(timeout=30)
    # Everything moves on before the first byte is written.
    meta["position"] = 999
    torch.randn(10)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    scheduler.step()
    assert saver.busy
    assert manager.list_checkpoints() == []
    gate.open.set()
    (outcome,) = saver.drain()
    assert (outcome.step, outcome.attempts, outcome.error) == (2, 1, None)

    model, optimizer, scheduler = trained(seed=3, steps=1)
    assert manager.load(model, 2, optimizer, scheduler, with_rng=True)["position"] == 8
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    loaded = optimizer.state_dict()["state"]
    assert all(torch.equal(loaded[i][k], moments[i][k]) for i in moments for k in moments[i])
    assert torch.equal(torch.get_rng_state(), rng)
    assert scheduler.get_last_lr() == rate


def test_a_save_that_comes_too_soon_waits_for_the_one_before_and_both_are_whole(tmp_path):
    model, optimizer, scheduler = trained(steps=2)
    manager = CheckpointManager(tmp_path)
    saver = Saver(manager)
    weights = []
    for step in (1, 2, 3):
        weights.append(model.norm.weight.detach().clone())
        saver.save(model, optimizer, step, scheduler, {})
        with torch.no_grad():
            model.norm.weight += 1
    saver.drain()
    for step in (1, 2, 3):
        manager.load(model, step)
        assert torch.equal(model.norm.weight, weights[step - 1])


def test_buffers_are_used_again_and_never_the_live_tensors(tmp_path):
    model, optimizer, scheduler = trained(steps=2)
    buffers = HostBuffers()
    first = take_snapshot(model, optimizer, 1, scheduler, {}, buffers)
    second = take_snapshot(model, optimizer, 2, scheduler, {}, buffers)
    live = {tensor.data_ptr() for tensor in model.state_dict().values()}
    for name in first.model:
        assert first.model[name].data_ptr() == second.model[name].data_ptr() not in live
    assert first.n_bytes == 12 * model.num_parameters() + 4 * len(optimizer.state)


@pytest.mark.parametrize("failing", ["save_file", "replace", "fsync"])
def test_a_failing_write_is_loud_unmarked_leaves_older_ones_whole_and_is_tried_again(
    tmp_path, monkeypatch, capsys, failing
):
    manager, (model, optimizer, scheduler) = save(tmp_path, step=2)
    module, name = (checkpoint, "save_file") if failing == "save_file" else (os, failing)
    real, failures = getattr(module, name), iter([True, True])
    seen_while_failing = []

    def fail_twice(*words, **names):
        if next(failures, False):
            seen_while_failing.append(manager.list_checkpoints())
            raise OSError(errno.EIO, "Input/output error", str(words[0]))
        return real(*words, **names)

    monkeypatch.setattr(module, name, fail_twice)
    saver = Saver(manager, pauses_s=(0.01, 0.01))
    saver.save(model, optimizer, 4, scheduler, {})
    (outcome,) = saver.drain()
    assert (outcome.error, outcome.attempts) == (None, 3)
    assert seen_while_failing == [[2], [2]]
    assert manager.list_checkpoints() == [2, 4]
    manager.verify(2), manager.verify(4)
    assert capsys.readouterr().err.count("WARNING: CHECKPOINT OF STEP 4 NOT WRITTEN") == 2


def test_a_write_that_fails_for_good_leaves_no_marker_and_the_run_saves_again_later(options, monkeypatch, capsys):
    run = open_run(plan_run(options))
    run.saver = Saver(run.checkpoints, pauses_s=(0.01,))
    real = CheckpointManager.write

    def write(self, snapshot):
        if snapshot.step == 8:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.folder))
        real(self, snapshot)

    monkeypatch.setattr(CheckpointManager, "write", write)
    with StopRequest() as stop:
        assert train(run, stop) == 0
    assert run.checkpoints.list_checkpoints() == [4, 12]
    (failed,) = tiny_run.events(options.out, "save_failed")
    assert (failed["step"], failed["attempts"]) == (8, 2)
    assert "No space left" in failed["error"]
    assert [event["step"] for event in tiny_run.events(options.out, "save")] == [4, 12]
    assert "CHECKPOINT OF STEP 8 NOT WRITTEN" in capsys.readouterr().err


def test_a_run_whose_last_save_fails_does_not_say_that_it_is_done(options, monkeypatch):
    run = open_run(plan_run(options))
    run.saver = Saver(run.checkpoints, pauses_s=())
    monkeypatch.setattr(checkpoint, "assert_room_to_write", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with StopRequest() as stop, pytest.raises(OSError, match="full"):
        train(run, stop)
    assert not tiny_run.events(options.out, "done")


def test_an_error_of_ours_in_the_thread_is_raised_not_retried():
    writer = BackgroundWriter(pauses_s=(0.01,))
    writer.submit(1, lambda: [][1])
    writer.wait()
    with pytest.raises(IndexError):
        writer.outcomes()


def test_a_write_that_ends_short_without_an_error_is_one(tmp_path, monkeypatch):
    manager, (model, optimizer, scheduler) = save(tmp_path, step=2)
    real = torch.save

    def short(content, path):
        real(content, path)
        os.truncate(path, os.path.getsize(path) - 100)

    monkeypatch.setattr(torch, "save", short)
    with pytest.raises(OSError, match=r"optim_step_4\.pt"):
        manager.save(model, optimizer, 4, scheduler)
    monkeypatch.undo()
    real_save_file = checkpoint.save_file

    def short_file(tensors, path, metadata):
        real_save_file(tensors, path, metadata=metadata)
        os.truncate(path, os.path.getsize(path) - 4)

    monkeypatch.setattr(checkpoint, "save_file", short_file)
    with pytest.raises(OSError, match=r"model_step_4\.safetensors"):
        manager.save(model, optimizer, 4, scheduler)
    assert manager.list_checkpoints() == [2]


def test_a_link_in_place_of_a_temporary_file_does_not_lead_the_write_elsewhere(tmp_path):
    (tmp_path / "precious").write_text("mine")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name in ("model_step_2.safetensors", "optim_step_2.pt", "meta_step_2.json"):
        (folder / f"{name}.tmp").symlink_to(tmp_path / "precious")
    manager, _ = save(folder, step=2)
    manager.verify(2)
    assert (tmp_path / "precious").read_text() == "mine"
    assert not [path for path in folder.iterdir() if path.is_symlink()]


class TestRoom:
    def test_a_write_without_room_does_not_begin(self, tmp_path, monkeypatch):
        manager, (model, optimizer, scheduler) = save(tmp_path, step=2)
        monkeypatch.setattr(disk, "free_bytes", lambda folder: 1000)
        with pytest.raises(OSError, match="GB are free") as failure:
            manager.save(model, optimizer, 4, scheduler)
        assert failure.value.errno == errno.ENOSPC
        assert all("_step_2." in name for name in files(tmp_path))

    def test_a_run_that_cannot_save_once_does_not_start(self, options, monkeypatch):
        monkeypatch.setattr(disk, "free_bytes", lambda folder: 1000)
        with pytest.raises(UserError, match=r"a checkpoint takes .* GB, but .* GB are free"):
            pretrain(options)
        assert not options.out.exists()

    def test_a_run_that_will_fill_the_disk_says_so_before_it_starts(self, options, monkeypatch, capsys):
        size = disk.checkpoint_bytes(open_run(plan_run(options)).model, "adamw")
        monkeypatch.setattr(disk, "free_bytes", lambda folder: int(2.5 * size))
        plan_run(dataclasses.replace(options, out=options.out.with_name("other")))
        assert "3 more checkpoints" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("keys", "stop_step", "most"),
        [
            ({"save_interval": 2000}, 61000, 3 + 1 + 3),  # 20,000, 40,000 and 60,000 stay
            ({"save_interval": 2000, "keep_every": 0}, 61000, 4),
            ({"save_interval": 2000, "keep_every": 2000}, 61000, 31),
            ({"save_interval": 2000}, 3000, 2),
        ],
    )
    def test_checkpoints_that_lie_there_at_once(self, keys, stop_step, most):
        assert disk.most_checkpoints(TrainingConfig(**keys), stop_step) == most

    @pytest.mark.parametrize("optimizer", ["adamw", "muon"])
    def test_a_checkpoint_is_as_large_as_foreseen(self, options, optimizer):
        overrides = [*options.overrides, f"training.optimizer={optimizer}", "training.keep_last_n=1"]
        assert pretrain(dataclasses.replace(options, overrides=overrides)) == 0
        size = sum(path.stat().st_size for path in (options.out / "checkpoints").iterdir())
        foreseen = disk.checkpoint_bytes(load_model(options.out)[0], optimizer)
        assert foreseen - disk.OVERHEAD_BYTES < size < foreseen


def test_every_kth_checkpoint_stays_for_ever(options):
    overrides = ["training.save_interval=1", "training.keep_last_n=2", "training.keep_every=5"]
    pretrain(dataclasses.replace(options, overrides=overrides))
    assert CheckpointManager(options.out / "checkpoints").list_checkpoints() == [5, 10, 11, 12]


def test_a_second_ctrl_c_leaves_at_once_during_a_save_and_nothing_is_torn(options, tmp_path):
    """The write hangs, as on a network file system that is gone."""
    code = (
        "import time\nfrom gpt_oss_lite.training import checkpoint\nreal = checkpoint.save_file\n"
        "def slow(tensors, path, metadata):\n"
        "    if 'step_8' in str(path): print('WRITING', file=__import__('sys').stderr, flush=True); time.sleep(60)\n"
        "    real(tensors, path, metadata=metadata)\ncheckpoint.save_file = slow\n"
    )
    process = tiny_run.start_run(code, config=options.config, out=options.out, seed=1)
    for line in process.stderr:
        if "WRITING" in line:
            break
    process.send_signal(2)
    time.sleep(0.3)
    started = time.monotonic()
    process.send_signal(2)
    code, stderr = tiny_run.finish(process)
    assert code == 130, stderr
    assert time.monotonic() - started < 3
    manager = CheckpointManager(options.out / "checkpoints")
    assert manager.list_checkpoints() == [4]
    assert manager.newest_good() == 4
    assert pretrain(dataclasses.replace(options, resume_latest=True)) == 0
