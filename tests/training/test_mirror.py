"""A run's second home: copied after each commit, gone on with where a copy stopped, and the way back for a lost run.
Tried on a local file system and on fsspec's memory store."""

import dataclasses
import shutil
import uuid

import fsspec
import pytest
import tiny_run

from gpt_oss_lite.config import ModelConfig, TrainingConfig
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.checkpoint import CheckpointManager
from gpt_oss_lite.training.distributed import Ranks
from gpt_oss_lite.training.mirror import Mirror
from gpt_oss_lite.training.optimizer import make_optimizer, make_scheduler
from gpt_oss_lite.training.pretrain import PretrainOptions, pretrain
from gpt_oss_lite.training.sharded import consolidate, save_shards
from shared_data.errors import UserError


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path):
    return f"file://{tmp_path}/second" if request.param == "file" else f"memory://{uuid.uuid4().hex}/second"


@pytest.fixture
def options(tmp_path, url):
    corpus = tiny_run.make_corpus(tmp_path / "corpus")
    recipe = tiny_run.write_recipe(
        tmp_path / "tiny.yaml", corpus, total_steps=12, save_interval=2, keep_last_n=2, keep_every=4, mirror=url
    )
    return PretrainOptions(config=recipe, out=tmp_path / "run", seed=1)


def stored(url):
    """Content of every file under a URL, by its path below it."""
    store, root = fsspec.core.url_to_fs(url)
    return {path.removeprefix(root).lstrip("/"): store.cat_file(path) for path in store.find(root)}


def test_the_copy_is_the_run_and_a_lost_run_comes_back_from_it_bit_for_bit(options, url, tmp_path):
    plain = dataclasses.replace(options, out=tmp_path / "plain", overrides=["training.mirror=null"])
    assert pretrain(plain) == 0
    assert pretrain(dataclasses.replace(options, max_steps=6)) == 0
    mirror = Mirror(url, options.out)
    assert mirror.steps() == CheckpointManager(options.out / "checkpoints").list_checkpoints() == [4, 6]
    copies = {name: content for name, content in stored(url).items() if "checkpoints/" in name}
    here = {f"run/checkpoints/{path.name}": path.read_bytes() for path in (options.out / "checkpoints").iterdir()}
    assert copies == here

    shutil.rmtree(options.out)  # the machine is gone, and its disk
    assert pretrain(dataclasses.replace(options, seed=None, max_steps=8, auto_resume=True)) == 0
    shutil.rmtree(options.out)
    assert pretrain(dataclasses.replace(options, seed=None, resume_latest=True)) == 0
    assert tiny_run.rows(options.out) == tiny_run.rows(plain.out)
    assert tiny_run.digests(options.out, 12) == tiny_run.digests(plain.out, 12)
    assert mirror.steps() == [4, 8, 10, 12]


def test_a_copy_that_stopped_is_gone_on_with_and_what_is_there_is_not_copied_again(options, url, monkeypatch):
    pretrain(dataclasses.replace(options, overrides=["training.mirror=null"], max_steps=4))
    mirror, manager = Mirror(url, options.out), CheckpointManager(options.out / "checkpoints")
    real, put = Mirror._put, []

    def failing_put(self, path, name):
        if len(put) == 7:
            raise ConnectionError("the network is gone")
        put.append(name)
        real(self, path, name)

    monkeypatch.setattr(Mirror, "_put", failing_put)
    with pytest.raises(ConnectionError):
        mirror.push(manager)
    assert mirror.steps() == []
    before, put[:] = list(put), []
    monkeypatch.setattr(Mirror, "_put", lambda self, path, name: (put.append(name), real(self, path, name)))
    assert mirror.push(manager) == [2, 4]
    assert mirror.steps() == [2, 4]
    copied_before = {name for name in before if name.endswith((".pt", ".safetensors"))}
    assert copied_before
    assert not copied_before & set(put)
    assert not [name for name in stored(url) if name.endswith(".part")]
    put.clear()
    assert mirror.push(manager) == []
    assert not [name for name in put if "checkpoints" in name]


def test_a_step_that_was_saved_again_after_a_rollback_replaces_its_copy(options, url, tmp_path):
    pretrain(dataclasses.replace(options, max_steps=4))
    other = dataclasses.replace(options, out=tmp_path / "other" / "run", seed=2, overrides=["training.mirror=null"])
    pretrain(dataclasses.replace(other, max_steps=4))
    Mirror(url, other.out).push(CheckpointManager(other.out / "checkpoints"))  # same name, same sizes, other weights
    name = "checkpoints/model_step_4.safetensors"
    assert stored(url)[f"run/{name}"] == (other.out / name).read_bytes() != (options.out / name).read_bytes()


def test_a_store_that_fails_stops_no_run_and_the_next_copy_makes_it_good(options, url, monkeypatch, capsys):
    real, calls = Mirror.push, iter(range(100))

    def push(self, manager):
        if next(calls) < 2:
            raise TimeoutError("no answer")
        return real(self, manager)

    monkeypatch.setattr(Mirror, "push", push)
    assert pretrain(options) == 0
    assert capsys.readouterr().err.count("NOT COPIED") == 2
    assert Mirror(url, options.out).steps()[-1] == 12


def test_a_damaged_copy_is_not_taken(options, url, capsys):
    pretrain(dataclasses.replace(options, max_steps=6))
    store, root = fsspec.core.url_to_fs(url)
    path = f"{root}/run/checkpoints/model_step_6.safetensors"
    content = bytearray(store.cat_file(path))
    content[len(content) // 2] ^= 1
    store.pipe_file(path, bytes(content))
    shutil.rmtree(options.out / "checkpoints")
    with pytest.raises(UserError, match="every checkpoint is damaged"):
        pretrain(dataclasses.replace(options, resume_latest=True))
    assert "model_step_6.safetensors is damaged" in capsys.readouterr().err
    assert pretrain(dataclasses.replace(options, resume_from=4)) == 0  # the older copy is whole


def test_a_new_run_does_not_overwrite_anothers_second_home(options, tmp_path):
    pretrain(dataclasses.replace(options, max_steps=2))
    shutil.rmtree(options.out)
    with pytest.raises(UserError, match="a run named run is there already"):
        pretrain(options)
    assert not options.out.exists()


@pytest.mark.parametrize("url", ["nonsense://x", "s3://bucket/x"], indirect=False)
def test_a_url_that_cannot_be_opened_is_one_line(options, url):
    with pytest.raises(UserError, match=rf"training.mirror is {url}: "):
        pretrain(options)
    assert not options.out.exists()


def test_nothing_to_go_on_with_here_or_there_is_one_line(options):
    with pytest.raises(UserError, match=r"run holds no run to go on with; leave out --resume to start one"):
        pretrain(dataclasses.replace(options, seed=None, resume_latest=True))
    assert not options.out.exists()


def save_in_shards(manager, *steps):
    """Checkpoints of an untrained model, as the ranks of a sharded one write them, one after another."""
    model, training = GPTOSS(ModelConfig(**tiny_run.MODEL)), TrainingConfig()
    optimizer = make_optimizer(model, training)
    model_keys = {"model": ModelConfig(**tiny_run.MODEL).model_dump()}
    for step in steps:
        save_shards(manager, model, optimizer, step, make_scheduler(optimizer, training), model_keys, Ranks())
        yield step


def checkpoint_files(url):
    """Content of the copy's files by their path in checkpoints/."""
    return {name.partition("checkpoints/")[2]: text for name, text in stored(url).items() if "checkpoints/" in name}


def local_files(manager):
    paths = (path for path in manager.folder.rglob("*") if path.is_file())
    return {path.relative_to(manager.folder).as_posix(): path.read_bytes() for path in paths}


def test_a_step_that_is_made_one_file_here_is_one_there_and_its_shards_are_gone(url, tmp_path):
    run = tmp_path / "run"
    manager, mirror = CheckpointManager(run / "checkpoints", keep=3), Mirror(url, run)
    assert [mirror.push(manager) for _ in save_in_shards(manager, 1, 2)] == [[1], [2]]
    shards = {name: text for name, text in checkpoint_files(url).items() if name.startswith("shards_step_2/")}
    assert shards
    consolidate(manager, 2)
    assert mirror.push(manager) == [2]
    assert checkpoint_files(url) == local_files(manager)
    store, root = fsspec.core.url_to_fs(url)
    there = store.ls(f"{root}/run/checkpoints", detail=False, refresh=True)
    assert [name.rpartition("/")[2] for name in there if "shards_step" in name] == ["shards_step_1"]
    assert mirror.push(manager) == []
    assert mirror.steps() == [1, 2]
    other = CheckpointManager(tmp_path / "other/checkpoints")
    mirror.fetch(2, other)
    assert (other.newest_good(), other.is_sharded(2)) == (2, False)


def copied_then_consolidated(url, run):
    """Steps 1 and 2 in shards, both copied, and then step 2 as one file here alone."""
    manager, mirror = CheckpointManager(run / "checkpoints", keep=3), Mirror(url, run)
    for _ in save_in_shards(manager, 1, 2):
        mirror.push(manager)
    consolidate(manager, 2)
    return manager, mirror


def test_a_copy_of_the_other_form_that_was_killed_is_finished_and_leaves_nothing_besides(url, tmp_path, monkeypatch):
    """Killed after each of the copy's files in turn: no step is half of one form and half of the other."""
    manager, mirror = copied_then_consolidated(url, tmp_path / "run")
    put, left = Mirror._put, [0]

    def dying(self, path, name):
        if "checkpoints/" in name:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
        put(self, path, name)

    monkeypatch.setattr(Mirror, "_put", dying)
    for at in range(3):
        left[0] = at
        with pytest.raises(KeyboardInterrupt):
            mirror.push(manager)
        assert mirror.steps() == [1]
    left[0] = 100
    assert mirror.push(manager) == [2]
    assert checkpoint_files(url) == local_files(manager)


def test_the_former_files_go_with_a_later_copy_where_their_deletion_was_killed(url, tmp_path, monkeypatch):
    """Also beside a meta that cannot be read, which is left alone with its step."""
    manager, mirror = copied_then_consolidated(url, tmp_path / "run")
    remove = Mirror._remove

    def dying(self, name):
        if "shards_step_2" in name or "counts_step_2" in name:
            raise KeyboardInterrupt
        remove(self, name)

    with monkeypatch.context() as patched:
        patched.setattr(Mirror, "_remove", dying)
        with pytest.raises(KeyboardInterrupt):
            mirror.push(manager)
    assert mirror.steps() == [1, 2]
    torn = tmp_path / "torn"
    torn.write_text('{"files": {"mod')
    for name in ("meta_step_9.json", "model_step_9.safetensors"):
        mirror._put(torn, f"checkpoints/{name}")
    assert mirror.push(manager) == []
    left = {"meta_step_9.json", "model_step_9.safetensors"}
    assert checkpoint_files(url) == local_files(manager) | dict.fromkeys(left, torn.read_bytes())


def test_what_a_killed_copy_left_of_a_step_that_is_gone_here_is_deleted(url, tmp_path, monkeypatch):
    run = tmp_path / "run"
    manager, mirror = CheckpointManager(run / "checkpoints", keep=1), Mirror(url, run)
    saved = save_in_shards(manager, 1, 2)
    put = Mirror._put

    def dying(self, path, name):
        if name.endswith("meta_step_1.json"):
            raise KeyboardInterrupt
        put(self, path, name)

    next(saved)
    with monkeypatch.context() as patched:
        patched.setattr(Mirror, "_put", dying)
        with pytest.raises(KeyboardInterrupt):
            mirror.push(manager)
    assert any("step_1" in name for name in checkpoint_files(url))
    next(saved)
    assert mirror.push(manager) == [2]
    assert checkpoint_files(url) == local_files(manager)


def test_a_step_in_shards_is_copied_once_and_comes_back(url, tmp_path):
    run = tmp_path / "run"
    manager, mirror = CheckpointManager(run / "checkpoints", keep=1), Mirror(url, run)
    for step in save_in_shards(manager, 1, 2):
        assert mirror.push(manager) == [step]
        assert mirror.push(manager) == []
    assert mirror.steps() == [2]
    assert not [name for name in stored(url) if "step_1" in name]
    other = CheckpointManager(tmp_path / "other/checkpoints")
    mirror.fetch(2, other)
    assert other.newest_good() == 2
    (shard,) = (path for path in run.rglob("*.safetensors"))
    assert (other.shards(2) / shard.name).read_bytes() == shard.read_bytes()
