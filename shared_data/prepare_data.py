"""The orchestrator: runs the four stages, each in its own process, from raw text to what training reads."""

import json
import os
import subprocess
import sys
from typing import Annotated, Literal

import typer

from shared_data import options
from shared_data.changes import refuse_another_corpus
from shared_data.console import run_app, say
from shared_data.estimate import estimate, show
from shared_data.executor import PARENT_PIPE_VARIABLE
from shared_data.page import write_page

STAGES = ("download_raw", "clean", "tokenize", "pack_shards")
REPORTS = ("download", "clean", "tokenize", "pack")


def run_module(name: str, arguments: list[str]) -> int:
    """Run a stage as `python -m`; it ends when this process does, however that happens."""
    reader, writer = os.pipe()
    environment = {**os.environ, PARENT_PIPE_VARIABLE: str(reader)}
    command = [sys.executable, "-m", f"shared_data.scripts.{name}", *arguments]
    try:
        with subprocess.Popen(command, env=environment, pass_fds=[reader], stdin=subprocess.DEVNULL) as stage:
            try:
                code = stage.wait()
            except KeyboardInterrupt:
                stage.wait()
                say(f"what the stage {name} has finished is kept: run the command again to go on")
                raise
    finally:
        os.close(reader)
        os.close(writer)
    if code < 0:
        say(f"error: the stage {name} was killed by signal {-code}; what it finished is kept, so run the command again")
        return 1
    return code


@options.takes_stage_options
def prepare(
    given: options.StageOptions,
    stage: Annotated[Literal["pretrain"], typer.Option(help="What to prepare data for.")] = "pretrain",
    skip_download: Annotated[bool, typer.Option("--skip-download", help="Use raw/ as it is.")] = False,
    skip_clean: Annotated[bool, typer.Option("--skip-clean", help="Use clean/ as it is.")] = False,
    skip_tokenize: Annotated[bool, typer.Option("--skip-tokenize", help="Use tokens/ as they are.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what to expect, and do nothing.")] = False,
    as_json: options.JsonOption = False,
) -> int:
    """Turn the sources of a mixture into shards: download, clean, tokenize, pack.

    What is already done is not done again, so that a run which was stopped or killed goes on where it was.
    """
    context = given.context()
    if dry_run:
        with context.naming_the_mixture():
            expected = estimate(context)
        show(expected)
        if as_json:
            print(json.dumps(expected, indent=2))
        return 0
    refuse_another_corpus(context)
    skipped = {"download_raw": skip_download, "clean": skip_clean, "tokenize": skip_tokenize}
    for name in STAGES:
        if skipped.get(name):
            continue
        code = run_module(name, given.words())
        if code == options.EXIT_OTHERS_NOT_DONE:
            share = f"job {given.task_index} of {given.task_count} has done its share for now"
            say(f"{share}; start it again when all have ended")
            return 0
        if code:
            return code
    say(f"page: {write_page(context)}")
    if as_json:
        reports = [context.layout.reports / f"{name}.json" for name in REPORTS]
        print(json.dumps([json.loads(path.read_bytes()) for path in reports if path.is_file()], indent=2))
    return 0


def main() -> int:
    """Run `prepare` on the command line's arguments; returns the exit code."""
    app = typer.Typer(add_completion=False)
    app.command()(prepare)
    return run_app(app)


if __name__ == "__main__":
    sys.exit(main())
