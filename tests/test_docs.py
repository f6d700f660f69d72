"""The documentation names only what exists, and what it tells to type works (see doc_commands.py)."""

import ast
import doctest
import importlib
import re
from pathlib import Path

import doc_commands
import pytest
import yaml
from doc_commands import Scene, blocks
from warm_commands import WarmCommands

from gpt_oss_lite.training.run_folder import FREE_ON_RESUME

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")])
RUN = [page for page in doc_commands.PAGES if page.name != "README.md" and blocks(page)]  # test_readme.py runs that


def by_name(page: Path) -> str:
    return page.name


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    with WarmCommands() as commands:
        scene = Scene(tmp_path_factory.mktemp("docs"), commands)
        scene.add_other_runs()
        yield scene


@pytest.mark.parametrize("page", RUN, ids=by_name)
def test_what_a_page_tells_to_type_works(page, scene):
    if page.name == "export.md":
        scene.add_stock_model()
    outputs = scene.run_page(page)
    if page.name == "export.md":
        assert any(text.startswith("import ") for code, text in outputs.items() if "from transformers" in code)


def test_there_are_commands_to_run():
    runnable = [command for command in doc_commands.all_commands() if command not in doc_commands.NOT_RUN]
    assert len(runnable) >= 40


def test_what_is_not_run_or_made_small_is_still_there():
    commands = doc_commands.all_commands()
    assert [text for text in doc_commands.NOT_RUN if text not in commands] == []
    for start in (*doc_commands.SMALLER, *doc_commands.EXIT_CODES):
        assert any(command.startswith(start) for command in commands), start


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_command_and_option_that_a_page_names_exists(page):
    commands = [command for block in blocks(page) for command in block.commands()]
    for command in [*commands, *doc_commands.inline_commands(page)]:
        assert list(doc_commands.unknown_parts(command)) == [], command


def test_an_unknown_part_of_a_command_is_seen():
    def unknown(command: str) -> list[str]:
        return list(doc_commands.unknown_parts(command))

    assert unknown("gpt-oss-lite pretrain --config x --sed 1") == ["--sed"]
    assert unknown("gpt-oss-lite checkpoints lst runs/demo") == ["no command lst"]
    assert unknown("python scripts/microbench_a100.py --sec-len 4096") == ["--sec-len"]
    assert unknown("python training/pretrain.py --sed 1") == ["--sed"]
    assert unknown("make demp") == ["make demp"]
    assert unknown("pip install 'gpt-oss-lite[data,trak]'") == ["extra trak"]
    assert unknown("python scripts/none.py") == ["scripts/none.py"]
    assert unknown("gpt-oss-lite eval --checkpoint RUN --data DIR --json") == []


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_code_stands_in_fences_of_a_known_language(page):
    text = page.read_text()
    assert {block.language for block in blocks(page)} <= doc_commands.LANGUAGES
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(blocks(page))
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"\n\n    \S.*", outside) == []


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_no_command_hides_in_a_block_of_text(page):
    for block in blocks(page):
        if block.language == "text":
            assert re.findall(rf"^{doc_commands.COMMAND_WORDS}.*", block.text, re.MULTILINE) == []


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_examples_in_yaml_load_and_those_of_the_interpreter_are_true(page):
    for block in blocks(page):
        if block.language == "yaml":
            assert all(yaml.safe_load_all(block.text))
        if block.language == "python" and ">>>" in block.text:
            test = doctest.DocTestParser().get_doctest(block.text, {}, page.name, str(page), 0)
            assert doctest.DocTestRunner().run(test).failed == 0


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


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_link_inside_the_repository_leads_somewhere(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    targets += re.findall(r'(?:src|srcset|href)="([^"]+)"', page.read_text())
    for target in targets:
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}"


def test_the_keys_that_may_change_on_the_way_are_those_of_the_code():
    text = (ROOT / "docs/training.md").read_text()
    (sentence,) = re.findall(r"^(`num_workers`[^.]*) may change freely\.", text, re.MULTILINE)
    assert {f"training.{key}" for key in re.findall(r"`(\w+)`", sentence)} == FREE_ON_RESUME


def test_the_events_of_a_run_are_those_that_the_code_writes():
    text = (ROOT / "docs/training.md").read_text()
    (cell,) = re.findall(r"^\| `events.jsonl` \| (.*); a history", text, re.MULTILINE)
    listed = set(re.findall(r"\w+", cell.replace("(once for each process)", ""))) - {"or"}
    calls = (
        call
        for path in (ROOT / "gpt_oss_lite/training").glob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "event"
    )
    names = {part.value for call in calls for part in kinds_of(call.args[0])}
    assert listed == names


def kinds_of(argument: ast.expr) -> list[ast.Constant]:
    """The texts that an event's name may be: one, or one of two."""
    parts = [argument.body, argument.orelse] if isinstance(argument, ast.IfExp) else [argument]
    assert all(isinstance(part, ast.Constant) for part in parts)
    return parts


def test_every_page_is_in_the_readmes_index():
    linked = re.findall(r"\]\(docs/(\w+\.md)\)", (ROOT / "README.md").read_text())
    assert {page.name for page in (ROOT / "docs").glob("*.md")} == set(linked)


# Not the table of paths: its left column names files that are not here.
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "paths.md"], ids=by_name)
def test_every_file_that_a_page_names_is_there(page):
    folders = "configs|scripts|gpt_oss_lite|shared_data|training|tests|docs"
    for name in re.findall(rf"`((?:{folders})/[\w./-]+\.\w+)`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
