"""Shards: the same bytes whether a run was killed or not, and one file made of them through any number of kills."""

import json
import shutil

import pytest
import ranks
import tiny_run
import torch
from killed_consolidation import killed_copies
from ranks import Job
from safetensors.torch import load_file

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.checkpoint import CheckpointManager, load_model
from gpt_oss_lite.training.checkpoint_commands import app
from gpt_oss_lite.training.leftovers import remove_leftovers
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


def test_shards_of_another_model_are_refused_by_the_first_tensor_that_differs(runs):
    run, _ = runs
    manager = CheckpointManager(run / "checkpoints")
    config = ModelConfig(**manager.meta(STEP)["model"])
    for change, said in (
        ({"expert_hidden_size": 24}, r"\S+ is \(16, 16\) in the shards and \(16, 24\) in the model"),
        ({"n_layers": 3}, r"blocks\.2\.\S+ is missing in the shards"),
        ({"n_layers": 1}, r"blocks\.1\.\S+ is \(.*\) in the shards and missing in the model"),
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
