"""The command line, `gpt-oss-lite COMMAND`; the table in README.md has all of them.

A command reads its options, hands them to the one function that does the work, and prints its result; heavy modules
are imported inside, so that --help answers at once. Results go to standard output, everything else to standard error.
"""

import logging
import shutil
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from gpt_oss_lite.export.commands import export, import_stock
from gpt_oss_lite.inference.commands import evaluate, generate, passkey
from gpt_oss_lite.options import AsJson, Config, Overrides, print_json
from gpt_oss_lite.report.commands import monitor, report
from gpt_oss_lite.training import checkpoint_commands
from gpt_oss_lite.training.doctor import doctor
from gpt_oss_lite.training.ladder import plan
from shared_data.console import run_app, say
from shared_data.errors import UserError
from shared_data.inspection import inspect
from shared_data.page import corpus
from shared_data.prepare_data import prepare
from shared_data.verify import verify

app = typer.Typer(
    help="GPT-OSS-Lite: pre-train a sparse mixture-of-experts language model, from raw text to samples.",
    epilog="Exit codes: 0 done, 1 failed, 2 bad input or usage, 3 stopped by a signal or time limit after a good "
    "save, 4 stopped by the NaN guard. --debug anywhere shows the traceback of an error.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(prepare)
app.command()(verify)
app.command()(doctor)
app.command()(plan)
app.add_typer(checkpoint_commands.app, name="checkpoints")
app.command()(report)
app.command()(monitor)
app.command()(inspect)
app.command()(corpus)
app.command()(generate)
app.command("eval")(evaluate)
app.command()(passkey)
app.command()(export)
app.command("import")(import_stock)


class _SayHandler(logging.Handler):
    """Log lines go where standard error goes at the time, so also above a progress bar that owns it."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """GPT-OSS-Lite: pre-train a sparse mixture-of-experts language model, from raw text to samples."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[_SayHandler()])
    if show_version:
        print(version("gpt-oss-lite"))
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def pretrain(
    config: Config,
    out: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Run folder. Default: the next free runs/<config>-NNN.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything. Default: a fresh one, recorded.")] = None,
    max_steps: Annotated[
        int | None, typer.Option(help="Step to stop at. The schedule keeps training.total_steps.")
    ] = None,
    max_hours: Annotated[float | None, typer.Option(help="Hours after which to save and stop (exit code 3).")] = None,
    overrides: Overrides = None,
    resume_from: Annotated[int | None, typer.Option(metavar="N", help="Go on from the checkpoint of step N.")] = None,
    resume: Annotated[str | None, typer.Option(metavar="latest", help="Go on from the newest good checkpoint.")] = None,
    auto_resume: Annotated[bool, typer.Option("--auto-resume", help="Go on where there is a run, else start.")] = False,
    init_from: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Start a new run from another's newest weights.")
    ] = None,
    profile: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Write a trace and a kernel table of N steps.")
    ] = None,
    accept_no_nan_guard: Annotated[
        bool, typer.Option("--i-accept-no-nan-guard", help="Needed with training.nan_guard: false.")
    ] = False,
    allow_changed: Annotated[
        bool, typer.Option("--allow-changed", help="Go on although recipe, seed or corpus differ.")
    ] = False,
) -> int:
    """Train a model. Without --out, --resume-from, --resume and --auto-resume take the newest run of the recipe."""
    from gpt_oss_lite.training.pretrain import PretrainOptions
    from gpt_oss_lite.training.pretrain import pretrain as train

    if resume not in (None, "latest"):
        raise UserError(f"--resume is {resume}: it must be latest (or name a step with --resume-from)")
    options = PretrainOptions(
        config=config,
        out=out,
        seed=seed,
        max_steps=max_steps,
        max_hours=max_hours,
        overrides=overrides or (),
        resume_from=resume_from,
        resume_latest=resume is not None,
        auto_resume=auto_resume,
        init_from=init_from,
        profile=profile,
        accept_no_nan_guard=accept_no_nan_guard,
        allow_changed=allow_changed,
    )
    return train(options)


@app.command()
def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Print this one, every key commented.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the recipes that come with the package, or print one: `gpt-oss-lite recipes quickstart > mine.yaml`."""
    from gpt_oss_lite.config.shipped import shipped_recipes, summary

    shipped = shipped_recipes()
    if name is not None and name not in shipped:
        raise UserError(f"NAME is {name}: it must be one of {', '.join(shipped)}")
    if name is not None:
        print(shipped[name].read_text(), end="")
    elif as_json:
        print_json({key: {"file": str(path), "summary": summary(path)} for key, path in shipped.items()})
    else:
        room = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        for key, path in shipped.items():
            name = f"{key:<{max(map(len, shipped))}}  "
            lines = [summary(path)] if room is None else textwrap.wrap(summary(path), max(room - len(name), 20))
            print(name + f"\n{' ' * len(name)}".join(lines))


@app.command()
def estimate(
    config: Config,
    overrides: Overrides = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Windows. Default: training.micro_batch_size.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens of a window. Default: model.max_seq_len.")] = None,
    gpu_gb: Annotated[
        float | None, typer.Option(min=0, help="Find the fastest setting for a GPU of so many GB (10^9 bytes).")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="GPUs that share a step, by training.parallelism.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Estimate a recipe's memory on a GPU, its parameters and operations, without building it."""
    from gpt_oss_lite.config import load_recipe
    from gpt_oss_lite.training.flops import flops_per_token
    from gpt_oss_lite.training.layout import check_windows, layout_of
    from gpt_oss_lite.training.memory import beside_the_recipe, estimate_recipe, fastest_that_fits, meta_model

    recipe = load_recipe(config, overrides or ())
    check_windows(recipe.training, ranks)
    layout = layout_of(recipe.training, ranks)
    model = meta_model(recipe.model)
    total, active = model.num_parameters(), model.num_active_parameters()
    flops = flops_per_token(recipe.model, seq_len or recipe.model.max_seq_len)
    parameters = f"parameters: {total:,}, active per token: {active:,}; {flops:,} FLOP/token, forward and backward"
    if gpu_gb is not None:
        if batch_size is not None or seq_len is not None:
            raise UserError("--gpu-gb chooses the micro-batch itself; it does not go with --batch-size or --seq-len")
        found = fastest_that_fits(recipe, int(gpu_gb * 1e9), layout)
        if found is None:
            raise UserError(f"--gpu-gb is {gpu_gb:g}: nothing fits; a smaller model.max_seq_len or model needs less")
        setting, fitting = found
        compared = beside_the_recipe(recipe, setting, int(gpu_gb * 1e9), layout)
        if as_json:
            figures = {"bytes": fitting.items, "total_bytes": fitting.total_bytes}
            print_json({**setting._asdict(), "recipe_setting": compared, **figures})
            return
        print(parameters)
        print("fits with: " + " ".join(f"--set {word}" for word in setting.overrides()))
        print(compared)
        print(fitting.table())
        return
    result = estimate_recipe(recipe, batch_size, seq_len, layout=layout)
    if as_json:
        figures = {"parameters": total, "active_parameters": active, "flops_per_token": flops}
        print_json({**figures, "bytes": result.items, "total_bytes": result.total_bytes})
        return
    print(parameters)
    print(result.table())


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and leave with its exit code.

    Args:
        arguments: None: those of the process.
    """
    sys.exit(run_app(app, arguments, prog_name="gpt-oss-lite"))
