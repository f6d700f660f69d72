"""What a job's ranks must have alike before the first step: an environment that makes them one job, one recipe, one run
folder, one corpus."""

import shutil
import socket

import pytest
import ranks
import tiny_run
from ranks import Job

from gpt_oss_lite.training import distributed, run_lock
from gpt_oss_lite.training.checkpoint import CheckpointManager
from gpt_oss_lite.training.plan import PretrainOptions, follow_plan, plan_run, words_of_plan
from gpt_oss_lite.training.pretrain import pretrain
from gpt_oss_lite.training.run_lock import is_marked, locked
from shared_data.errors import UserError

LAUNCHED = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def recipe(tmp_path):
    return tiny_run.write_recipe(tmp_path / "tiny.yaml", tiny_run.make_corpus(tmp_path / "corpus"), eval_interval=10)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("WORLD_SIZE", "two", "WORLD_SIZE is 'two' in the environment: it must be a whole number from 1 to"),
        ("WORLD_SIZE", "-2", "WORLD_SIZE is '-2'"),
        ("RANK", None, "WORLD_SIZE is 2, but RANK is not set: start the ranks with torchrun"),
        ("RANK", "2", "RANK is '2' in the environment: it must be a whole number from 0 to 1"),
        ("LOCAL_RANK", "x", "LOCAL_RANK is 'x'"),
        ("MASTER_ADDR", None, "WORLD_SIZE is 2, but MASTER_ADDR is not set"),
        ("MASTER_PORT", None, "WORLD_SIZE is 2, but MASTER_PORT is not set"),
        (
            "MASTER_PORT",
            "70000",
            "MASTER_PORT is '70000' in the environment: it must be a whole number from 0 to",
        ),
    ],
)
def test_an_environment_that_makes_no_job_is_refused_in_one_line(recipe, tmp_path, monkeypatch, name, value, said):
    for variable, good in LAUNCHED.items():
        monkeypatch.setenv(variable, good)
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as refused:
        pretrain(PretrainOptions(config=recipe, out=tmp_path / "run"))
    assert str(refused.value).startswith(said)
    assert not (tmp_path / "run").exists()


def test_a_port_that_another_program_has_is_named(recipe, tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        for variable, good in {**LAUNCHED, "MASTER_PORT": str(taken.getsockname()[1])}.items():
            monkeypatch.setenv(variable, good)
        with pytest.raises(UserError, match=f"the 2 ranks cannot meet at MASTER_ADDR:MASTER_PORT {place}: .*in use"):
            pretrain(PretrainOptions(config=recipe, out=tmp_path / "run"))


def test_a_rank_that_never_comes_is_not_waited_for_for_ever(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for variable, good in {**LAUNCHED, "MASTER_PORT": port}.items():
        monkeypatch.setenv(variable, good)
    monkeypatch.setattr(distributed, "MEETING_TIMEOUT", distributed.timedelta(seconds=0.5))
    with pytest.raises(UserError, match="the 2 ranks cannot meet"):
        distributed._met(0, 2)


@pytest.fixture
def followed(recipe, tmp_path):
    """What the first rank tells of its plan, while it holds the run's folder."""
    options = PretrainOptions(config=recipe, out=tmp_path / "run", seed=1)
    plan = plan_run(options)
    with locked(plan.folder) as mark:
        yield options, words_of_plan(plan, mark)


def follow(options, words, **changes):
    return follow_plan(PretrainOptions(**{**vars(options), **changes}), distributed.Ranks(1, 2), words)


def test_a_rank_that_sees_the_same_follows(followed, tmp_path):
    options, words = followed
    plan = follow(options, words)
    assert (plan.folder, plan.stop_step, plan.resuming) == (tmp_path / "run", 20, False)
    other = shutil.copytree(tmp_path / "corpus", tmp_path / "elsewhere")  # on a disk of its own, say
    assert follow(options, words, overrides=[f"data.train_data_path={other}"]).corpus == plan.corpus


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"overrides": ["training.lr=0.05"]}, "was told other than rank 0: training.lr is 0.05 here, 0.01 there"),
        ({"overrides": ["training.parallelism=fsdp"]}, "training.parallelism is fsdp here, ddp there"),
        ({"max_steps": 5}, "--max-steps is 5 here, None there"),
        ({"max_hours": 2.0}, "--max-hours is 2.0 here, None there"),
    ],
)
def test_a_rank_that_was_told_something_else_is_refused(followed, changes, said):
    with pytest.raises(UserError) as refused:
        follow(*followed, **changes)
    assert said in str(refused.value)


@pytest.mark.parametrize("part", ["train_data_path", "validation_data_path"])
def test_a_rank_with_another_corpus_is_refused(followed, tmp_path, part):
    other = tiny_run.make_corpus(tmp_path / "other", seed=5)
    path = other if part == "train_data_path" else other / "validation"
    overrides = [f"data.validation_data_path={tmp_path}/corpus/validation", f"data.{part}={path}"]
    with pytest.raises(UserError, match=f"{path} is another corpus here"):
        follow(*followed, overrides=overrides)


def test_a_rank_that_does_not_see_the_runs_folder_is_refused(followed, tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "LOOK_PAUSE_S", 0.0)
    options, words = followed
    old = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    words = {**words, "mark": words["mark"] + "0"}  # of a later holder, of whom a copy knows nothing
    for folder in (old, tmp_path / "nothing"):
        with pytest.raises(UserError, match=f"{folder} is not the folder here that it is on rank 0"):
            follow(options, {**words, "folder": str(folder)})


def test_who_does_not_get_the_folder_leaves_its_holders_mark(tmp_path):
    """Locks are a process's: the second holder is one of its own."""
    with locked(tmp_path / "run") as mark:
        before = "from gpt_oss_lite.training.run_lock import locked\nwith locked(Path('.')): pass\n"
        before = f"from pathlib import Path\n{before}".replace("'.'", repr(str(tmp_path / "run")))
        code, stderr = tiny_run.finish(tiny_run.start_run(before, config=tmp_path))
        assert code == 1
        assert "another process is training in this run" in stderr
        assert is_marked(tmp_path / "run", mark)
    with locked(tmp_path / "run") as later:
        assert later != mark


def test_nothing_is_written_of_a_run_that_one_rank_refuses(recipe, tmp_path, capsys):
    run = tmp_path / "run"
    job = Job(2, str(recipe), str(run), overrides_of={1: ["training.lr=0.05"]})
    assert ranks.run(job) == [[2, 1]]
    assert [path.name for path in run.iterdir()] == [run_lock.LOCK_NAME]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith(f"error: rank 1 ({socket.gethostname()}): was told other than rank 0: training.lr is 0.05")


def test_a_shard_that_only_its_own_rank_sees_makes_no_checkpoint(tmp_path):
    manager = CheckpointManager(tmp_path)
    (tmp_path / "shards_step_1").mkdir()
    (tmp_path / "shards_step_1" / "short").write_bytes(b"1")
    for name in ("shards_step_1/elsewhere", "shards_step_1/short"):
        with pytest.raises(OSError, match="is not there as it was written"):
            manager.commit(1, {}, {}, {name: {"size": 2, "sha256": ""}})
    assert manager.marked_steps() == []
