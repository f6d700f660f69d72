"""The documentation names only what exists."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")])


def names_in_the_table_of_paths() -> list[str]:
    rows = [
        line.split(" | ")[-1] for line in (ROOT / "docs/paths.md").read_text().splitlines() if line.startswith("| ")
    ]
    return re.findall(r"`((?:gpt_oss_lite|shared_data|training)\.[\w.]+)`", "\n".join(rows))


def test_the_table_of_paths_has_names():
    assert len(names_in_the_table_of_paths()) > 12


@pytest.mark.parametrize("name", names_in_the_table_of_paths())
def test_every_name_in_the_table_of_paths_imports(name):
    module, attribute = name.rsplit(".", 1)
    assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


# Not the table of paths: its left column names files that are not here.
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "paths.md"], ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page):
    folders = "configs|scripts|gpt_oss_lite|shared_data|training|tests|docs"
    for name in re.findall(rf"`((?:{folders})/[\w./-]+\.\w+)`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
