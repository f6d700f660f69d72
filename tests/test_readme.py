"""The README's commands run in order, as printed, in a folder that is as after `make demo`; long ones with small sizes
added (see doc_commands.py). Its figures and its picture are a real run's."""

import re
import time
from pathlib import Path

import pytest
from doc_commands import Scene, blocks
from warm_commands import WarmCommands

from shared_data.config import PipelineConfig
from shared_data.yaml_files import check_config, parse_yaml

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "README.md"
README = PAGE.read_text()


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    with WarmCommands() as commands:
        yield Scene(tmp_path_factory.mktemp("readme"), commands)


def test_its_commands_run_in_order(scene, capsys):
    scene.add_own_text()
    started = time.perf_counter()
    outputs = scene.run_page(PAGE)
    with capsys.disabled():
        print(f"\nREADME.md: {len(outputs)} commands in {time.perf_counter() - started:.0f} s")
    assert len(outputs) >= 15
    verified = outputs["gpt-oss-lite verify data/mine/pretrain_chinchilla"]
    assert "mine/pretrain_chinchilla/validation: 1 shard, " in verified
    scores = outputs["gpt-oss-lite eval --checkpoint runs/mine --data data/mine/pretrain_chinchilla/validation"]
    assert re.search(r"^texts +\d", scores, re.MULTILINE)


def test_the_makefile_has_the_targets_that_the_readme_names():
    lines = [command for block in blocks(PAGE) if block.language == "console" for command in block.commands()]
    assert [line.split()[:2] for line in lines] == [["make", "venv"], ["make", "demo"], ["make", "test"]]


def test_the_demo_lines_are_of_the_form_that_the_demo_prints():
    """Their figures are a real run's; `make demo` itself fails when the last value is above 0.85 of the first."""
    (lines,) = [block.text for block in blocks(PAGE) if block.language == "text" and "val_bpb" in block.text]
    first, last = map(float, re.search(r"^val_bpb +first=(\S+) last=(\S+)$", lines, re.MULTILINE).groups())
    assert last <= 0.85 * first
    printed = re.findall(r"print\(f?\"(\w+)  ", (ROOT / "scripts/demo.py").read_text())
    assert [line.split()[0] for line in lines.splitlines() if line] == printed


def test_each_page_is_listed_once():
    listed = re.findall(r"\]\(docs/(\w+\.md)\)", README.split("\n## More\n")[1])
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_the_setting_that_leaves_out_passkeys_does():
    (setting,) = re.findall(r"`(pack: .*?)` leaves them out", README)
    config = check_config(PipelineConfig, parse_yaml(setting, "README.md"), "README.md")
    assert config.pack.long_context.share == 0
    assert PipelineConfig().pack.long_context.share == 0.1  # "a tenth"


def test_its_pictures_are_small_and_whole():
    pictures = [ROOT / path for path in re.findall(r'(?:src|srcset)="(docs/images/[^"]+)"', README)]
    assert pictures
    for picture in pictures:
        content = picture.read_bytes()
        assert content.startswith(b"\x89PNG\r\n")
        assert content.endswith(b"IEND\xaeB`\x82")
        assert len(content) < 300_000


def test_every_command_is_in_the_table():
    from gpt_oss_lite.cli import app

    names = {info.name or info.callback.__name__ for info in app.registered_commands}
    names |= {group.name for group in app.registered_groups}
    assert names == set(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE))


def test_the_row_of_a_group_names_each_of_its_commands():
    from gpt_oss_lite.cli import app

    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", README, re.MULTILINE))
    for group in app.registered_groups:
        for info in group.typer_instance.registered_commands:
            assert (info.name or info.callback.__name__) in rows[group.name]
