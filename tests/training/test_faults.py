"""Faults under the files of a run: whatever the disk does, damaged state never loads, the file is named, and the newest
good step is used."""

import dataclasses
import errno
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import tiny_run

from gpt_oss_lite.training import checkpoint, disk
from gpt_oss_lite.training.checkpoint import CheckpointManager
from gpt_oss_lite.training.pretrain import PretrainOptions, pretrain, train
from gpt_oss_lite.training.run import open_run, plan_run
from gpt_oss_lite.training.saving import Saver
from gpt_oss_lite.training.stop import StopRequest

STEPS = 12


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A corpus, a recipe, and the folders of an unbroken run and of one that stopped at step 8."""
    folder = tmp_path_factory.mktemp("faults")
    corpus = tiny_run.make_corpus(folder / "corpus")
    recipe = tiny_run.write_recipe(folder / "tiny.yaml", corpus, total_steps=STEPS, save_interval=4)
    options = PretrainOptions(config=recipe, out=folder / "unbroken", seed=1)
    assert pretrain(options) == 0
    assert pretrain(dataclasses.replace(options, out=folder / "half", max_steps=8)) == 0
    return folder, options


@pytest.fixture
def half(finished, tmp_path):
    """The options of a run of one's own that stopped at step 8, and what it must come to."""
    folder, options = finished
    shutil.copytree(folder / "half", tmp_path / "run")
    options = dataclasses.replace(options, out=tmp_path / "run", auto_resume=True)
    return options, tiny_run.rows(folder / "unbroken"), tiny_run.digests(folder / "unbroken", STEPS)


def flip(path: Path, at: float) -> None:
    content = bytearray(path.read_bytes())
    content[min(int(len(content) * at), len(content) - 1)] ^= 0x04
    path.write_bytes(content)


CHECKPOINT_FILES = [f"checkpoints/{name}" for name in
                    ("model_step_8.safetensors", "optim_step_8.pt", "sched_step_8.pt", "rng_step_8.pt", "meta_step_8.json")]  # fmt: skip  # noqa: E501


@pytest.mark.parametrize("name", [*CHECKPOINT_FILES, "config.yaml", "run.json"])
def test_a_flipped_byte_in_any_file_is_named_and_the_run_comes_out_the_same(half, capsys, name):
    options, rows, digests = half
    flip(options.out / name, 0.5)
    assert pretrain(options) == 0
    stderr = capsys.readouterr().err
    assert Path(name).name in stderr
    assert f"from step {4 if name in CHECKPOINT_FILES else 8}" in stderr
    assert tiny_run.rows(options.out) == rows
    assert tiny_run.digests(options.out, STEPS) == digests


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_file_that_is_short_or_gone_makes_its_step_none(half, capsys, name, damage):
    options, rows, digests = half
    path = options.out / name
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-7])
    else:
        path.unlink()
    assert pretrain(options) == 0
    assert "from step 4" in capsys.readouterr().err
    assert tiny_run.rows(options.out) == rows
    assert tiny_run.digests(options.out, STEPS) == digests


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_damaged_log_is_named_and_stops_no_run(half, capsys, name):
    options, rows, digests = half
    path = options.out / name
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b"\x00" * 40 + b"\n"
    path.write_bytes(b"".join(lines) + b'{"torn')
    assert pretrain(options) == 0
    if name == "metrics.jsonl":
        assert f"{path}, line 2, is damaged" in capsys.readouterr().err
        assert tiny_run.rows(options.out) == [rows[0], *rows[2:]]
    assert tiny_run.digests(options.out, STEPS) == digests


@pytest.mark.parametrize("call", ["replace", "fsync", "unlink"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_system_call_that_fails_now_and_then_costs_nothing(half, monkeypatch, call, code):
    """Every 11th call fails; writes are tried again, and what was there stays whole."""
    options, rows, digests = half
    run = open_run(plan_run(options))
    run.saver = Saver(run.checkpoints, pauses_s=(0.0,) * 8)
    target = Path if call == "unlink" else os
    real, calls = getattr(target, call), iter(range(10**6))

    def failing(*words, **names):
        path = str(words[0])
        if threading.current_thread().name.startswith("write step") and next(calls) % 11 == 5:
            raise OSError(code, os.strerror(code), path)
        return real(*words, **names)

    monkeypatch.setattr(target, call, failing)
    with StopRequest() as stop:
        assert train(run, stop) == 0
    monkeypatch.undo()
    assert tiny_run.rows(options.out) == rows
    assert tiny_run.digests(options.out, STEPS) == digests
    assert CheckpointManager(options.out / "checkpoints").newest_good() == STEPS


@pytest.fixture
def one_megabyte(tmp_path):
    """A file system of 1 MB: a disk that really is full."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs takes root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_really_full_leaves_the_newest_good_step(finished, one_megabyte, monkeypatch, capsys):
    folder, options = finished
    options = dataclasses.replace(options, out=one_megabyte / "run", auto_resume=True)
    # Room is not foreseen here, so the write itself meets the end of the disk; each checkpoint is about 150 kB.
    monkeypatch.setattr(disk, "free_bytes", lambda _: 10**12)
    overrides = ["training.save_interval=1", "training.keep_last_n=30"]
    run = open_run(plan_run(dataclasses.replace(options, overrides=overrides)))
    run.saver = Saver(run.checkpoints, pauses_s=())
    with (
        StopRequest() as stop,
        pytest.raises(OSError, match=r"No space left|could not be written|written incompletely"),
    ):
        train(run, stop)
    assert "NOT WRITTEN" in capsys.readouterr().err
    manager = CheckpointManager(options.out / "checkpoints")
    steps = manager.list_checkpoints()
    assert 1 <= len(steps) < STEPS
    assert manager.newest_good() == steps[-1]
    # With room again, the run comes out as if nothing had been.
    for step in steps[:-1]:
        manager.delete_checkpoint(step)
    keep_one = ["training.save_interval=1", "training.keep_last_n=1"]
    assert pretrain(dataclasses.replace(options, overrides=keep_one)) == 0
    ours, expected = tiny_run.digests(options.out, STEPS), tiny_run.digests(folder / "unbroken", STEPS)
    name = f"model_step_{STEPS}.safetensors"
    assert ours[name] == expected[name]


def test_a_full_disk_is_foreseen_before_the_start(finished, one_megabyte, capsys):
    _, options = finished
    with open(one_megabyte / "filler", "wb") as file:
        file.write(b"x" * 900_000)
    options = dataclasses.replace(options, out=one_megabyte / "run")
    with pytest.raises(ValueError, match=r"a checkpoint takes .* GB, but .* GB are free"):
        pretrain(options)


def test_a_shard_that_becomes_shorter_under_a_run_ends_it_with_one_line(tmp_path):
    """The mapped pages are gone: the worker that reads them dies of SIGBUS."""
    corpus = tiny_run.make_corpus(tmp_path / "corpus")
    recipe = tiny_run.write_recipe(tmp_path / "r.yaml", corpus, num_workers=1, total_steps=100_000, log_interval=1)
    process = tiny_run.start_run(config=recipe, out=tmp_path / "run", seed=1)
    tiny_run.kill_after_step(process, tmp_path / "run", 3, how=0)
    for shard in corpus.glob("shard_*.bin"):
        os.truncate(shard, 0)
    code, stderr = tiny_run.finish(process)
    assert code == 1, stderr[-2000:]
    assert "Traceback" not in stderr
    last = stderr.splitlines()[-1].lstrip("\0")  # torch's own message ends with a NUL
    assert last.startswith("error: a loader worker was killed")
    assert "gpt-oss-lite verify" in last


def test_all_checkpoints_damaged_is_said_and_nothing_is_made_up(half):
    options, _, _ = half
    for path in (options.out / "checkpoints").glob("rng_*"):
        flip(path, 0.5)
    with pytest.raises(ValueError, match="every checkpoint is damaged"):
        pretrain(options)
    assert checkpoint.CheckpointManager(options.out / "checkpoints").list_checkpoints() == [4, 8]
