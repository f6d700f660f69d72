"""The README's commands run as printed, in a folder that is as after `make demo`; long ones with small sizes added."""

import re
import shlex
from pathlib import Path

import command_line
import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

# What a long command is shortened by: the structure of the recipe stays, its sizes do not.
SHORTENED = {
    "gpt-oss-lite pretrain": command_line.settings(),
    "python training/pretrain.py": command_line.settings(
        train_data_path="data/quickstart/pretrain_chinchilla", data_mix="null"
    ),
    "python data/prepare_data.py": ["--dry-run"],
    "python scripts/": ["--help"],  # test_scripts.py runs them as printed
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def own_text() -> list[str]:
    """The commands that go from a folder of text to a run: each needs the one before."""
    (block,) = [block for block in blocks("bash") if "mine.yaml" in block]
    return block.splitlines()


def commands() -> list[str]:
    """The others, each of which runs by itself."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line not in own_text()]


def run_shortened(command: str, folder: Path):
    words = shlex.split(command)
    for start, more in SHORTENED.items():
        if command.startswith(start):
            words += more
    result = command_line.run(*words, cwd=folder, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with the repository's commands, the demo's corpus in small, and runs/demo."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("configs", "training", "scripts", "shared_data", "gpt_oss_lite"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "data").mkdir()
    (folder / "data/prepare_data.py").symlink_to(ROOT / "data/prepare_data.py")
    command_line.write_text_corpus(folder / "data/quickstart/pretrain_chinchilla", mixture="quickstart")
    result = command_line.run("gpt-oss-lite", "pretrain", "--config", "configs/quickstart.yaml", "--out", "runs/demo",
                              *command_line.settings(), cwd=folder)  # fmt: skip
    assert result.returncode == 0, result.stderr
    return folder


def test_there_are_commands_to_run():
    assert len(commands()) >= 10


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_readme_runs(command, work):
    run_shortened(command, work)


def test_the_road_from_a_folder_of_text_to_a_run(work):
    (mixture,) = blocks("yaml")
    (work / "mine.yaml").write_text(mixture)
    (work / "texts").mkdir()
    for number, page in enumerate(sorted((ROOT / "docs").glob("*.md"))):
        for part, text in enumerate(re.split(r"\n(?=## )", page.read_text())):
            (work / f"texts/{number}-{part}.txt").write_text(text)
    results = [run_shortened(command, work) for command in own_text()]
    assert "mine/pretrain_chinchilla/validation: 1 shard, " in results[1].stdout
    assert re.search(r"^texts +\d", results[-1].stdout, re.MULTILINE)


def test_the_makefile_has_the_targets_that_the_readme_names():
    targets = re.findall(r"^\$ make (\w+)", "".join(blocks("console")), re.MULTILINE)
    assert targets == ["venv", "demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_the_demo_lines_are_of_the_form_that_the_demo_prints():
    """Their figures are a real run's; `make demo` itself fails when the last value is above 0.85 of the first."""
    (lines,) = blocks("text")
    first, last = map(float, re.search(r"^val_bpb +first=(\S+) last=(\S+)$", lines, re.MULTILINE).groups())
    assert last <= 0.85 * first
    printed = re.findall(r"print\(f?\"(\w+)  ", (ROOT / "scripts/demo.py").read_text())
    assert [line.split()[0] for line in lines.splitlines() if line] == printed


def test_every_command_is_in_the_table():
    from gpt_oss_lite.cli import app

    names = {info.name or info.callback.__name__ for info in app.registered_commands}
    names |= {group.name for group in app.registered_groups}
    assert names == set(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE))
