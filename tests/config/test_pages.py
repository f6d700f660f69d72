"""The pages that are made from the code are current, and hold every key."""

import subprocess
import sys
from pathlib import Path

import pytest

from gpt_oss_lite.config import docs as made

ROOT = Path(__file__).parents[2]


def test_the_pages_are_current(monkeypatch):
    monkeypatch.chdir(ROOT)
    pages = made.pages()
    assert len(pages) >= 4
    for path, text in pages.items():
        assert path.read_text() == text, f"{path} is not current: run python -m gpt_oss_lite.config.docs"


def test_every_key_stands_on_the_page_with_a_meaning():
    page = made.configuration_page()
    for _, block in made.blocks():
        for key, field in block.model_fields.items():
            assert f"| `{key}` | " in page
            assert len(made.meaning(field)) > 10, key


@pytest.mark.parametrize("recipe", sorted(path.name for path in (ROOT / "configs").glob("*.yaml")))
def test_every_key_is_in_every_shipped_recipe_below_a_comment(recipe):
    lines = (ROOT / "configs" / recipe).read_text().splitlines()
    for _, block in made.blocks():
        for key in block.model_fields:
            (at,) = [number for number, line in enumerate(lines) if line.startswith(f"  {key}:")]
            assert lines[at - 1].startswith("  # ")
            assert lines[at - 1].endswith("]")


def test_sections_hold_each_key_once():
    for _, block in made.blocks():
        keys = [key for group in made.sections(block).values() for key in group]
        assert keys == list(block.model_fields)


def test_the_documented_command_rewrites_what_was_changed(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/a.yaml").write_text("# Mine.\nmodel: {}\ntraining: {lr: 1e-3}\ndata: {train_data_path: x}\n")
    command = [sys.executable, "-m", "gpt_oss_lite.config.docs"]
    subprocess.run(command, cwd=tmp_path, check=True, env={"PYTHONPATH": str(ROOT)})
    text = (tmp_path / "configs/a.yaml").read_text()
    assert text.startswith("# Mine.\n\n")
    assert "  # Peak learning rate. [number; default 4e-4; > 0]\n  lr: 0.001\n" in text
    assert (tmp_path / "docs/configuration.md").read_text() == made.configuration_page()
