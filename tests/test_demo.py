"""`make demo` in miniature: the same commands on less text and fewer steps. `.ci/run` runs the real one."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import command_line
import pytest

ROOT = Path(__file__).parents[1]
SMALL = ["--source-bytes", "60000", "--total-tokens", "12000"]
RECIPE = command_line.settings() + [
    word
    for setting in ("total_steps=24", "lr=0.1", "micro_batch_size=4", "eval_windows=8")
    for word in ("--set", f"training.{setting}")
]


def demo(folder: Path, *more: str):
    return command_line.run("python", ROOT / "scripts/demo.py", *SMALL, *RECIPE, *more, cwd=folder)


def times(folder: Path) -> dict[str, int]:
    """When each result of the demo was last written; locks and logs are no results."""
    kept = [*folder.glob("data/quickstart/sources/*"), *folder.glob("data/quickstart/pretrain_chinchilla/**/*")]
    kept += [folder / "runs/demo" / name for name in ("loss.svg", "samples.txt", "config.yaml")]
    kept += (folder / "runs/demo/checkpoints").iterdir()
    return {str(path): path.stat().st_mtime_ns for path in kept if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return folder, demo(folder)


def test_the_demo_walks_the_whole_road(finished):
    folder, result = finished
    assert result.returncode == 0, result.stderr
    first, last = map(float, re.search(r"^val_bpb +first=(\S+) last=(\S+)$", result.stdout, re.MULTILINE).groups())
    assert last <= 0.85 * first
    peak_gb = float(re.search(r"peak RSS of all processes (\S+) GB", result.stdout)[1])
    assert 0.3 < peak_gb < 6
    assert "stopped on purpose" in result.stderr
    assert "[resume] from step 12" in result.stderr
    rows = [json.loads(line) for line in (folder / "runs/demo/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 25))
    samples = (folder / "runs/demo/samples.txt").read_text()
    assert samples.count("--- temperature ") == 3
    assert samples in result.stdout
    plot = ElementTree.parse(folder / "runs/demo/loss.svg").getroot()
    assert plot.tag.endswith("svg")


def test_in_a_pipe_there_are_plain_lines_only(finished):
    _, result = finished
    for output in (result.stdout, result.stderr):
        assert "\r" not in output
        assert "\x1b" not in output


def test_a_second_demo_redoes_nothing_and_says_the_same(finished):
    folder, first = finished
    before = times(folder)
    again = demo(folder)
    assert again.returncode == 0, again.stderr
    assert times(folder) == before
    assert again.stdout.splitlines()[-1] == first.stdout.splitlines()[-1]


def test_a_command_that_fails_ends_the_demo_with_its_exit_code(finished):
    folder, _ = finished
    result = demo(folder, "--set", "training.lr=0.2")
    assert result.returncode == 2
    assert "training.lr was 0.1, is 0.2" in result.stderr
    assert "val_bpb" not in result.stdout
