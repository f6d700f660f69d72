"""Recipes that come with the package, by name."""

from pathlib import Path

import pytest

from gpt_oss_lite.cli import app
from gpt_oss_lite.config import load_recipe
from gpt_oss_lite.config.shipped import shipped_recipes
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
    assert all(len(line.split()) > 4 for line in lines)
    assert run_app(app, ["recipes", "quickstart"]) == 0
    assert capsys.readouterr().out == (CONFIGS / "quickstart.yaml").read_text()
    assert run_app(app, ["recipes", "quikstart"]) == 2
    assert capsys.readouterr().err == f"error: NAME is quikstart: it must be one of {', '.join(NAMES)}\n"
