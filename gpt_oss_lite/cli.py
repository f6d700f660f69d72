"""The command line: gpt-oss-lite pretrain | generate | eval | prepare | verify | estimate.

A command reads its options, hands them to the one function that does the work, and prints its result; heavy modules
are imported inside, so that --help answers at once. Results go to standard output, everything else to standard error.
"""

import json
import logging
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from shared_data.console import run_app, say
from shared_data.errors import UserError
from shared_data.prepare_data import prepare
from shared_data.verify import verify

app = typer.Typer(
    help="GPT-OSS-Lite: pre-train a sparse mixture-of-experts language model, from raw text to samples.",
    epilog="Exit codes: 0 done, 1 failed, 2 bad input or usage, 3 stopped by a signal or time limit after a good save, "
    "4 stopped by the NaN guard. --debug anywhere shows the traceback of an error.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Config = Annotated[Path, typer.Option("--config", help="Recipe, a YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the recipe; may be repeated.")
]
Checkpoint = Annotated[Path, typer.Option("--checkpoint", help="Run folder, or its checkpoints folder.", show_default=False)]
Step = Annotated[int | None, typer.Option("--step", min=0, help="Step of the checkpoint; default the newest complete one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


class _SayHandler(logging.Handler):
    """Log lines go where the current standard error goes, also while a progress bar owns it."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Set up logging; without a command, show the help."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[_SayHandler()])
    if show_version:
        print(version("gpt-oss-lite"))
    elif context.invoked_subcommand is None:
        print(context.get_help())


def print_json(value: Any) -> None:
    """A result on standard output, for other programs."""
    print(json.dumps(value, indent=2, allow_nan=False, default=str))
