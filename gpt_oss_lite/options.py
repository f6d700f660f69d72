"""What the commands share: options that mean the same everywhere, and how a result is printed as JSON."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

Config = Annotated[
    Path, typer.Option("--config", help="Recipe: a YAML file, or a name of `gpt-oss-lite recipes`.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the recipe (training.lr=3e-4); repeatable."),
]
Checkpoint = Annotated[
    Path, typer.Option("--checkpoint", metavar="RUN", help="Run folder, or its checkpoints/.", show_default=False)
]
Step = Annotated[
    int | None, typer.Option("--step", min=0, help="Step of the checkpoint. Default: the newest complete one.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def print_json(value: Any) -> None:
    """Print a result on standard output for other programs. JSON has no infinity and no NaN: they become null."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
