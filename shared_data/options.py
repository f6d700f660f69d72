"""The options that the pipeline's commands share, and how they become a stage's context."""

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from shared_data.config import DEFAULT_DATA_CONFIG, Mixture, PipelineConfig, load_mixture, load_universal_data_config
from shared_data.console import say
from shared_data.errors import UserError
from shared_data.executor import OthersNotDone, Workers, end_with_parent
from shared_data.layout import Layout, TurnLock
from shared_data.stage import Context
from shared_data.yaml_files import check_config

# What a stage tells the orchestrator: our share is done, the next step needs the other jobs'.
EXIT_OTHERS_NOT_DONE = 75

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
ExecutorOption = Annotated[
    Literal["pool", "ray"],
    typer.Option("--executor", help="Processes of this machine, or tasks on Ray (see --ray-address)."),
]
RayAddressOption = Annotated[
    str | None,
    typer.Option(envvar="RAY_ADDRESS", metavar="ADDRESS", help="Ray cluster (auto, ...). Without it: this machine."),
]
TaskIndexOption = Annotated[
    int, typer.Option(min=0, metavar="I", help="Do only the tasks of job I of an array (see --task-count).")
]
TaskCountOption = Annotated[
    int, typer.Option(min=1, metavar="N", help="Jobs of the array; start all again until none has anything left to do.")
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
    workers: int | Workers | None,
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
        workers=workers if isinstance(workers, Workers) else make_workers(workers),
        config_name=config_name,
    )


def make_workers(
    count: int | None,
    executor: Literal["pool", "ray"] = "pool",
    ray_address: str | None = None,
    task_index: int = 0,
    task_count: int = 1,
) -> Workers:
    """Who does the tasks, as the options say.

    Raises:
        UserError: task_index is not below task_count.
    """
    if task_index >= task_count:
        raise UserError(f"--task-index is {task_index}: it must be below --task-count ({task_count}); it counts from 0")
    address = ray_address if executor == "ray" else None
    return Workers(count or len(os.sched_getaffinity(0)), executor, address, task_index, task_count)


def _selected(wanted: list[str] | None, mixture: Mixture) -> set[str]:
    known = [source.id for source in mixture.sources]
    for name in wanted or ():
        if name not in known:
            raise UserError(f"--source is {name!r}: the mixture {mixture.name} has {', '.join(known)}")
    return set(wanted or known)


def run_stage(run: Callable[[Context], dict[str, Any]], context: Context, as_json: bool) -> int:
    """Run a stage with the data folder held, and print its report if asked; returns the exit code.

    A job of an array shares the folder with the others, and ends with EXIT_OTHERS_NOT_DONE where it would need what
    they have not done yet.
    """
    end_with_parent()
    array = context.workers.task_count > 1
    with context.layout.locked(shared=array), TurnLock(context.layout.state) if array else nullcontext() as turn:
        try:
            report = run(replace(context, workers=replace(context.workers, turn=turn)))
        except OthersNotDone as waiting:
            say(str(waiting))
            return EXIT_OTHERS_NOT_DONE
    if as_json:
        print(json.dumps(report, indent=2))
    return 0
