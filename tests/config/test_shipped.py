"""Recipes that come with the package, by name."""

import re
from pathlib import Path

import pytest

from gpt_oss_lite.cli import app
from gpt_oss_lite.config import load_recipe
from gpt_oss_lite.config.shipped import shipped_recipes, summary
from gpt_oss_lite.training.layout import ONE_GPU, Layout
from gpt_oss_lite.training.memory import estimate_recipe, meta_model
from shared_data.console import run_app
from shared_data.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def test_a_recipe_is_known_by_its_name_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sorted(shipped_recipes()) == NAMES
    for name in NAMES:
        assert load_recipe(name) == load_recipe(CONFIGS / f"{name}.yaml")


def test_what_lies_in_the_working_folder_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("quickstart").write_text("model: {}\ntraining: {}\ndata: {train_data_path: mine}\n")
    assert load_recipe("quickstart").data.train_data_path == "mine"


@pytest.mark.parametrize("path", ["configs/quickstart.yaml", "quickstart.yaml"])
def test_a_path_that_only_a_checkout_has_is_answered_with_the_name(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=rf"^--config {path}: there is no such file; the recipe quickstart of the package is"
    ):
        load_recipe(path)


def test_a_name_that_is_no_recipe_is_answered_with_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^--config quickstrat: .* the nearest recipe of the package is quickstart \("):
        load_recipe("quickstrat")
    with pytest.raises(
        UserError, match=r"^--config nothing/like.yaml: there is no such file; `gpt-oss-lite recipes` li"
    ):
        load_recipe("nothing/like.yaml")


def test_a_folder_is_answered_with_a_file_in_it(tmp_path):
    with pytest.raises(UserError, match=rf"^--config {tmp_path}: it is a folder; .*, such as {tmp_path}/RECIPE.yaml$"):
        load_recipe(tmp_path)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match=rf", such as {tmp_path}/config\.yaml$"):
        load_recipe(tmp_path)


def test_recipes_lists_them_and_prints_one(capsys):
    assert run_app(app, ["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    assert lines == [f"{name:<27}  {summary(CONFIGS / f'{name}.yaml')}" for name in NAMES]
    assert all(len(line) <= 120 for line in lines)
    assert run_app(app, ["recipes", "quickstart"]) == 0
    assert capsys.readouterr().out == (CONFIGS / "quickstart.yaml").read_text()
    assert run_app(app, ["recipes", "quikstart"]) == 2
    assert capsys.readouterr().err == f"error: NAME is quikstart: it must be one of {', '.join(NAMES)}\n"


@pytest.mark.parametrize("name", NAMES)
def test_the_first_line_of_a_head_says_what_is_true(name):
    """For which machine a recipe is; where it says so, what of the model a token uses and the tokens of a run."""
    recipe, said = load_recipe(name), summary(CONFIGS / f"{name}.yaml")
    machine, _, _ = said.partition(": ")
    assert re.fullmatch(r"The CPU|One H200.*|(One GPU|Some GPUs|8 GPUs|A GPU) with \d+ GB.*", machine)
    gb = 141 if "H200" in machine else int((re.findall(r"with (\d+) GB", machine) or [1])[0])
    layout = Layout(8, recipe.training.parallelism) if machine.startswith("8 GPUs") else ONE_GPU
    device = "cpu" if machine == "The CPU" else "cuda"
    assert estimate_recipe(recipe, device_type=device, layout=layout).total_gb <= gb
    for active in re.findall(r"([\d.]+[MB]) active", said):
        count = meta_model(recipe.model).num_active_parameters()
        assert active in (f"{count / 1e6:.0f}M", f"{count / 1e9:.1f}B")
    for billions in re.findall(r"([\d.]+) B tokens", said):
        tokens = recipe.training.total_steps * recipe.training.windows_per_step * recipe.model.max_seq_len
        assert float(billions) == pytest.approx(tokens / 1e9, rel=0.02)


def test_a_list_of_recipes_is_wrapped_beside_the_names_in_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    assert run_app(app, ["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == NAMES
