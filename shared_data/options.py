"""The options that the pipeline's commands share, and how they become a stage's context."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from shared_data.config import DEFAULT_DATA_CONFIG, Mixture, PipelineConfig, load_mixture, load_universal_data_config
from shared_data.errors import UserError
from shared_data.executor import end_with_parent
from shared_data.layout import Layout
from shared_data.stage import Context
from shared_data.yaml_files import check_config

MixtureOption = Annotated[
    Path | None,
    typer.Option("--mixture", readable=False, help="Mixture file: sources and weights. Without it: gptoss-default."),
]
DataConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--data-config", readable=False, help="Pipeline settings. Without it: shared_data/config/data_config.yaml."
    ),
]
SourceOption = Annotated[
    list[str] | None, typer.Option("--source", metavar="ID", help="Only this source of the mixture; may be repeated.")
]
WorkersOption = Annotated[
    int | None, typer.Option(min=1, help="Processes. Without it: one per core that this process may use.")
]
DataRootOption = Annotated[
    Path, typer.Option(envvar="LLM_DATA_ROOT", readable=False, help="Folder of all that the pipeline writes.")
]
TotalTokensOption = Annotated[int | None, typer.Option(min=1, help="Training tokens of the corpus.")]
ShardSizeOption = Annotated[int | None, typer.Option(min=1, help="Tokens of a shard.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the report as JSON on standard output.")]


def make_context(
    mixture: Path | None,
    data_config: Path | None,
    data_root: Path,
    source: list[str] | None,
    workers: int | None,
    total_tokens: int | None = None,
    shard_size_tokens: int | None = None,
) -> Context:
    """Read the config files and apply the options.

    Raises:
        UserError: a file or an option is wrong.
    """
    mixed = load_mixture(mixture)
    config = load_universal_data_config(data_config)
    changes = {
        "total_tokens": total_tokens or config.total_tokens,
        "shard_size_tokens": shard_size_tokens or config.tokens_per_shard,
        "pack": {**config.pack.model_dump(), "docs_per_shard_target": None},
    }
    config_name = str(data_config or DEFAULT_DATA_CONFIG)
    config = check_config(PipelineConfig, {**config.model_dump(), **changes}, config_name)
    return Context(
        layout=Layout(data_root),
        mixture=mixed,
        config=config,
        sources=tuple(own for own in mixed.sources if own.id in _selected(source, mixed)),
        workers=workers or len(os.sched_getaffinity(0)),
        config_name=config_name,
    )


def _selected(wanted: list[str] | None, mixture: Mixture) -> set[str]:
    known = [source.id for source in mixture.sources]
    for name in wanted or ():
        if name not in known:
            raise UserError(f"--source is {name!r}: the mixture {mixture.name} has {', '.join(known)}")
    return set(wanted or known)


def run_stage(run: Callable[[Context], dict[str, Any]], context: Context, as_json: bool) -> None:
    """Run a stage with the data folder held, and print its report if asked."""
    end_with_parent()
    with context.layout.locked():
        report = run(context)
    if as_json:
        print(json.dumps(report, indent=2))
