"""Bad input to a training run: one line that names what is wrong and what is allowed, exit code 2, nothing written."""

import dataclasses
import json

import numpy as np
import pytest
import tiny_run
import typer
import yaml

from gpt_oss_lite.training.pretrain import PretrainOptions, pretrain
from shared_data.console import run_app


@pytest.fixture
def corpus(tmp_path):
    return tiny_run.make_corpus(tmp_path / "corpus")


@pytest.fixture
def options(tmp_path, corpus):
    recipe = tiny_run.write_recipe(tmp_path / "tiny.yaml", corpus, total_steps=4, save_interval=2)
    return PretrainOptions(config=recipe, out=tmp_path / "run", seed=1)


def command(options):
    """Run as the command line does: exit code of `pretrain`, errors as one line."""
    app = typer.Typer()

    @app.command()
    def go() -> None:
        raise typer.Exit(pretrain(options))

    return run_app(app, [])


def assert_refused(options, capsys, *words):
    """The command exits with 2 and one line that has all of the words; no run folder appears."""
    existed = options.out is not None and options.out.exists()
    capsys.readouterr()
    assert command(options) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0], (word, lines[0])
    assert options.out is None or options.out.exists() == existed


def edit_manifest(corpus, **changes):
    path = corpus / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eos_token_id": 128009}, ["eos_token_id is 128009", "64 rows", "padded_vocab_size"]),
        ({"pad_token_id": 64}, ["pad_token_id is 64", "64 rows"]),
        ({"vocab_size": 128000}, ["vocab_size is 128000", "64 rows"]),
    ],
)
def test_manifest_against_model(options, corpus, capsys, changes, words):
    edit_manifest(corpus, **changes)
    assert_refused(options, capsys, "manifest.json", *words)


def test_ids_out_of_range_are_found_before_the_first_step(options, corpus, capsys):
    shard = sorted(corpus.glob("shard_*.bin"))[-1]
    ids = np.fromfile(shard, "<u4")
    ids[7] = 4_000_000_000
    ids.tofile(shard)
    assert_refused(options, capsys, shard.name, "token id 4000000000", "64 rows")


def with_data(options, tmp_path, **data):
    recipe = yaml.safe_load(options.config.read_text())
    recipe["data"] |= data
    options.config.write_text(yaml.safe_dump(recipe))
    return options


def test_missing_corpus_names_the_command_that_prepares_it(options, tmp_path, capsys):
    assert_refused(
        with_data(options, tmp_path, train_data_path=str(tmp_path / "none")), capsys, "none", "data/prepare_data.py"
    )


def test_empty_corpus_folder(options, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert_refused(with_data(options, tmp_path, train_data_path=str(tmp_path / "empty")), capsys, "manifest.json")


def test_corpus_shorter_than_a_window(options, tmp_path, capsys):
    (tmp_path / "short.bin").write_bytes(b"\0" * 64)
    assert_refused(
        with_data(options, tmp_path, train_data_path=str(tmp_path / "short.bin")), capsys, "16 tokens", "takes 17"
    )


def test_another_mixture_than_the_recipe_names(options, tmp_path, capsys):
    assert_refused(
        with_data(options, tmp_path, data_mix="gptoss-default"), capsys, "'gptoss-default'", "'tiny'", "prose, code"
    )
    assert command(with_data(options, tmp_path, data_mix="tiny")) == 0


def test_a_mixture_cannot_be_checked_without_a_manifest(options, tmp_path, capsys):
    (tmp_path / "tokens.bin").write_bytes(b"\0" * 400)
    assert_refused(
        with_data(options, tmp_path, train_data_path=str(tmp_path / "tokens.bin"), data_mix="tiny"),
        capsys,
        "no manifest",
    )


def test_evaluation_without_validation_data(options, tmp_path, capsys):
    (tmp_path / "tokens.bin").write_bytes(b"\0" * 400)
    options = with_data(options, tmp_path, train_data_path=str(tmp_path / "tokens.bin"))
    assert_refused(
        dataclasses.replace(options, overrides=["training.eval_interval=2"]), capsys, "training.eval_interval is 2",
        "data.validation_data_path",
    )  # fmt: skip


def test_document_mask_without_a_manifest(options, tmp_path, capsys):
    (tmp_path / "tokens.bin").write_bytes(b"\0" * 400)
    options = with_data(options, tmp_path, train_data_path=str(tmp_path / "tokens.bin"))
    assert_refused(
        dataclasses.replace(options, overrides=["model.document_mask=true"]), capsys, "document_mask", "manifest"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"overrides": ["training.nan_guard=false"]}, ["training.nan_guard is false", "--i-accept-no-nan-guard"]),
        ({"overrides": ["model.dtype=fp16"]}, ["fp16", "bf16"]),
        ({"overrides": ["training.lrr=1e-3"]}, ["lrr", "lr"]),
        ({"seed": -1}, ["--seed is -1", "4294967295"]),
        ({"seed": 2**32}, ["--seed is 4294967296"]),
        ({"max_steps": 0}, ["--max-steps is 0"]),
        ({"max_hours": -1.0}, ["--max-hours is -1"]),
        ({"max_hours": float("nan")}, ["--max-hours is nan"]),
        ({"resume_from": 3, "auto_resume": True}, ["--resume-from", "choose one"]),
        ({"resume_latest": True}, ["holds no run"]),
        ({"resume_from": 3}, ["holds no run"]),
    ],
)
def test_options(options, capsys, changes, words):
    assert_refused(dataclasses.replace(options, **changes), capsys, *words)


def test_init_from_a_folder_that_is_no_run(options, tmp_path, capsys):
    assert_refused(dataclasses.replace(options, init_from=tmp_path / "none"), capsys, "none: no such run folder")


def test_an_existing_run_is_refused_with_the_two_ways_on(options, capsys):
    assert command(options) == 0
    before = (options.out / "metrics.jsonl").read_bytes()
    assert_refused(options, capsys, "already holds a run", "--resume latest", "another")
    assert (options.out / "metrics.jsonl").read_bytes() == before


def test_a_folder_of_other_things_is_refused(options, tmp_path, capsys):
    options.out.mkdir()
    (options.out / "thesis.tex").write_text("x")
    assert_refused(options, capsys, "not an empty folder")
    assert_refused(dataclasses.replace(options, out=options.config), capsys, "not an empty folder")


def test_resuming_with_another_recipe_seed_or_corpus_names_each_field(options, corpus, tmp_path, capsys):
    assert command(dataclasses.replace(options, max_steps=2)) == 0
    resumed = dataclasses.replace(options, resume_latest=True)
    assert_refused(
        dataclasses.replace(resumed, seed=2, overrides=["training.lr=3e-3", "model.aux_x=1"]), capsys, "aux_x"
    )  # an unknown key comes first
    assert_refused(
        dataclasses.replace(resumed, seed=2, overrides=["training.lr=3e-3", "training.grad_clip=0.5"]), capsys,
        "training.lr was 0.01, is 0.003", "training.grad_clip was 1.0, is 0.5", "--seed was 1, is 2", "--allow-changed",
    )  # fmt: skip
    tiny_run.make_corpus(tmp_path / "other", seed=9)
    (tmp_path / "kept").mkdir()
    corpus.rename(tmp_path / "kept" / "corpus")
    (tmp_path / "other").rename(corpus)
    assert_refused(resumed, capsys, "corpus's sha256 was")
    assert command(dataclasses.replace(resumed, allow_changed=True)) == 0


@pytest.mark.parametrize(("first", "then"), [("muon", "adamw"), ("adamw", "muon")])
def test_resuming_with_another_optimizer_is_refused_also_where_changes_are_allowed(options, capsys, first, then):
    first, then = f"training.optimizer={first}", f"training.optimizer={then}"
    assert command(dataclasses.replace(options, max_steps=2, overrides=[first])) == 0
    resumed = dataclasses.replace(options, resume_latest=True, allow_changed=True, overrides=[then])
    assert_refused(resumed, capsys, "whose moments", f"start a new run with --init-from {options.out}")
    fresh = dataclasses.replace(options, out=options.out.parent / "fresh", init_from=options.out, overrides=[then])
    assert command(fresh) == 0


def test_resuming_with_other_loader_workers_is_no_change(options):
    assert command(dataclasses.replace(options, max_steps=2)) == 0
    assert command(dataclasses.replace(options, resume_latest=True, overrides=["training.num_workers=1"])) == 0


def test_resuming_from_a_step_that_is_not_there(options, capsys):
    assert command(options) == 0
    assert_refused(
        dataclasses.replace(options, resume_from=3), capsys, "no complete checkpoint of step 3", "complete: 2, 4"
    )


def test_a_damaged_run_record(options, capsys):
    assert command(options) == 0
    before = (options.out / "run.json").read_text()
    (options.out / "run.json").write_text("{")
    for path in (options.out / "checkpoints").glob("rng_*"):
        path.rename(f"{path}.away")
    capsys.readouterr()
    assert command(dataclasses.replace(options, resume_latest=True)) == 2
    *warnings, error = capsys.readouterr().err.splitlines()
    assert "error: " in error
    assert "run.json is damaged" in error
    assert len(warnings) == 2
    assert all("rng_step_" in line for line in warnings)
    for path in (options.out / "checkpoints").glob("*.away"):
        path.rename(path.with_suffix(""))
    assert command(dataclasses.replace(options, resume_latest=True, max_steps=5)) == 0
    assert "run.json is damaged" in capsys.readouterr().err
    assert (options.out / "run.json").read_text() == before


@pytest.mark.parametrize("name", ["config.yaml", "run.json"])
def test_a_flipped_digit_in_a_runs_own_files_is_never_taken(options, capsys, name):
    """A digit of the seed or of the rate: still valid JSON and YAML, and another run."""
    assert command(options) == 0
    path = options.out / name
    before = path.read_text()
    changed = before.replace('"seed": 1,', '"seed": 2,').replace("lr: 0.01", "lr: 0.02")
    assert changed != before
    path.write_text(changed)
    assert command(dataclasses.replace(options, resume_latest=True, max_steps=6)) == 0
    assert f"{name} is" in capsys.readouterr().err
    assert path.read_text() == before


class TestRunFolders:
    def test_without_out_a_run_takes_the_next_free_number_and_resuming_the_highest(
        self, options, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.chdir(tmp_path)
        options = dataclasses.replace(options, out=None, max_steps=1)
        assert_refused(dataclasses.replace(options, resume_latest=True), capsys, "runs/tiny-NNN")
        assert command(dataclasses.replace(options, auto_resume=True)) == 0  # nothing yet: starts the first
        assert command(options) == 0
        (tmp_path / "runs" / "tiny-old-007").mkdir()
        (tmp_path / "runs" / "tiny-009").mkdir()
        (tmp_path / "runs" / "tiny-009").rmdir()
        assert command(options) == 0
        assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
            "tiny-001", "tiny-002", "tiny-003", "tiny-old-007",
        ]  # fmt: skip
        for resume in ({"resume_latest": True}, {"auto_resume": True}, {"resume_from": 1}):
            steps = {"resume_latest": 2, "auto_resume": 3, "resume_from": 4}[next(iter(resume))]
            assert command(dataclasses.replace(options, max_steps=steps, **resume)) == 0
        assert [row["step"] for row in tiny_run.rows(tmp_path / "runs" / "tiny-003")] == [1, 2, 3, 4]
        assert len(tiny_run.rows(tmp_path / "runs" / "tiny-002")) == 1

    def test_the_recipe_as_resolved_makes_the_same_run(self, options, tmp_path):
        options = dataclasses.replace(options, overrides=["training.lr=5e-3"])
        assert command(options) == 0
        again = PretrainOptions(config=options.out / "config.yaml", out=tmp_path / "again", seed=1)
        assert command(again) == 0
        assert tiny_run.rows(tmp_path / "again") == tiny_run.rows(options.out)

    def test_a_run_without_a_seed_records_the_one_it_drew(self, options, tmp_path):
        assert command(dataclasses.replace(options, seed=None)) == 0
        seed = json.loads((options.out / "run.json").read_text())["seed"]
        assert command(dataclasses.replace(options, seed=seed, out=tmp_path / "again")) == 0
        assert tiny_run.rows(tmp_path / "again") == tiny_run.rows(options.out)

    def test_a_second_process_in_one_run_is_refused(self, options, capsys):
        first = tiny_run.start_run(
            config=options.config, out=options.out, seed=1, overrides=["training.total_steps=100000"]
        )
        try:
            tiny_run.kill_after_step(first, options.out, 2, how=0)
            second = dataclasses.replace(options, auto_resume=True, overrides=["training.total_steps=100000"])
            assert_refused(second, capsys, "another process is training in this run")
        finally:
            first.kill()
            tiny_run.finish(first)
