"""The commands `report` and `monitor`."""

import contextlib
import datetime
import time
from pathlib import Path
from typing import Annotated

import typer

from gpt_oss_lite.options import AsJson, print_json
from shared_data.console import progress, say
from shared_data.errors import UserError
from shared_data.files import write_atomic


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are overlaid.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Page to write. Default: RUN/report.html, of several ./report.html."),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="Continue a text with each run's newest checkpoint, and keep it; repeatable."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make one HTML page of one or several runs: curves, expert load, samples, recipes, events."""
    from gpt_oss_lite.report.page import render
    from gpt_oss_lite.report.run_log import RunReader, read_run
    from gpt_oss_lite.report.samples import draw_samples

    if len({run.resolve() for run in runs}) < len(runs):
        raise UserError(f"RUN... is {' '.join(map(str, runs))}: each run once")
    page = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    for run in runs:
        RunReader(run)  # a wrong name is found before anything is drawn or written
    for run in runs if prompt else ():
        draw_samples(run, prompt or ())
    sizes = [path.stat().st_size for run in runs if (path := run / "metrics.jsonl").is_file()]
    with progress("read the log", sum(sizes), "B") as bar:
        logs = [read_run(run, bar.advance) for run in runs]
    for log in logs:
        if log.damaged:
            say(f"warning: {log.folder}: {log.damaged} damaged lines passed over")
    write_atomic(page, render(logs, datetime.datetime.now(datetime.UTC)).encode(errors="replace"))
    if as_json:
        print_json({"report": str(page), "runs": [{"run": str(log.folder), "status": log.status} for log in logs]})
    else:
        print(page)


def monitor(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)],
    interval: Annotated[float, typer.Option(min=0.1, metavar="S", help="Seconds between looks.")] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Watch a run in the terminal until it ends (Ctrl-C leaves it running); in a pipe, say once where it stands."""
    from gpt_oss_lite.report.monitor import figures, watch
    from gpt_oss_lite.report.run_log import read_run

    if as_json:
        print_json(figures(read_run(run), time.time()))
        return
    with contextlib.suppress(KeyboardInterrupt):
        watch(run, interval)
