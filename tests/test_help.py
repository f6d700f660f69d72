"""Every command, at every level, says what it does and what each of its options is."""

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from gpt_oss_lite.cli import app
from shared_data import options

ROOT = Path(__file__).parents[1]
# Scripts that take words alone, and say so at their top; and what is no command.
WITHOUT_OPTIONS = {"bench_datatrove"}
STAGES = ("download_raw", "clean", "tokenize", "pack_shards")
SCRIPTS = sorted(
    path.stem
    for path in (ROOT / "scripts").glob("*.py")
    if '__name__ == "__main__"' in path.read_text() and path.stem not in WITHOUT_OPTIONS
)


def silent_parts(command: Any, name: str) -> Iterator[str]:
    """The commands and options below a command that have no help text."""
    if not (command.help or "").strip():
        yield name
    for parameter in command.params:
        if not (parameter.help or "").strip() and not parameter.hidden:
            yield f"{name} {parameter.opts[0]}"
    for word, below in (getattr(command, "commands", None) or {}).items():
        yield from silent_parts(below, f"{name} {word}")


def test_every_command_and_option_of_the_command_line_has_help():
    command = get_command(app)
    assert len(command.commands) >= 16
    assert list(silent_parts(command, "gpt-oss-lite")) == []


@pytest.mark.parametrize("stage", STAGES)
def test_every_option_of_a_stage_has_help(stage, monkeypatch):
    seen = []
    monkeypatch.setattr(options, "run_app", lambda app, prog_name, **_: seen.append((prog_name, get_command(app))) or 0)
    module = importlib.import_module(f"shared_data.scripts.{stage}")
    assert options.stage_main(module.run, stage) == 0
    ((name, command),) = seen
    assert name == f"python -m shared_data.scripts.{stage}"
    assert list(silent_parts(command, stage)) == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_option_of_a_script_has_help(script):
    module = importlib.import_module(script)
    assert list(silent_parts(get_command(module.app), script)) == []


def test_what_is_silent_is_seen():
    silent = typer.Typer()
    group = typer.Typer()
    group.command("one")(lambda x=1: None)
    silent.add_typer(group, name="group", help="A group.")

    @silent.command()
    def two(path: str) -> None:
        """Two."""

    assert set(silent_parts(get_command(silent), "c")) == {"c", "c group one", "c group one --x", "c two path"}
