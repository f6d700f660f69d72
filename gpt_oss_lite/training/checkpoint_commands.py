"""`gpt-oss-lite checkpoints list | verify | delete | diff | consolidate`: a run's checkpoints, looked at and after.

PyTorch is imported inside, so that --help answers at once.
"""

import json
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpt_oss_lite.options import AsJson, print_json
from shared_data.console import progress, say
from shared_data.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from gpt_oss_lite.training.checkpoint import CheckpointManager

app = typer.Typer(help="List, verify, delete, compare and consolidate the checkpoints of a run.", no_args_is_help=True)

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, or its checkpoints/.", show_default=False)]


@app.command("list")
def list_checkpoints(run: Run, as_json: AsJson = False) -> None:
    """List the steps whose checkpoint is complete."""
    manager = _manager(run)
    rows = [_describe(manager, step) for step in manager.list_checkpoints()]
    if as_json:
        print_json(rows)
        return
    if not rows:
        say(f"{manager.folder} has no complete checkpoint")
        return
    print(f"{'step':>8} {'tokens':>16} {'GB':>8}  saved")
    for row in rows:
        tokens = "n/a" if row["tokens"] is None else f"{row['tokens']:,}"
        print(f"{row['step']:>8} {tokens:>16} {row['bytes'] / 1e9:8.3f}  {row['saved']}")


def _manager(run: Path) -> "CheckpointManager":
    from gpt_oss_lite.training.checkpoint import CheckpointManager, checkpoint_folder

    return CheckpointManager(checkpoint_folder(run))


def _locked(manager: "CheckpointManager") -> AbstractContextManager[str]:
    """Hold the run that the checkpoints are of: none may be training in it."""
    from gpt_oss_lite.training.checkpoint import CHECKPOINTS
    from gpt_oss_lite.training.run_lock import locked

    folder = manager.folder
    return locked(folder.parent if folder.name == CHECKPOINTS else folder)


def _problem(manager: "CheckpointManager", step: int) -> str | None:
    """What is wrong with a step; None: it is good."""
    from gpt_oss_lite.training.snapshot import DamagedCheckpoint

    try:
        manager.verify(step)
    except DamagedCheckpoint as damage:
        return str(damage)
    return None


def _describe(manager: "CheckpointManager", step: int) -> dict[str, Any]:
    meta = manager.meta(step)
    saved = manager.files(step)[-1].stat().st_mtime
    return {
        "step": step,
        "tokens": meta.get("tokens"),
        "position": meta.get("position"),
        "bytes": sum(about["size"] for about in meta["files"].values()),
        "saved": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(saved)),
    }


@app.command()
def verify(
    run: Run,
    step: Annotated[int | None, typer.Option(min=0, help="This step only. Default: every step.")] = None,
    as_json: AsJson = False,
) -> int:
    """Read checkpoints again and compare every file with its SHA-256. Exit code 1 if one is damaged."""
    manager = _manager(run)
    steps = manager.marked_steps() if step is None else [step]
    problems: dict[int, str | None] = {}
    with progress(f"verify {manager.folder}", len(steps), "checkpoints") as report:
        for number in steps:
            problems[number] = _problem(manager, number)
            report.advance(1)
    if as_json:
        print_json({str(number): problem or "good" for number, problem in problems.items()})
    else:
        for number, problem in problems.items():
            print(f"step {number}: {problem or 'good'}")
        if not problems:
            say(f"{manager.folder} has no checkpoint")
    return 1 if any(problems.values()) else 0


@app.command()
def delete(
    run: Run,
    step: Annotated[list[int], typer.Option("--step", min=0, help="Step to delete; repeatable.", show_default=False)],
) -> None:
    """Delete checkpoints; never the last one that is good, and none of a run that is training."""
    manager = _manager(run)
    folder = manager.folder
    with _locked(manager):
        steps = manager.marked_steps()
        for number in step:
            if number not in steps:
                raise UserError(f"{folder} has no checkpoint of step {number} (there are: {steps})")
        others = [number for number in manager.list_checkpoints() if number not in step]
        if all(_problem(manager, number) for number in reversed(others)):
            raise UserError(f"{folder}: no good checkpoint would be left without step {', '.join(map(str, step))}")
        for number in step:
            manager.delete_checkpoint(number)
            print(f"deleted step {number}")


@app.command()
def consolidate(
    run: Run,
    step: Annotated[
        int | None, typer.Option(min=0, help="Step to make one file of. Default: the newest complete one.")
    ] = None,
) -> None:
    """Make the single-file form of a checkpoint that a sharded model's ranks wrote."""
    from gpt_oss_lite.training.sharded import consolidate as make_one

    manager = _manager(run)
    with _locked(manager):
        step = manager.latest_step() if step is None else step
        if step is None:
            raise UserError(f"{manager.folder} has no complete checkpoint")
        was_sharded = manager.is_sharded(step)
        make_one(manager, step)
    print(
        f"step {step}: {manager.files(step)[0]}" if was_sharded else f"step {step} is in the single-file form already"
    )


@app.command()
def diff(
    run: Run,
    first: Annotated[int, typer.Argument(min=0, metavar="STEP", help="A step of RUN.", show_default=False)],
    second: Annotated[int, typer.Argument(min=0, metavar="STEP", help="A step of RUN, or of --other.")],
    other: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Where the second step lies. Default: the same run.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Compare two checkpoints: weights tensor by tensor, and what their metas say. Exit code 1 if they differ."""
    from gpt_oss_lite.training.weights import read_weights

    ours = _manager(run)
    theirs = ours if other is None else _manager(other)
    metas = ours.verify(first), theirs.verify(second)
    fields = {
        key: [meta.get(key) for meta in metas]
        for key in sorted(metas[0].keys() | metas[1].keys())
        if key not in ("files", "step") and metas[0].get(key) != metas[1].get(key)
    }
    tensors = compare_tensors(read_weights(ours, first), read_weights(theirs, second))
    if as_json:
        print_json({"meta": fields, "tensors": tensors})
    else:
        for key, values in fields.items():
            print(f"meta {key}: {json.dumps(values[0])} -> {json.dumps(values[1])}")
        for name, difference in tensors.items():
            print(f"{name}: {difference}")
        print("the same" if not fields and not tensors else f"{len(tensors)} tensors differ")
    return 1 if fields or tensors else 0


def compare_tensors(first: dict[str, "Tensor"], second: dict[str, "Tensor"]) -> dict[str, str]:
    """What differs between two sets of tensors, by name; tensors that are bitwise equal are left out."""
    import torch

    found = {}
    for name in sorted(first.keys() | second.keys()):
        if name not in first or name not in second:
            found[name] = f"only in the {'second' if name in second else 'first'}"
            continue
        x, y = first[name], second[name]
        if x.shape != y.shape or x.dtype != y.dtype:
            found[name] = f"{tuple(x.shape)} {x.dtype} -> {tuple(y.shape)} {y.dtype}"
        elif not torch.equal(x.flatten().view(torch.uint8), y.flatten().view(torch.uint8)):
            change = (y.double() - x.double()).abs()
            relative = float(change.norm() / x.double().norm().clamp_min(1e-300))
            found[name] = f"largest change {float(change.max()):.3g}, relative norm {relative:.3g}"
    return found
