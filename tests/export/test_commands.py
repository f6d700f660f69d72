"""The commands export and import, and generate and passkey as people use them on what they made."""

import io
import json
from pathlib import Path

import command_line
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssForCausalLM

from gpt_oss_lite import cli
from shared_data.console import run_app


def gpt_oss_lite(*words: object) -> int:
    return run_app(cli.app, [str(word) for word in words], prog_name="gpt-oss-lite")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    corpus = command_line.write_text_corpus(folder / "corpus")
    recipe = command_line.write_recipe(folder / "recipe.yaml", corpus, eval_interval=4)
    assert gpt_oss_lite("pretrain", "--config", recipe, "--out", folder / "run", "--seed", "1") == 0
    return folder / "run"


def test_a_run_goes_to_transformers_and_says_how(run, tmp_path, capsys):
    assert gpt_oss_lite("export", "--checkpoint", run, "--out", tmp_path / "hf") == 0
    said = capsys.readouterr().out
    assert f'load it: AutoModelForCausalLM.from_pretrained("{tmp_path}/hf", trust_remote_code=True)' in said
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    words = model.generate(**tokenizer("One two", return_tensors="pt"), max_new_tokens=5)
    assert tokenizer.decode(words[0], skip_special_tokens=True).startswith("One two")
    corpus = json.loads((run / "run.json").read_text())["corpus"]
    card = (tmp_path / "hf/README.md").read_text()
    assert corpus["sha256"] in card
    assert "held-out bits per byte at step 4" in card
    assert "yarn_scale_factor: 4.0" in card


def test_an_export_in_place_of_a_run_is_called_one(run, tmp_path, capsys):
    assert gpt_oss_lite("export", "--checkpoint", run, "--out", tmp_path / "hf") == 0
    capsys.readouterr()
    assert gpt_oss_lite("generate", "--checkpoint", tmp_path / "hf", "--prompt", "x") == 2
    expected = f"error: {tmp_path}/hf is an export, which transformers loads; name the run that it was made of\n"
    assert capsys.readouterr().err == expected


def test_export_in_json_and_in_parts(run, tmp_path, capsys):
    words = [
        "export",
        "--checkpoint",
        run,
        "--step",
        "2",
        "--out",
        tmp_path / "hf",
        "--max-shard-gb",
        "0.001",
        "--json",
    ]
    assert gpt_oss_lite(*words) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["layout"] == "gpt_oss_lite"
    assert "model.safetensors.index.json" in done["files"]
    assert "| step | 2 |" in (tmp_path / "hf/README.md").read_text()
    assert gpt_oss_lite(*words) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/hf is there already: choose another --out, or remove it\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-shard-gb", "nan"], "--max-shard-gb is nan: it must be finite and above 0"),
        (["--max-shard-gb", "0"], "--max-shard-gb is 0"),
        (["--rope-scale", "nan"], "the RoPE scale is nan: it must lie between 1 and"),
        (["--step", "3"], "has no complete checkpoint of step 3 (complete: 2, 4)"),
    ],
)
def test_what_export_refuses_is_one_line_and_leaves_nothing(run, tmp_path, words, message, capsys):
    assert gpt_oss_lite("export", "--checkpoint", run, "--out", tmp_path / "hf", *words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_stock_model_comes_in_goes_on_training_and_goes_out(run, tmp_path, capsys):
    command_line.write_stock_model(tmp_path / "stock")
    words = ["import", "--from", tmp_path / "stock", "--out", tmp_path / "run", "--vocab-size", "128000"]
    assert gpt_oss_lite(*words) == 0
    assert f"--config {tmp_path}/run/config.yaml --init-from {tmp_path}/run" in capsys.readouterr().out
    small = [f"training.{key}={value}".replace("False", "false") for key, value in
             command_line.TRAINING_SETTINGS.items()]  # fmt: skip
    small += [f"data.train_data_path={run.parent / 'corpus'}"]
    settings = [word for pair in small for word in ("--set", pair)]
    train = ["pretrain", "--config", tmp_path / "run/config.yaml", "--init-from", tmp_path / "run", "--out"]
    assert gpt_oss_lite(*train, tmp_path / "more", *settings) == 0
    assert gpt_oss_lite("export", "--checkpoint", tmp_path / "more", "--out", tmp_path / "hf") == 0
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "hf")) is GptOssForCausalLM
    assert gpt_oss_lite(*words) == 2


def test_generate_streams_and_reads_lines(run, capsys, monkeypatch):
    command = ["generate", "--checkpoint", run, "--max-new-tokens", "4", "--temperature", "0"]
    assert gpt_oss_lite(*command, "--prompt", "One two") == 0
    plain = capsys.readouterr()
    assert "tokens/s" in plain.err
    assert gpt_oss_lite(*command, "--prompt", "One two", "--stream") == 0
    assert capsys.readouterr().out == plain.out
    monkeypatch.setattr("sys.stdin", io.StringIO("One two\n"))
    assert gpt_oss_lite(*command) == 0
    assert capsys.readouterr().out == plain.out
    assert gpt_oss_lite(*command, "--prompt", "One two", "--json", "--repetition-penalty", "1.5", "--min-p", "0.1") == 0
    assert json.loads(capsys.readouterr().out)["tokens_per_s"] > 0
    for wrong in (["--stream", "--prompt", "x", "--json"], ["--samples", "2"]):
        assert gpt_oss_lite(*command, *wrong) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_passkeys_as_table_picture_and_json(run, tmp_path, capsys):
    command = ["passkey", "--checkpoint", run, "--length", "40", "--length", "64", "--depths", "3", "--trials", "1"]
    assert gpt_oss_lite(*command, "--plot", tmp_path / "map.svg", "--data", run.parent / "corpus") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["length", "depth", "found", "nats/token"]
    assert [line.split()[:2] for line in lines[1:]] == [
        [length, depth] for length in ("40", "64") for depth in ("0%", "50%", "100%")
    ]
    assert "Passkeys found: run<" in (tmp_path / "map.svg").read_text()
    assert gpt_oss_lite(*command, "--json") == 0
    cells = json.loads(capsys.readouterr().out)
    assert [cell["accuracy"] for cell in cells] == [0.0] * 6
    assert gpt_oss_lite(*command, "--plot", tmp_path / "map.pdf") == 2
    assert "must end in .png or .svg" in capsys.readouterr().err
