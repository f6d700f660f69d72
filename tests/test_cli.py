"""The command line: help, usage errors, results on standard output, and what each command hands on."""

import json
import math
import re
from pathlib import Path

import command_line
import pytest

from gpt_oss_lite import cli
from gpt_oss_lite.options import print_json
from gpt_oss_lite.training import pretrain as training
from shared_data.console import run_app

ROOT = Path(__file__).parents[1]
RECIPE = str(ROOT / "configs/pretrain_a100_502m.yaml")
COMMANDS = [
    "pretrain", "generate", "eval", "passkey", "export", "import", "prepare", "verify", "estimate", "plan", "report",
    "monitor",
]  # fmt: skip


def gpt_oss_lite(*words: object) -> int:
    return run_app(cli.app, [str(word) for word in words], prog_name="gpt-oss-lite")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return command_line.write_text_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """A trained run, made by the command."""
    folder = tmp_path_factory.mktemp("work")
    recipe = command_line.write_recipe(folder / "recipe.yaml", corpus)
    assert gpt_oss_lite("pretrain", "--config", recipe, "--out", folder / "run", "--seed", "1") == 0
    return folder / "run"


@pytest.mark.parametrize("words", [[], ["--help"], *([command, "--help"] for command in COMMANDS)])
def test_help_at_every_level(words, capsys):
    assert gpt_oss_lite(*words) == 0
    output = capsys.readouterr()
    assert output.out.startswith("Usage: gpt-oss-lite")
    assert output.err == ""
    if len(words) < 2:
        assert all(f"  {command} " in output.out for command in COMMANDS)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["pretrian"], "pretrain"),
        (["pretrain", "--confg", "x"], "--config"),
        (["pretrain"], "--config"),
        (["pretrain", "--config", RECIPE, "--max-steps", "ten"], "--max-steps"),
        (["pretrain", "--config", RECIPE, "--resume", "newest"], "--resume"),
        (["pretrain", "--config", RECIPE, "extra"], "extra"),
        (["estimate", "--config", RECIPE, "--batch-size", "0"], "--batch-size"),
        (["generate", "--checkpoint", "x", "--prompt", "x", "--samples", "0"], "--samples"),
        (["--verson"], "--version"),
        (["prepare", "--total-tokens", "1e6"], "Invalid value for '--total-tokens': '1e6' should be a valid integer\n"),
        (["pretrain", "--config", RECIPE, "--resume-from", "x"], "'x' should be a valid integer\n"),
        (["pretrain", "--config", RECIPE, "--max-hours", "x"], "'x' should be a valid number\n"),
        (["estimate", "--config", RECIPE, "--batch-size", "0"], "'0' should be greater than or equal to 1\n"),
        (["prepare", "--stage", "finetune"], "Invalid value for '--stage': 'finetune' is not one of 'pretrain'"),
        (["pretrain"], "Missing option '--config'. See --help."),
        (["verify"], "Missing argument 'DIR...'. See --help."),
    ],
)
def test_a_wrong_word_is_one_line_and_exit_code_2(words, hint, capsys):
    assert gpt_oss_lite(*words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert hint in output.err


def test_debug_shows_the_traceback_of_an_error(capsys):
    assert gpt_oss_lite("estimate", "--config", RECIPE, "--set", "model.d_modle=1", "--debug") == 2
    assert "Traceback" in capsys.readouterr().err


def test_pretrain_hands_every_option_on(monkeypatch):
    seen = []
    monkeypatch.setattr(training, "pretrain", lambda options: seen.append(options) or 3)
    code = gpt_oss_lite(
        "pretrain", "--config", "a.yaml", "--out", "run", "--seed", "7", "--max-steps", "9", "--max-hours", "0.5",
        "--set", "training.lr=1e-3", "--set", "model.d_model=8", "--resume-from", "4", "--i-accept-no-nan-guard",
        "--allow-changed",
    )  # fmt: skip
    assert code == 3
    assert seen == [
        training.PretrainOptions(
            config=Path("a.yaml"), out=Path("run"), seed=7, max_steps=9, max_hours=0.5,
            overrides=["training.lr=1e-3", "model.d_model=8"], resume_from=4, accept_no_nan_guard=True,
            allow_changed=True,
        )
    ]  # fmt: skip
    gpt_oss_lite("pretrain", "--config", "a.yaml", "--resume", "latest")
    gpt_oss_lite("pretrain", "--config", "a.yaml", "--auto-resume", "--init-from", "other")
    assert seen[1:] == [
        training.PretrainOptions(config=Path("a.yaml"), resume_latest=True),
        training.PretrainOptions(config=Path("a.yaml"), auto_resume=True, init_from=Path("other")),
    ]


def test_every_field_of_the_options_has_an_option_on_the_command_line():
    import inspect

    parameters = set(inspect.signature(cli.pretrain).parameters)
    renamed = {"resume_latest": "resume"}
    fields = {renamed.get(name, name) for name in training.PretrainOptions.__dataclass_fields__}
    assert fields == parameters


def test_estimate_prints_the_described_figures(capsys):
    assert gpt_oss_lite("estimate", "--config", RECIPE, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["parameters"], result["active_parameters"]) == (502_033_248, 247_229_280)
    assert result["flops_per_token"] == 1_603_584_000
    assert sum(result["bytes"].values()) == result["total_bytes"]
    assert gpt_oss_lite("estimate", "--config", RECIPE, "--batch-size", "16", "--json") == 0
    assert json.loads(capsys.readouterr().out)["total_bytes"] > result["total_bytes"]
    assert gpt_oss_lite("estimate", "--config", RECIPE) == 0
    assert "parameters: 502,033,248, active per token: 247,229,280; 1,603,584,000 FLOP/token" in capsys.readouterr().out


def test_estimate_says_what_fits_below_the_parameters(capsys):
    assert gpt_oss_lite("estimate", "--config", RECIPE) == 0
    parameters = capsys.readouterr().out.splitlines()[0]
    assert gpt_oss_lite("estimate", "--config", RECIPE, "--gpu-gb", "24") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == parameters
    assert re.match(r"fits with: --set training\.micro_batch_size=\d+ --set ", lines[1])
    assert lines[2].startswith("the recipe has 8 x 4 windows, one block in 3 recomputed, ")
    assert lines[3].startswith("chosen: ")


def test_estimate_is_of_one_of_the_gpus_that_share_a_step(capsys):
    recipe = str(ROOT / "configs/pretrain_7b.yaml")  # parallelism: fsdp
    assert gpt_oss_lite("estimate", "--config", recipe, "--ranks", "64", "--json") == 0
    assert json.loads(capsys.readouterr().out)["bytes"]["weights (fp32)"] == 4 * 7_134_107_584 // 64
    assert gpt_oss_lite("estimate", "--config", recipe, "--ranks", "64", "--gpu-gb", "40", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["micro_batch_size"], found["gradient_accumulation_steps"]) == (1, 256)
    assert gpt_oss_lite("estimate", "--config", recipe, "--ranks", "3") == 2
    assert "--ranks is 3: it must divide the 256 windows of the recipe's step" in capsys.readouterr().err
    shared = ["--set", "training.parallelism=ddp", "--set", "training.expert_parallel_size=8"]
    assert gpt_oss_lite("estimate", "--config", recipe, "--ranks", "16", *shared, "--json") == 0
    assert json.loads(capsys.readouterr().out)["bytes"]["weights (fp32)"] == 4 * 1_585_043_392  # 2 of 16 experts each
    assert gpt_oss_lite("estimate", "--config", recipe, "--ranks", "4", *shared) == 2
    refused = "training.expert_parallel_size is 8: it must be a divisor of the number of ranks (4)"
    assert refused in capsys.readouterr().err


def test_generate_repeats_itself_with_a_seed_and_only_then(run, capsys):
    def text(*words):
        assert gpt_oss_lite("generate", "--checkpoint", run, "--prompt", "A sent", "--max-new-tokens", "8", *words) == 0
        return capsys.readouterr().out

    assert text("--seed", "1") == text("--seed", "1")
    assert text("--seed", "1") != text("--seed", "2")
    assert text("--temperature", "0") == text("--temperature", "0", "--seed", "5")
    assert text("--seed", "1").startswith("A sent")


def test_generate_as_json_has_each_sample(run, capsys):
    words = ["--prompt", "", "--max-new-tokens", "5", "--samples", "3", "--step", "2", "--seed", "0", "--json"]
    assert gpt_oss_lite("generate", "--checkpoint", run, *words) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["samples"]) == 3
    assert all(sample["tokens"] == 5 or sample["stopped"] for sample in result["samples"])
    assert len({sample["text"] for sample in result["samples"]}) == 3


def test_eval_scores_every_token_of_each_source(run, corpus, capsys):
    words = ["eval", "--checkpoint", run, "--data", corpus / "validation"]
    assert gpt_oss_lite(*words, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    manifest = json.loads((corpus / "validation/manifest.json").read_text())
    assert result["tokens"] == manifest["total_tokens"] - 1
    assert set(result["by_source"]) == {"prose", "code"}
    n_bytes = sum(source["bytes"] for source in manifest["sources"].values())
    assert result["bits_per_byte"] == pytest.approx(result["loss"] * result["tokens"] / math.log(2) / n_bytes)
    assert gpt_oss_lite(*words, "--batch-size", "1") == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table] == ["source", "code", "prose", "all"]
    assert float(table[-1].split()[1]) == pytest.approx(result["loss"], abs=1e-3)


def test_a_model_of_another_vocabulary_does_not_take_text(tmp_path, capsys):
    import tiny_run

    recipe = tiny_run.write_recipe(tmp_path / "r.yaml", tiny_run.make_corpus(tmp_path / "corpus"), total_steps=4)
    assert gpt_oss_lite("pretrain", "--config", recipe, "--out", tmp_path / "run") == 0
    capsys.readouterr()
    assert gpt_oss_lite("generate", "--checkpoint", tmp_path / "run", "--prompt", "x") == 2
    assert "the model has vocab_size 61 and 64 rows, but the tokenizer llama3 has vocab_size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--top-p", "1.5"], "--top-p is 1.5: it must be above 0"),
        (["--temperature", "-1", "--stream"], "--temperature is -1.0: it must be"),
        (["--max-new-tokens", "0"], "'--max-new-tokens': '0' should be greater than or equal to 1"),
        (["--max-new-tokens", "1000"], "the prompt has 2 tokens and --max-new-tokens is 1000: together"),
    ],
)
def test_an_error_of_sampling_names_the_option(run, words, message, capsys):
    assert gpt_oss_lite("generate", "--checkpoint", run, "--prompt", "x", *words) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_what_is_not_finite_is_null_in_json(capsys):
    print_json({"perplexity": math.inf, "by": [{"loss": math.nan}], "n": 1})
    assert json.loads(capsys.readouterr().out) == {"perplexity": None, "by": [{"loss": None}], "n": 1}


@pytest.mark.parametrize("start", [["training/pretrain.py"], ["data/prepare_data.py"], ["-m", "gpt_oss_lite"]])
def test_a_python_without_the_packages_says_what_to_do(start):
    result = command_line.run("python", "-S", *start, "--help")  # -S: nothing of site-packages
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "`make venv`" in result.stderr
    assert "has no package gpt_oss_lite" not in result.stderr


def test_module_script_and_command_are_one(tmp_path):
    helps = [
        command_line.run("python", "-m", "gpt_oss_lite", "pretrain", "--help"),
        command_line.run("python", "training/pretrain.py", "--help"),
        command_line.run("python", ROOT / "training/pretrain.py", "--help", cwd=tmp_path, PYTHONPATH=""),
    ]
    assert [result.returncode for result in helps] == [0, 0, 0]
    assert len({result.stdout for result in helps}) == 1
    assert "Usage: gpt-oss-lite pretrain" in helps[0].stdout
    version = command_line.run("python", "-m", "gpt_oss_lite", "--version")
    assert version.stdout.strip() == "0.1.0"
