"""Files whose author means harm: nothing is executed, nothing outside their folder is touched, no size is believed."""

import io
import json
import os
import pickle
import struct
import time
import zipfile

import pytest
import tiny_run
import torch
from forging import forge, reseal
from test_checkpoint import CONFIG, save

from gpt_oss_lite.config.recipe import load_recipe
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.checkpoint import CheckpointManager
from gpt_oss_lite.training.dataset import PretrainDataset
from gpt_oss_lite.training.leftovers import remove_leftovers
from gpt_oss_lite.training.memory import meta_model
from gpt_oss_lite.training.run_folder import read_record
from gpt_oss_lite.training.snapshot import DamagedCheckpoint
from gpt_oss_lite.training.weights import check_weights_fit, load_model
from shared_data.errors import UserError
from shared_data.files import write_atomic
from shared_data.manifest import read_sidecar


@pytest.fixture(autouse=True)
def quickly():
    """A hostile file may not keep a reader busy."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < 20


class Payload:
    """Unpickled, it leaves a trace."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return (open, (str(self.trace), "w"))


def zipped_payload(trace):
    """A torch archive whose pickle would call open()."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps(Payload(trace)))
        archive.writestr("x/version", "3")
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["optim_step_2.pt", "sched_step_2.pt", "rng_step_2.pt", "model_step_2.safetensors"])
@pytest.mark.parametrize("form", ["bare pickle", "archive"])
def test_a_pickle_where_tensors_are_expected_is_never_executed(tmp_path, kind, form):
    folder, trace = tmp_path / "checkpoints", tmp_path / "executed"
    manager, (model, optimizer, scheduler) = save(folder)
    content = pickle.dumps(Payload(trace)) if form == "bare pickle" else zipped_payload(trace)
    (folder / kind).write_bytes(content)
    forge(folder, kind)
    with pytest.raises(DamagedCheckpoint, match=kind.replace(".", r"\.")):
        manager.load(model, 2, optimizer, scheduler, with_rng=True)
    assert not trace.exists()


def test_a_corpus_that_is_a_pickle_is_never_executed(tmp_path):
    trace = tmp_path / "executed"
    (tmp_path / "tokens.pt").write_bytes(zipped_payload(trace))
    with pytest.raises(UserError, match=r"tokens\.pt: not a saved tensor"):
        PretrainDataset(tmp_path / "tokens.pt", 16)
    assert not trace.exists()


def test_an_archive_that_unpacks_to_gigabytes_is_refused_unread(tmp_path):
    manager, (model, optimizer, _) = save(tmp_path)
    path = tmp_path / "optim_step_2.pt"
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.writestr("optim_step_2/data/99999", b"\0" * (64 << 20))
    assert path.stat().st_size < 1 << 20
    forge(tmp_path, path.name)
    with pytest.raises(DamagedCheckpoint, match=r"optim_step_2\.pt .*compressed"):
        manager.load(model, 2, optimizer)


def header(**tensors):
    """A safetensors file of 8 bytes of data with any header."""
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + b"\0" * 8


HUGE = {
    "huge shape": header(x={"dtype": "F32", "shape": [2**40, 2**20], "data_offsets": [0, 8]}),
    "huge offsets": header(x={"dtype": "F32", "shape": [2], "data_offsets": [0, 2**62]}),
    "product overflows": header(x={"dtype": "F32", "shape": [2**33, 2**33], "data_offsets": [0, 8]}),
    "negative shape": header(x={"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}),
    "overlapping": header(**{n: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for n in "xy"}),
    "header longer than the file": struct.pack("<Q", 2**40) + b"{}",
    "nested": struct.pack("<Q", 100_000) + b"[" * 100_000,
    "empty": b"",
}


@pytest.mark.parametrize("name", HUGE)
def test_huge_declared_shapes_in_a_header_allocate_nothing(tmp_path, name):
    manager, (model, _, _) = save(tmp_path)
    path = tmp_path / "model_step_2.safetensors"
    path.write_bytes(HUGE[name])
    forge(tmp_path, path.name)
    for read in (lambda: manager.load(model, 2), lambda: load_model(tmp_path, 2)):
        with pytest.raises(UserError, match=r"model_step_2\.safetensors"):
            read()
    with pytest.raises(UserError, match=r"model_step_2\.safetensors"):
        check_weights_fit(meta_model(CONFIG), manager, 2)
    (tmp_path / "shard_00000.idx").write_bytes(HUGE[name])
    with pytest.raises(UserError, match=r"shard_00000\.idx"):
        read_sidecar(tmp_path / "shard_00000.bin")


@pytest.mark.parametrize(
    "changes",
    [{"d_model": 2**20, "head_dim": 2**20}, {"n_layers": 10**9}, {"n_experts": 10**9}, {"padded_vocab_size": 2**40}],
)
def test_a_meta_that_declares_a_huge_model_builds_none(tmp_path, changes):
    save(tmp_path)
    path = tmp_path / "meta_step_2.json"
    meta = json.loads(path.read_text())
    meta["model"] |= changes
    reseal(path, meta)
    with pytest.raises(UserError, match=r"is of another model|not a ModelConfig"):
        load_model(tmp_path, 2)


def test_a_pt_file_with_a_huge_declared_tensor_allocates_nothing(tmp_path):
    manager, (model, optimizer, _) = save(tmp_path)
    path = tmp_path / "optim_step_2.pt"
    content = torch.load(path, weights_only=True)
    name = next(iter(content["state"]))
    content["state"][name]["exp_avg"] = torch.zeros(1).expand(2**40)  # one number on disk
    torch.save(content, path)
    assert path.stat().st_size < 1 << 20
    forge(tmp_path, path.name)
    with pytest.raises(DamagedCheckpoint, match=r"optim_step_2\.pt does not hold"):
        manager.load(model, 2, optimizer)


@pytest.mark.parametrize("where", ["../secret.bin", "/etc/passwd", "a/../../secret.bin", "", "."])
def test_a_manifest_that_points_outside_its_folder_is_refused(tmp_path, where):
    corpus = tiny_run.make_corpus(tmp_path / "corpus")
    (tmp_path / "secret.bin").write_bytes((corpus / "shard_00000.bin").read_bytes())
    manifest = json.loads((corpus / "manifest.json").read_text())
    manifest["shards"][0]["path"] = where
    (corpus / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"manifest\.json|corpus"):
        PretrainDataset(corpus, 16)


@pytest.mark.parametrize("target", ["loop", "/dev/zero", "folder", "nowhere"])
def test_a_shard_that_is_a_link_to_no_file_is_refused(tmp_path, target):
    """A link to a file is a shard like any other: corpora are published by links where hard links cannot be."""
    corpus = tiny_run.make_corpus(tmp_path / "corpus")
    shard = corpus / "shard_00001.bin"
    moved = shard.rename(tmp_path / "elsewhere.bin")
    shard.symlink_to(moved)
    assert len(PretrainDataset(corpus, 16)) > 0
    shard.unlink()
    shard.symlink_to({"loop": shard, "folder": tmp_path}.get(target, target))
    with pytest.raises(UserError, match=r"shard_00001\.bin is not there"):
        PretrainDataset(corpus, 16)


def test_a_named_pipe_in_place_of_a_file_does_not_hang(tmp_path):
    corpus = tiny_run.make_corpus(tmp_path / "corpus")
    (corpus / "shard_00001.bin").unlink()
    os.mkfifo(corpus / "shard_00001.bin")
    with pytest.raises(UserError, match=r"shard_00001\.bin"):
        PretrainDataset(corpus, 16)
    manager, _ = save(tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / "rng_step_2.pt").unlink()
    os.mkfifo(tmp_path / "checkpoints" / "rng_step_2.pt")
    assert manager.list_checkpoints() == []
    with pytest.raises(DamagedCheckpoint, match=r"rng_step_2\.pt"):
        manager.load(GPTOSS(CONFIG), 2)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{c}: &{c} [*{p}, *{p}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)),
        "model: {" * 5000,
        "[" * 100_000,
        "training: {lr: " + "9" * 50_000 + "}",
        "training: !!python/object/apply:os.system ['touch executed']",
        "model: !!binary " + "A" * 1_000_000,
        "? " * 3000,
    ],
    ids=["aliases", "nested mappings", "nested lists", "long number", "python object", "binary", "nested keys"],
)
def test_a_yaml_bomb_is_one_line(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bomb.yaml").write_text(text)
    with pytest.raises(UserError, match=r"bomb\.yaml") as refused:
        load_recipe(tmp_path / "bomb.yaml")
    assert len(str(refused.value)) < 1000
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 100_000, "9" * 10_000, "\x00", '"\\ud800"'])
def test_json_bombs_are_damage(tmp_path, text):
    manager, _ = save(tmp_path)
    (tmp_path / "meta_step_2.json").write_text(text)
    assert manager.list_checkpoints() == []
    with pytest.raises(DamagedCheckpoint, match=r"meta_step_2\.json"):
        manager.meta(2)
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UserError, match=r"run\.json"):
        read_record(tmp_path)
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest\.json"):
        PretrainDataset(tmp_path, 16)


def test_leftovers_are_removed_and_links_are_not_followed(tmp_path):
    folder = tmp_path / "checkpoints"
    manager, _ = save(folder)
    (tmp_path / "precious").write_text("mine")
    (folder / "model_step_9.safetensors").symlink_to(tmp_path / "precious")
    (folder / "rng_step_9.pt.tmp").symlink_to(tmp_path / "precious")
    remove_leftovers(manager)
    assert (tmp_path / "precious").read_text() == "mine"
    assert not any("step_9" in path.name for path in folder.iterdir())


def test_a_link_in_place_of_a_temporary_name_is_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run.json.tmp").symlink_to(tmp_path / "precious")
    write_atomic(tmp_path / "run.json", "new")
    assert (tmp_path / "precious").read_text() == "mine"
    assert (tmp_path / "run.json").read_text() == "new"


def test_a_meta_of_another_step_or_format_is_not_taken(tmp_path):
    save(tmp_path)
    path = tmp_path / "meta_step_2.json"
    meta = json.loads(path.read_text())
    for changes in ({"step": 3}, {"format": 99}, {"step": True}, {"files": {}}):
        reseal(path, {**meta, **changes})
        with pytest.raises(DamagedCheckpoint, match=r"meta_step_2\.json"):
            CheckpointManager(tmp_path).meta(2)
