"""The options that the pipeline's commands share, in one place, and how they become a stage's context."""

import dataclasses
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from shared_data.config import (
    DEFAULT_DATA_CONFIG,
    DEFAULT_MIXTURE,
    Mixture,
    PipelineConfig,
    load_mixture,
    load_universal_data_config,
)
from shared_data.console import run_app, say
from shared_data.errors import UserError
from shared_data.executor import PARENT_PIPE_VARIABLE, OthersNotDone, Workers, end_with_parent
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
DataRootOption = Annotated[
    Path, typer.Option(envvar="LLM_DATA_ROOT", readable=False, help="Folder of all that the pipeline writes.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the report as JSON on standard output.")]


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """What `prepare` and each of its stages are told. A field is the option of its name (`takes_stage_options`)."""

    mixture: MixtureOption = None
    data_config: DataConfigOption = None
    source: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Only this source of the mixture; may be repeated.")
    ] = None
    total_tokens: Annotated[int | None, typer.Option(min=1, help="Training tokens of the corpus.")] = None
    shard_size_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a shard.")] = None
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes. Without it: one per core that this process may use.")
    ] = None
    executor: Annotated[
        Literal["pool", "ray"], typer.Option(help="Processes of this machine, or tasks on Ray (see --ray-address).")
    ] = "pool"
    ray_address: Annotated[
        str | None,
        typer.Option(
            envvar="RAY_ADDRESS", metavar="ADDRESS", help="Ray cluster (auto, ...). Without it: this machine."
        ),
    ] = None
    task_index: Annotated[
        int, typer.Option(min=0, metavar="I", help="Do only the tasks of job I of an array (see --task-count).")
    ] = 0
    task_count: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Jobs of the array; start all again until none has anything left to do."),
    ] = 1
    data_root: DataRootOption = Path("data")
    allow_changed: Annotated[
        bool, typer.Option("--allow-changed", help="Replace a corpus made with other settings or text.")
    ] = False

    def words(self) -> list[str]:
        """The command line that gives another process these options."""
        found = []
        for field in dataclasses.fields(self):
            value, option = getattr(self, field.name), f"--{field.name.replace('_', '-')}"
            if isinstance(value, bool):
                found += [option] if value else []
            else:
                each = value if isinstance(value, list) else [value]
                found += [word for one in each if one is not None for word in (option, str(one))]
        return found

    def context(self) -> Context:
        """Read the config files and apply the options.

        Raises:
            UserError: a file or an option is wrong.
        """
        mixed = load_mixture(self.mixture)
        config = load_universal_data_config(self.data_config)
        changes = {
            "total_tokens": self.total_tokens or config.total_tokens,
            "shard_size_tokens": self.shard_size_tokens or config.tokens_per_shard,
            "pack": {**config.pack.model_dump(), "docs_per_shard_target": None},
        }
        config_name = str(self.data_config or DEFAULT_DATA_CONFIG)
        config = check_config(PipelineConfig, {**config.model_dump(), **changes}, config_name)
        return Context(
            layout=Layout(self.data_root),
            mixture=mixed,
            config=config,
            sources=tuple(own for own in mixed.sources if own.id in _selected(self.source, mixed)),
            workers=self.who(),
            config_name=config_name,
            mixture_file=str(self.mixture or DEFAULT_MIXTURE),
            allow_changed=self.allow_changed,
        )

    def who(self) -> Workers:
        """Who does the tasks.

        Raises:
            UserError: task_index is not below task_count.
        """
        index, count = self.task_index, self.task_count
        if index >= count:
            raise UserError(f"--task-index is {index}: it must be below --task-count ({count}); it counts from 0")
        address = self.ray_address if self.executor == "ray" else None
        return Workers(self.workers or len(os.sched_getaffinity(0)), self.executor, address, index, count)


def takes_stage_options(function: Callable[..., int]) -> Callable[..., int]:
    """A command with the options of StageOptions besides its own: the function's first argument holds them."""
    hints = get_type_hints(StageOptions, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    shared = [
        inspect.Parameter(field.name, keyword, default=field.default, annotation=hints[field.name])
        for field in dataclasses.fields(StageOptions)
    ]
    _, *own = inspect.signature(function, eval_str=True).parameters.values()

    @functools.wraps(function)
    def command(**values: Any) -> int:
        given = StageOptions(**{parameter.name: values.pop(parameter.name) for parameter in shared})
        return function(given, **values)

    # What typer reads a command's options from.
    parameters = [*shared, *(parameter.replace(kind=keyword) for parameter in own)]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    vars(command)["__signature__"] = inspect.Signature(parameters)
    return command


def _selected(wanted: list[str] | None, mixture: Mixture) -> set[str]:
    known = [source.id for source in mixture.sources]
    for name in wanted or ():
        if name not in known:
            raise UserError(f"--source is {name!r}: the mixture {mixture.name} has {', '.join(known)}")
    return set(wanted or known)


def stage_main(run: Callable[[Context], dict[str, Any]], module: str) -> int:
    """The main program of a stage's module; returns the exit code."""
    app = typer.Typer(add_completion=False)

    @app.command(help=(sys.modules[run.__module__].__doc__ or "").split("Run as")[0])
    @takes_stage_options
    def stage(given: StageOptions, as_json: JsonOption = False) -> int:
        return run_stage(run, given.context(), as_json)

    alone = PARENT_PIPE_VARIABLE not in os.environ  # not started by `prepare`, which Ctrl-C stops too
    return run_app(app, prog_name=f"python -m shared_data.scripts.{module}", says_stopped=alone)


def run_stage(run: Callable[[Context], dict[str, Any]], context: Context, as_json: bool) -> int:
    """Run a stage with the data folder held, and print its report if asked; returns the exit code.

    A job of an array shares the folder with the others, and ends with EXIT_OTHERS_NOT_DONE where it would need what
    they have not done yet.
    """
    end_with_parent()
    array = context.workers.task_count > 1
    with context.layout.locked(shared=array), TurnLock(context.layout.state) if array else nullcontext() as turn:
        try:
            # What libraries print meanwhile (Ray does, of a worker that died) is no part of the result.
            with redirect_stdout(sys.stderr), context.naming_the_mixture():
                report = run(replace(context, workers=replace(context.workers, turn=turn)))
        except OthersNotDone as waiting:
            say(str(waiting))
            return EXIT_OTHERS_NOT_DONE
    if as_json:
        print(json.dumps(report, indent=2))
    return 0
