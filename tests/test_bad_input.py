"""Bad input on the training side: exit code 2, one line that names what is wrong, and nothing written."""

import contextlib
import json
import shutil
from pathlib import Path

import command_line
import numpy as np
import pytest
import tiny_run

from gpt_oss_lite import cli
from shared_data.console import run_app


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A corpus, and a run on it."""
    folder = tmp_path_factory.mktemp("prepared")
    tiny_run.make_corpus(folder / "corpus")
    with contextlib.chdir(folder):
        tiny_run.write_recipe(Path("recipe.yaml"), Path("corpus"), total_steps=4, save_interval=2)
        assert run_app(cli.app, ["pretrain", "--config", "recipe.yaml", "--out", "run"]) == 0
    return folder


@pytest.fixture
def work(prepared, tmp_path, monkeypatch):
    """A folder of its own with copies of corpus, recipe and run, as the working folder."""
    shutil.copytree(prepared / "corpus", tmp_path / "corpus")
    shutil.copytree(prepared / "run", tmp_path / "run")
    shutil.copy(prepared / "recipe.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit_manifest(**changes: object) -> None:
    path = Path("corpus/manifest.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def write_ids(value: int) -> None:
    shard = Path("corpus/shard_00001.bin")
    ids = np.fromfile(shard, "<u4")
    ids[5] = value
    ids.tofile(shard)


def edit_recipe(old: str, new: str) -> None:
    path = Path("recipe.yaml")
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


QUICKSTART, FULL = (str(command_line.ROOT / f"configs/{name}.yaml") for name in ("quickstart", "pretrain_a100_502m"))
PRETRAIN = ["pretrain", "--config", "recipe.yaml", "--out", "new"]

# name: (what is done to the folder, the command, words that the line must have)
CASES = {
    "no recipe": (None, ["pretrain", "--config", "none.yaml"], ["none.yaml"]),
    "recipe is a folder": (None, ["pretrain", "--config", "corpus"], ["--config corpus", "folder"]),
    "recipe is empty": (lambda: Path("recipe.yaml").write_text(""), PRETRAIN, ["recipe.yaml", "empty"]),
    "recipe is no text": (lambda: Path("recipe.yaml").write_bytes(b"\xff\x00"), PRETRAIN, ["recipe.yaml"]),
    "rate is not finite": (lambda: edit_recipe("lr: 0.01", "lr: .nan"), PRETRAIN, ["training.lr", "nan", "finite"]),
    "deviation is not finite": (
        None, [*PRETRAIN, "--set", "model.init_std=.inf"], ["--set model.init_std=.inf", "finite"]),
    "unknown key": (None, [*PRETRAIN, "--set", "model.d_modle=1"], ["model.d_modle", "d_model"]),
    "heads do not fit": (None, [*PRETRAIN, "--set", "model.n_kv_heads=3"], ["n_heads is 2", "n_kv_heads (3)"]),
    "fp16": (None, [*PRETRAIN, "--set", "model.dtype=fp16"], ["model.dtype is fp16", "bf16 or fp32"]),
    "no corpus": (lambda: shutil.rmtree("corpus"), PRETRAIN, ["corpus: no such corpus in the working folder /"]),
    "no demo corpus": (
        None, ["pretrain", "--config", QUICKSTART, "--out", "new"],
        ["data/quickstart/pretrain_chinchilla", "`make demo`"]),
    "no default corpus": (
        None, ["pretrain", "--config", FULL, "--out", "new"],
        ["data/pretrain_chinchilla", "python data/prepare_data.py --stage pretrain"]),
    "nothing held out": (
        lambda: shutil.rmtree("corpus/validation"), ["eval", "--checkpoint", "run", "--data", "corpus/validation"],
        ["corpus/validation", "nothing was held out", "validation_share"]),
    "key without its block": (None, [*PRETRAIN, "--set", "d_model=8"], ["d_model is not", "nearest", "model.d_model"]),
    "corpus without manifest": (lambda: Path("corpus/manifest.json").unlink(), PRETRAIN, ["manifest.json", "--repair"]),
    "manifest is empty": (lambda: Path("corpus/manifest.json").write_text(""), PRETRAIN, ["corpus/manifest.json"]),
    "manifest is no JSON": (lambda: Path("corpus/manifest.json").write_text("{"), PRETRAIN, ["corpus/manifest.json"]),
    "empty corpus": (
        lambda: edit_manifest(shards=[], shard_count=0, total_tokens=0), PRETRAIN, ["corpus", "0 tokens"]),
    "corpus of one empty file": (
        lambda: Path("ids.bin").touch(), [*PRETRAIN, "--set", "data.train_data_path=ids.bin"], ["ids.bin", "0 bytes"]),
    "corpus file of odd size": (
        lambda: Path("ids.bin").write_bytes(b"1\x00345"), [*PRETRAIN, "--set", "data.train_data_path=ids.bin"],
        ["ids.bin", "5 bytes"]),
    "corpus is text": (
        lambda: Path("mine.txt").write_text("A text, naïve.\n" * 1000),
        [*PRETRAIN, "--set", "data.train_data_path=mine.txt"], ["mine.txt: it holds text", "`gpt-oss-lite prepare`"]),
    "corpus is JSON lines": (
        lambda: Path("mine.jsonl").write_text('{"text": "x"}\n'),
        [*PRETRAIN, "--set", "data.train_data_path=mine.jsonl"], ["mine.jsonl: it holds text", "prepare"]),
    "corpus shorter than a window": (
        lambda: np.arange(9, dtype="<u4").tofile("ids.bin"), [*PRETRAIN, "--set", "data.train_data_path=ids.bin"],
        ["ids.bin", "9 tokens", "17"]),
    "truncated shard": (
        lambda: Path("corpus/shard_00000.bin").write_bytes(b"1234"), PRETRAIN, ["corpus/shard_00000.bin", "4 bytes"]),
    "missing shard": (lambda: Path("corpus/shard_00000.bin").unlink(), PRETRAIN, ["corpus/shard_00000.bin"]),
    "EOS beyond the rows": (
        lambda: edit_manifest(eos_token_id=128009), PRETRAIN, ["eos_token_id is 128009", "64 rows"]),
    "pad beyond the rows": (lambda: edit_manifest(pad_token_id=64), PRETRAIN, ["pad_token_id is 64", "64 rows"]),
    "vocabulary of another tokenizer": (
        lambda: edit_manifest(vocab_size=128000), PRETRAIN, ["vocab_size is 128000", "64 rows"]),
    "vocabulary smaller than the corpus's": (
        None, [*PRETRAIN, "--set", "model.vocab_size=40"],
        ["corpus/manifest.json: vocab_size is 61, but", "model.vocab_size 40, model.padded_vocab_size 64",
         "Set model.vocab_size: 61"]),
    "vocabulary larger than the corpus's": (
        None, [*PRETRAIN, "--set", "model.vocab_size=62"], ["vocab_size is 61, but", "model.vocab_size 62"]),
    "id beyond the rows": (lambda: write_ids(64), PRETRAIN, ["corpus/shard_00001.bin", "id 64", "64 rows"]),
    "id beyond int32": (lambda: write_ids(2**32 - 1), PRETRAIN, ["corpus/shard_00001.bin", "4294967295"]),
    "another mixture": (
        None, [*PRETRAIN, "--set", "data.data_mix=other"],
        ["other", "tiny", "--set data.data_mix=tiny", "data.data_mix=null"]),
    "no validation": (
        lambda: shutil.rmtree("corpus/validation"), [*PRETRAIN, "--set", "training.eval_interval=1"],
        ["training.eval_interval", "validation"]),
    "run exists": (None, ["pretrain", "--config", "recipe.yaml", "--out", "run"], ["run", "--resume latest", "--out"]),
    "out is a file": (None, ["pretrain", "--config", "recipe.yaml", "--out", "recipe.yaml"], ["recipe.yaml"]),
    "nothing to resume": (None, ["pretrain", "--config", "recipe.yaml", "--resume", "latest"], ["recipe-NNN", "--out"]),
    "no such step": (
        None, ["pretrain", "--config", "recipe.yaml", "--out", "run", "--resume-from", "3"], ["run", "3"]),
    "two ways to resume": (
        None, [*PRETRAIN, "--resume-from", "3", "--auto-resume"], ["--resume-from", "--auto-resume"]),
    "recipe changed on resume": (
        None, ["pretrain", "--config", "recipe.yaml", "--out", "run", "--resume", "latest", "--set", "training.lr=0.5"],
        ["training.lr was 0.01, is 0.5", "--config run/config.yaml has the run's own"]),
    "corpus of the recipe is gone on resume": (
        None,
        ["pretrain", "--config", "recipe.yaml", "--out", "run", "--resume", "latest", "--set",
         "data.train_data_path=data/quickstart/pretrain_chinchilla"],
        ["run was started with other values: data.train_data_path was corpus, is data/quickstart/pretrain_chinchilla",
         "--config run/config.yaml has the run's own"]),
    "no run to start from": (None, [*PRETRAIN, "--init-from", "none"], ["none"]),
    "negative steps": (None, [*PRETRAIN, "--max-steps", "-1"], ["--max-steps is -1"]),
    "hours not finite": (None, [*PRETRAIN, "--max-hours", "nan"], ["--max-hours is nan"]),
    "seed out of range": (None, [*PRETRAIN, "--seed", "-1"], ["--seed is -1"]),
    "guard off": (None, [*PRETRAIN, "--set", "training.nan_guard=false"], ["--i-accept-no-nan-guard"]),
    "no checkpoint to sample": (None, ["generate", "--checkpoint", "none", "--prompt", "x"], ["none"]),
    "no step to sample": (None, ["generate", "--checkpoint", "run", "--step", "3", "--prompt", "x"], ["run", "3"]),
    "empty folder to sample": (
        lambda: Path("empty").mkdir(), ["generate", "--checkpoint", "empty", "--prompt", "x"], ["empty"]),
    "torn checkpoint": (
        lambda: Path("run/checkpoints/model_step_4.safetensors").write_bytes(b"x"),
        ["eval", "--checkpoint", "run", "--step", "4", "--data", "corpus"], ["model_step_4.safetensors"]),
    "no corpus to score": (None, ["eval", "--checkpoint", "run", "--data", "none"], ["none"]),
    "corpus of another model": (
        lambda: edit_manifest(eos_token_id=128009), ["eval", "--checkpoint", "run", "--data", "corpus"],
        ["eos_token_id is 128009"]),
    "no recipe to estimate": (None, ["estimate", "--config", "none.yaml"], ["none.yaml"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line_and_writes_nothing(name, work, capsys):
    damage, words, expected = CASES[name]
    if damage:
        damage()
    before = everything(work)
    assert run_app(cli.app, words, prog_name="gpt-oss-lite") == 2
    output = capsys.readouterr()
    error = output.err.splitlines()[-1]
    assert error.startswith("error: ")
    assert "Traceback" not in output.err
    assert sum(line.startswith("error") for line in output.err.splitlines()) == 1
    assert output.out == ""
    for part in expected:
        assert part in error
    assert everything(work) == before


@pytest.mark.parametrize(
    ("locked", "words", "expected"),
    [
        ("recipe.yaml", ["pretrain", "--config", "recipe.yaml"], "recipe.yaml"),
        ("corpus/shard_00000.bin", PRETRAIN, "shard_00000.bin"),
        ("corpus/manifest.json", PRETRAIN, "manifest.json: Permission denied"),
        (
            "readonly",
            ["pretrain", "--config", "recipe.yaml", "--out", "readonly/run"],
            "readonly/run: Permission denied",
        ),
        ("run/checkpoints/meta_step_4.json", ["generate", "--checkpoint", "run", "--prompt", "x"], "meta_step_4.json"),
    ],
)
def test_what_may_not_be_read_or_written_is_one_line(locked, words, expected, work):
    Path("readonly").mkdir()
    path = Path(locked)
    mode = path.stat().st_mode
    path.chmod(0o555 if path.is_dir() else 0)
    try:
        result = command_line.run("python", "-m", "gpt_oss_lite", *words, cwd=work, unprivileged=True)
    finally:
        path.chmod(mode)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert expected in result.stderr.splitlines()[-1]
    assert not any(Path("readonly").iterdir())
