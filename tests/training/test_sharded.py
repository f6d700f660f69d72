"""Shards: the same bytes whether a run was killed or not, and one file made of them through any number of kills."""

import json
import shutil

import pytest
import ranks
import tiny_run
import torch
from forging import forge, reseal
from killed_consolidation import killed_copies
from ranks import Job
from safetensors.torch import load_file

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.checkpoint import CheckpointManager
from gpt_oss_lite.training.checkpoint_commands import app
from gpt_oss_lite.training.leftovers import remove_leftovers
from gpt_oss_lite.training.pretrain import PretrainOptions, pretrain
from gpt_oss_lite.training.weights import load_model
from shared_data.console import run_app
from shared_data.errors import UserError

STEP = 2


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs on 2 ranks with fsdp: one of 4 steps without a break, and one that was killed in step 3."""
    folder = tmp_path_factory.mktemp("shards")
    corpus = tiny_run.make_corpus(folder / "corpus")
    recipe = tiny_run.write_recipe(
        folder / "tiny.yaml", corpus, gradient_accumulation_steps=4, total_steps=4, save_interval=STEP,
        parallelism="fsdp",
    )  # fmt: skip
    unbroken, killed = folder / "unbroken", folder / "killed"
    codes = ranks.run(
        Job(2, str(recipe), str(unbroken), seed=3),
        Job(2, str(recipe), str(killed), seed=3, kill_after=6),  # 2 forward passes a step on each rank
        Job(2, str(recipe), str(killed), resume_latest=True),
    )
    assert codes == [[0, 0], [-9, -9], [0, 0]]
    assert tiny_run.events(killed, "resume")[0]["step"] == STEP
    return unbroken, killed


def test_every_file_of_a_run_that_was_killed_is_byte_for_byte_that_of_the_unbroken_one(runs):
    unbroken, killed = runs
    for step in (STEP, 2 * STEP):
        expected = tiny_run.digests(unbroken, step)
        assert sum("shard-" in name for name in expected) == 2
        assert tiny_run.digests(killed, step) == expected


def state_in_shards(checkpoints):
    """Weights and first moments of a step by name, read without the code under test."""
    pieces = {}
    for path in sorted((checkpoints / f"shards_step_{STEP}").iterdir()):
        for name, tensor in load_file(path).items():
            pieces.setdefault(name, []).append(tensor)
    return {name: torch.cat(tensors) for name, tensors in pieces.items()}


def listed(capsys, *words):
    """What a command of `checkpoints` prints as JSON, and its exit code."""
    capsys.readouterr()
    code = run_app(app, [*map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_consolidate_killed_at_any_point_is_finished_by_the_next_and_nothing_is_lost(runs, tmp_path, capsys):
    run, _ = runs
    saved = state_in_shards(run / "checkpoints")
    copies = killed_copies(run, STEP, tmp_path)
    assert len(copies) > 15
    sharded = []
    for copy in copies:
        checkpoints = copy / "checkpoints"
        manager = CheckpointManager(checkpoints)
        # What the kill left is a whole step in one form, and the commands say which and that it is good.
        sharded.append(manager.is_sharded(STEP))
        code, rows = listed(capsys, "list", copy)
        of_meta = sum(path.stat().st_size for path in manager.files(STEP)[:-1])
        assert (code, [row["step"] for row in rows], rows[0]["bytes"]) == (0, [STEP, 2 * STEP], of_meta)
        assert listed(capsys, "verify", copy) == (0, {str(STEP): "good", str(2 * STEP): "good"})
        (checkpoints / ".tmpXyZ").touch()  # what safetensors leaves when it is killed while it writes
        assert run_app(app, ["consolidate", str(copy), "--step", str(STEP)]) == 0
        assert not manager.is_sharded(STEP)
        names = {path.name for path in checkpoints.iterdir()}
        assert {name for name in names if f"_{STEP}" in name or "tmp" in name} == {
            f"model_step_{STEP}.safetensors", *(f"{kind}_step_{STEP}.pt" for kind in ("optim", "sched", "rng")),
            f"meta_step_{STEP}.json",
        }  # fmt: skip
        assert listed(capsys, "verify", copy)[0] == 0
        weights = load_file(checkpoints / f"model_step_{STEP}.safetensors")
        moments = torch.load(checkpoints / f"optim_step_{STEP}.pt")["state"]
        found = {f"model.{name}": tensor for name, tensor in weights.items()}
        found |= {f"{key}.{name}": own[key] for name, own in moments.items() for key in ("exp_avg", "exp_avg_sq")}
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())
        assert {own["step"].item() for own in moments.values()} == {float(STEP)}
    assert load_model(copies[0], STEP)[1]["step"] == STEP
    # Kills fell before and after the one moment at which the step changed its form.
    assert sharded == sorted(sharded, reverse=True)
    assert sharded.count(True) > 5
    assert sharded.count(False) > 3


def test_weights_in_shards_are_read_like_those_of_one_file(runs, tmp_path, capsys):
    """By all that reads a model: a run on one rank that starts from them, `checkpoints diff`, and `load_model`."""
    run, killed = runs
    saved = state_in_shards(run / "checkpoints")
    weights = load_model(run, STEP)[0].state_dict()
    assert all(torch.equal(weights[name], saved[f"model.{name}"]) for name in weights if name != "head.weight")
    copy = shutil.copytree(run, tmp_path / "copy")
    assert run_app(app, ["consolidate", str(copy), "--step", str(STEP)]) == 0
    assert listed(capsys, "diff", copy, STEP, STEP, "--other", run) == (0, {"meta": {}, "tensors": {}})
    assert listed(capsys, "diff", run, STEP, STEP, "--other", killed) == (0, {"meta": {}, "tensors": {}})
    code, found = listed(capsys, "diff", run, STEP, 2 * STEP)
    assert (code, len(found["tensors"])) == (1, len(dict(load_model(run)[0].named_parameters())))
    started = tmp_path / "started"
    options = PretrainOptions(config=run / "config.yaml", out=started, init_from=run, max_steps=1)
    assert pretrain(options) == 0  # whose first update is none: the warm-up begins at 0
    assert listed(capsys, "diff", started, 1, 2 * STEP, "--other", run)[1]["tensors"] == {}


def test_shards_of_another_model_are_refused(runs, tmp_path):
    copy = shutil.copytree(runs[0], tmp_path / "copy")
    meta_path = copy / "checkpoints" / f"meta_step_{STEP}.json"
    meta = json.loads(meta_path.read_text())
    meta["model"]["d_model"] *= 2
    reseal(meta_path, meta)
    with pytest.raises(UserError, match=rf"shards_step_{STEP} is of another model: \S+ is \(16, 16\) there"):
        load_model(copy, STEP)
    assert run_app(app, ["consolidate", str(copy), "--step", str(STEP)]) == 2


def test_a_shard_that_is_gone_is_named_by_all_that_reads_the_step(runs, tmp_path, capsys):
    copy = shutil.copytree(runs[0], tmp_path / "copy")
    shard = next((copy / "checkpoints" / f"shards_step_{2 * STEP}").glob("shard-00002-*"))
    shard.unlink()
    with pytest.raises(UserError, match=f"{shard} is missing or incomplete"):
        load_model(copy, 2 * STEP)
    assert load_model(copy)[1]["step"] == STEP
    capsys.readouterr()
    for words in (["consolidate", str(copy), "--step", str(2 * STEP)], ["diff", str(copy), str(2 * STEP), str(STEP)]):
        assert run_app(app, words) == 2
        assert f"{shard} is missing or incomplete" in capsys.readouterr().err


NAME = "model.blocks.1.moe.experts.1.gate_proj.weight"
SHARDING = "DCP_SHARDING_INFO"


def offsets_of(header, change):
    offsets = json.loads(header["__metadata__"][SHARDING])
    change(offsets)
    header["__metadata__"][SHARDING] = json.dumps(offsets)


FORGED = {
    "more rows than there are": lambda header: header[NAME].update(shape=[2**40, 16]),
    "rows by another offset": lambda header: offsets_of(header, lambda all: all[NAME].update(saved_offsets=[2**40, 0])),
    "rows that overlap": lambda header: offsets_of(header, lambda all: all[NAME].update(saved_offsets=[7, 0])),
    "one dimension more": lambda header: header[NAME].update(shape=[8, 16, 1]),
    "a tensor less": lambda header: header.pop(NAME),
    "no offsets": lambda header: header.pop("__metadata__"),
    "no offset of one": lambda header: offsets_of(header, lambda all: all.pop(NAME)),
}


@pytest.mark.parametrize("name", FORGED)
def test_shards_that_do_not_make_up_whole_tensors_are_refused_in_one_line(runs, tmp_path, capsys, name):
    copy = shutil.copytree(runs[0], tmp_path / "copy")
    shard = next((copy / "checkpoints" / f"shards_step_{STEP}").glob("shard-00002-*"))
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    FORGED[name](header)
    forged = json.dumps(header).encode()
    shard.write_bytes(len(forged).to_bytes(8, "little") + forged + content[8 + length :])
    forge(copy / "checkpoints", f"{shard.parent.name}/{shard.name}", STEP)
    with pytest.raises(UserError, match=rf"shards_step_{STEP}"):
        load_model(copy, STEP)
    capsys.readouterr()
    for words in (["consolidate", str(copy), "--step", str(STEP)], ["diff", str(copy), str(STEP), str(2 * STEP)]):
        assert run_app(app, words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"shards_step_{STEP}" in line
    assert next((copy / "checkpoints" / f"shards_step_{STEP}").glob("shard-00001-*")).exists()


def test_shards_of_another_model_are_refused_by_the_first_tensor_that_differs(runs):
    run, _ = runs
    manager = CheckpointManager(run / "checkpoints")
    config = ModelConfig(**manager.meta(STEP)["model"])
    for change, said in (
        ({"expert_hidden_size": 24}, r"\S+ is \(16, 16\) there and \(16, 24\) in the model"),
        ({"n_layers": 3}, r"blocks\.2\.\S+ is missing there"),
        ({"n_layers": 1}, r"blocks\.1\.\S+ is \(.*\) there and missing in the model"),
    ):
        with pytest.raises(UserError, match=rf"^\S+/shards_step_{STEP} is of another model: model.{said}"):
            manager.load(GPTOSS(config.replace(**change)), STEP)


def test_shards_beside_a_damaged_single_file_are_kept(runs, tmp_path):
    """Of a `consolidate` that was killed before it deleted them; where its file is damaged later, they are all there
    is."""
    run, _ = runs
    copy = shutil.copytree(run, tmp_path / "copy")
    checkpoints = copy / "checkpoints"
    assert run_app(app, ["consolidate", str(copy), "--step", str(STEP)]) == 0
    shutil.copytree(run / "checkpoints" / f"shards_step_{STEP}", checkpoints / f"shards_step_{STEP}")
    weights = checkpoints / f"model_step_{STEP}.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert run_app(app, ["consolidate", str(copy), "--step", str(STEP)]) == 2
    remove_leftovers(CheckpointManager(checkpoints))
    kept = state_in_shards(checkpoints)
    assert all(torch.equal(kept[name], tensor) for name, tensor in state_in_shards(run / "checkpoints").items())
    weights.write_bytes(content)
    assert run_app(app, ["consolidate", str(copy), "--step", str(STEP)]) == 0
    assert not (checkpoints / f"shards_step_{STEP}").exists()
