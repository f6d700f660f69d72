"""Checkpoints: exact, strict, whole or not there, and free of pickled objects."""

import json
import os
import random
import shutil

import numpy as np
import pytest
import tiny_run
import torch
from forging import forge, reseal
from safetensors import safe_open

from gpt_oss_lite.config import ModelConfig, TrainingConfig
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training import checkpoint
from gpt_oss_lite.training.checkpoint import CheckpointManager
from gpt_oss_lite.training.leftovers import remove_leftovers
from gpt_oss_lite.training.optimizer import make_optimizer, make_scheduler
from gpt_oss_lite.training.seeding import capture_rng, restore_rng
from gpt_oss_lite.training.snapshot import DamagedCheckpoint
from gpt_oss_lite.training.weights import load_model
from shared_data.errors import UserError

CONFIG = ModelConfig(**tiny_run.MODEL)
KINDS = ("model", "optim", "sched", "rng", "meta")


def trained(seed=0, steps=2, config=CONFIG):
    """A model, optimizer and scheduler after a few real updates."""
    torch.manual_seed(seed)
    model = GPTOSS(config)
    training = TrainingConfig(lr=1e-2, warmup_steps=1, total_steps=10)
    optimizer = make_optimizer(model, training)
    scheduler = make_scheduler(optimizer, training)
    for _ in range(steps):
        ids = torch.randint(0, tiny_run.ROWS, (2, 8))
        logits, aux = model(ids)
        (logits.logsumexp(-1).mean() + aux).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, optimizer, scheduler


def save(folder, step=2, **options):
    model, optimizer, scheduler = trained(steps=2)
    manager = CheckpointManager(folder, **options)
    manager.save(model, optimizer, step, scheduler, {"model": CONFIG.model_dump(mode="json"), "note": "x"})
    return manager, (model, optimizer, scheduler)


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def flip_a_byte(path, at=0.5):
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 0x10
    path.write_bytes(content)


def same_state(a, b):
    sa, sb = a.state_dict()["state"], b.state_dict()["state"]
    return sa.keys() == sb.keys() and all(torch.equal(sa[i][k], sb[i][k]) for i in sa for k in sa[i])


def test_everything_comes_back_bitwise(tmp_path):
    manager, (model, optimizer, scheduler) = save(tmp_path)
    assert files(tmp_path) == sorted(
        ["model_step_2.safetensors", "optim_step_2.pt", "sched_step_2.pt", "rng_step_2.pt", "meta_step_2.json"]
    )
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    other_model, other_optimizer, other_scheduler = trained(seed=9, steps=1)
    meta = manager.load(other_model, 2, other_optimizer, other_scheduler, with_rng=True)
    assert meta["step"] == 2
    assert meta["note"] == "x"
    assert all(torch.equal(other_model.state_dict()[k], v) for k, v in model.state_dict().items())
    assert same_state(optimizer, other_optimizer)
    assert other_scheduler.get_last_lr() == scheduler.get_last_lr()
    assert [g["lr"] for g in other_optimizer.param_groups] == [g["lr"] for g in optimizer.param_groups]


def test_files_have_the_permissions_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        save(tmp_path)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


def test_random_numbers_go_on_where_they_were():
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    random.gauss(0, 1), np.random.standard_normal(), torch.randn(3)  # leaves halves of pairs in the states
    state = capture_rng()
    first = [random.gauss(0, 1), np.random.standard_normal(), *torch.randn(3).tolist(), random.random()]
    restore_rng(state)
    assert [random.gauss(0, 1), np.random.standard_normal(), *torch.randn(3).tolist(), random.random()] == first


def test_tied_head_is_one_tensor_on_disk_and_one_storage_after_loading(tmp_path):
    save(tmp_path)
    with safe_open(tmp_path / "model_step_2.safetensors", "pt") as file:
        names = set(file.keys())
        assert file.get_tensor("embed.weight").dtype == torch.float32
    assert "embed.weight" in names
    assert "head.weight" not in names
    model, _ = load_model(tmp_path)
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    with torch.no_grad():
        model.embed.weight[0, 0] = 5.0
    assert model.head.weight[0, 0] == 5.0


def test_untied_head_is_saved_besides(tmp_path):
    config = CONFIG.replace(tie_embeddings=False)
    model, optimizer, scheduler = trained(config=config)
    CheckpointManager(tmp_path).save(model, optimizer, 1, scheduler, {"model": config.model_dump(mode="json")})
    loaded, _ = load_model(tmp_path)
    assert torch.equal(loaded.head.weight, model.head.weight)
    assert not torch.equal(loaded.head.weight, loaded.embed.weight)


def test_only_tensors_numbers_and_strings_by_parameter_name(tmp_path):
    _, (model, _, _) = save(tmp_path)
    contents = {k: torch.load(tmp_path / f"{k}_step_2.pt", weights_only=True) for k in ("optim", "sched", "rng")}

    def check(value):
        if isinstance(value, dict):
            for key, item in value.items():
                assert isinstance(key, str)
                check(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                check(item)
        else:
            assert value is None or isinstance(value, (torch.Tensor, int, float, str, bool)), type(value)

    check(contents)
    assert set(contents["optim"]["state"]) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [0.0, 0.5, 0.98])
def test_a_flipped_bit_in_any_file_never_loads_and_is_named(tmp_path, kind, at):
    manager, _ = save(tmp_path, step=2)
    model, optimizer, scheduler = trained(seed=5)
    manager.save(model, optimizer, 4, scheduler, {"model": CONFIG.model_dump(mode="json")})
    (path,) = tmp_path.glob(f"{kind}_step_4.*")
    flip_a_byte(path, at)
    fresh = GPTOSS(CONFIG)
    before = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
    with pytest.raises(DamagedCheckpoint, match=path.name):
        manager.load(fresh, 4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in fresh.state_dict().items())
    assert manager.newest_good() == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_or_short_file_makes_a_step_incomplete(tmp_path, kind):
    manager, _ = save(tmp_path, step=2)
    (path,) = tmp_path.glob(f"{kind}_step_2.*")
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    assert manager.list_checkpoints() == []
    path.unlink()
    assert manager.latest_step() is None
    with pytest.raises(UserError, match="no complete checkpoint"):
        manager.load(GPTOSS(CONFIG))
    path.write_bytes(whole)
    assert manager.latest_step() == 2


@pytest.mark.parametrize("n_replaced", range(5))
def test_a_crash_at_any_rename_leaves_the_older_checkpoint_the_newest(tmp_path, monkeypatch, n_replaced):
    manager, (model, optimizer, scheduler) = save(tmp_path, step=2)
    real, count = os.replace, iter(range(100))

    def failing_replace(source, target):
        if next(count) == n_replaced:
            raise OSError(28, "No space left on device", str(target))
        real(source, target)

    monkeypatch.setattr("os.replace", failing_replace)
    with pytest.raises(OSError, match="No space left"):
        manager.save(model, optimizer, 4, scheduler)
    monkeypatch.undo()
    assert manager.list_checkpoints() == [2]
    manager.verify(2)
    assert not [name for name in files(tmp_path) if name.endswith(".tmp")]
    remove_leftovers(manager)
    assert all("_step_2." in name for name in files(tmp_path))


def test_saving_a_step_again_voids_the_old_one_first(tmp_path, monkeypatch):
    manager, (model, optimizer, scheduler) = save(tmp_path, step=2)
    monkeypatch.setattr(checkpoint, "save_file", lambda *a, **k: (_ for _ in ()).throw(OSError(5, "I/O error")))
    with pytest.raises(OSError, match="I/O error"):
        manager.save(model, optimizer, 2, scheduler)
    assert manager.list_checkpoints() == []  # never old meta beside new files


def test_loading_is_strict(tmp_path):
    manager, _ = save(tmp_path)
    with pytest.raises(
        UserError, match=r"model_step_2.safetensors is of another model: (.*)_proj.weight is \(16, 16\)"
    ):
        manager.load(GPTOSS(CONFIG.replace(expert_hidden_size=8)), 2)
    with pytest.raises(UserError, match=r"kv_proj.bias is missing there"):
        manager.load(GPTOSS(CONFIG.replace(attention_bias=True)), 2)
    with pytest.raises(UserError, match=r"sink_bias is \(2,\) there and missing in the model"):
        manager.load(GPTOSS(CONFIG.replace(sink_bias=False)), 2)


def test_retention_keeps_the_newest_and_the_multiples(tmp_path):
    manager, (model, optimizer, scheduler) = save(tmp_path, step=1, keep=2, keep_every=4)
    for step in range(2, 11):
        manager.save(model, optimizer, step, scheduler)
    assert manager.list_checkpoints() == [4, 8, 9, 10]
    manager.keep_last_n(1)
    assert manager.list_checkpoints() == [4, 8, 10]


def test_checkpoints_of_a_later_past_do_not_push_out_new_ones(tmp_path):
    manager, (model, optimizer, scheduler) = save(tmp_path, step=100, keep=1)
    for step in (10, 11):
        manager.save(model, optimizer, step, scheduler)
    assert manager.list_checkpoints() == [11, 100]
    assert manager.newest_good(at_most=50) == 11


def test_the_only_complete_checkpoint_is_never_deleted(tmp_path):
    manager, (model, optimizer, scheduler) = save(tmp_path, step=2)
    with pytest.raises(UserError, match="step 2 is the only complete checkpoint"):
        manager.delete_checkpoint(2)
    manager.save(model, optimizer, 3, scheduler)
    manager.delete_checkpoint(2)
    assert manager.list_checkpoints() == [3]
    assert all("_step_3." in name for name in files(tmp_path))


def test_load_model_takes_run_or_checkpoint_folder_and_names_what_is_wrong(tmp_path):
    _, (trained_model, _, _) = save(tmp_path / "run" / "checkpoints")
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        model, meta = load_model(folder)
        assert not model.training
        assert meta["step"] == 2
        assert torch.equal(model.norm.weight, trained_model.norm.weight)
    with pytest.raises(UserError, match=r"no complete checkpoint of step 7 \(complete: 2\)"):
        load_model(tmp_path / "run", step=7)
    with pytest.raises(UserError, match="no such run folder"):
        load_model(tmp_path / "nowhere")


def test_a_pickle_in_place_of_tensors_is_not_executed(tmp_path):
    class Payload:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    manager, (model, optimizer, _) = save(tmp_path)
    path = tmp_path / "optim_step_2.pt"
    torch.save(Payload(), path)
    forge(tmp_path, path.name)
    with pytest.raises(DamagedCheckpoint, match=r"optim_step_2\.pt does not hold tensors"):
        manager.load(model, 2, optimizer)
    assert not (tmp_path / "executed").exists()


def test_meta_cannot_name_files_outside_the_folder(tmp_path):
    manager, _ = save(tmp_path / "a")
    shutil.copy(tmp_path / "a" / "rng_step_2.pt", tmp_path / "rng.pt")
    meta = json.loads((tmp_path / "a" / "meta_step_2.json").read_text())
    meta["files"]["../rng.pt"] = meta["files"].pop("rng_step_2.pt")
    reseal(tmp_path / "a" / "meta_step_2.json", meta)
    assert manager.list_checkpoints() == []
