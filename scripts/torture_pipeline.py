#!/usr/bin/env python3
"""The pipeline tortured: every way to run it and every kill must give the same bytes, and a kill must cost little.

    python scripts/torture_pipeline.py [--kills 20] [--json]

Three small sources in as many tasks as a corpus of some gigabytes has go through all four stages: in one process, by 2
and 4 workers, each with a PYTHONHASHSEED of its own, on Ray, as an array of jobs; then with the whole run killed with
SIGKILL at random calls until it has been killed --kills times or is done, and with workers killed under a run that goes
on. Each must give the SHA-256 of every file that the first gave, and n kills may cost (1 + 0.15 n) times the input at
the most.
"""

import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import needs_packages  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(ROOT / name) for name in (".", "tests", "tests/shared_data")]
sys.path[:0] = PATHS
# Workers that Ray starts import what is run.
os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ.setdefault("OMP_NUM_THREADS", "1")

import typer  # noqa: E402
from killing import at_each_call, die_at_call, in_child, start_child, sum_of_work, workers_killed  # noqa: E402
from pipeline_corpus import MANY_TASKS, STAGES, context_of, hashes, make_corpus, prepare, run_all  # noqa: E402

from gpt_oss_lite.options import AsJson, print_json  # noqa: E402
from shared_data.console import run_app, say  # noqa: E402
from shared_data.executor import Workers  # noqa: E402
from shared_data.options import EXIT_OTHERS_NOT_DONE, run_stage  # noqa: E402

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
ON_RAY = Workers(2, "ray")
MOST_COST = 0.15


@dataclass
class Outcome:
    """One way to run the pipeline."""

    run: str
    kills: int
    same: bool
    """Whether every file is that of the first run."""
    input_bytes: dict[str, int]
    """By stage."""
    processed_bytes: dict[str, int]

    @property
    def good(self) -> bool:
        """Whether the bytes are right and the kills cost no more than allowed."""
        allowed = 1 + MOST_COST * self.kills
        bound = all(n <= allowed * self.input_bytes[stage] for stage, n in self.processed_bytes.items())
        return self.same and bound


class Ground:
    """The sources, the first run's bytes, and the runs that are held against it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_corpus(folder, pipeline=MANY_TASKS, shard_size_tokens=1100)
        context = context_of(folder, root="first")
        run_all(context)
        self.expected = hashes(context.layout.root)

    def judge(self, name: str, root: str, kills: int = 0) -> Outcome:
        """Compare what a run left with the first one."""
        reports = {path.stem: path for path in (self.folder / root / "state/reports").glob("*.json")}
        works = {stage.STAGE: sum_of_work(json.loads(reports[stage.STAGE].read_text())) for stage in STAGES}
        inputs, processed = ({stage: own[n] for stage, own in works.items()} for n in (0, 1))
        same = hashes(self.folder / root) == self.expected
        say(f"{name}: {'same bytes' if same else 'OTHER BYTES'}, {kills} kills")
        return Outcome(name, kills, same, inputs, processed)


def spread(ground: Ground) -> list[Outcome]:
    """Other numbers of workers, Ray, an array; no kill."""
    found = []
    for workers, seed in ((1, "1"), (2, "2"), (4, "3")):
        root = f"workers-{workers}"
        prepare(ground.folder, ground.folder / root, "--workers", str(workers), PYTHONHASHSEED=seed)
        found.append(ground.judge(f"--workers {workers}, PYTHONHASHSEED={seed}", root))
    run_all(context_of(ground.folder, root="ray", workers=ON_RAY))
    found.append(ground.judge("Ray, 2 workers", "ray"))
    while EXIT_OTHERS_NOT_DONE in array_round(ground.folder):
        pass
    return [*found, ground.judge("an array of 3 jobs, again until all is done", "array")]


def array_round(folder: Path) -> list[int]:
    """Start the three jobs of an array together; their exit codes."""

    def job(index: int) -> None:
        context = context_of(folder, root="array", workers=Workers(1, task_index=index, task_count=3))
        for stage in STAGES:
            if code := run_stage(stage.run, context, False):
                os._exit(code)

    jobs = [start_child(partial(job, index)) for index in range(3)]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in jobs]


def calls_of_a_run(ground: Ground) -> int:
    """How often a whole run changes the file system."""
    tally = ground.folder / "calls"

    def count() -> None:
        at_each_call(lambda number: tally.write_text(str(number)))
        run_all(context_of(ground.folder, root="counted"))

    in_child(count)
    return int(tally.read_text())


def kill_runs(ground: Ground, kills: int, seed: int) -> Outcome:
    """Kill the whole run at random calls, as far apart as lets it be killed so often before it is done."""
    rng, killed = random.Random(seed), 0
    farthest = max(2, 2 * calls_of_a_run(ground) // kills)
    context = context_of(ground.folder, root="killed")

    def attempt(call: int) -> Callable[[], object]:
        def run() -> None:
            die_at_call(call)
            run_all(context)

        return run

    while killed < kills and os.WIFSIGNALED(in_child(attempt(rng.randint(1, farthest)))):
        killed += 1
    run_all(context)
    return ground.judge("--workers 1, the run killed", "killed", killed)


def kill_workers(ground: Ground, name: str, root: str, workers: Workers, most: int, seed: int) -> Outcome:
    """Kill workers at random moments under a run that goes on."""
    context = context_of(ground.folder, root=root, workers=workers)
    with workers_killed(context.layout.root, most, (8, 20), seed) as kills:
        run_all(context)
    return ground.judge(name, root, len(kills))


def show(outcomes: list[Outcome]) -> None:
    """The tables of docs/performance.md."""
    print("| run | kills | every file's SHA-256 |\n|---|---|---|")
    for own in outcomes:
        print(f"| {own.run} | {own.kills or 'none'} | {'the same' if own.same else 'ANOTHER'} |")
    killed = [own for own in outcomes if own.kills]
    columns = ["processed (a kill costs)", "input", *(f"{own.run}, {own.kills} kills" for own in killed)]
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for stage, size in outcomes[0].input_bytes.items():
        cells = []
        for own in killed:
            cost = (own.processed_bytes[stage] / size - 1) / own.kills
            cells.append(f" {own.processed_bytes[stage]:,} B ({cost:.1%}) |")
        print(f"| {stage} | {size:,} B |{''.join(cells)}")


@app.command()
def torture(
    kills: Annotated[int, typer.Option(min=1, help="Kills of the whole run.")] = 20,
    worker_kills: Annotated[int, typer.Option(min=1, help="Kills of a worker, at the most, in a pool and on Ray.")] = 6,
    seed: Annotated[int, typer.Option(help="Where the kills fall.")] = 20,
    as_json: AsJson = False,
) -> int:
    """Run the pipeline in every way and kill it; exit code 1 if any byte or any account is wrong."""
    started = time.monotonic()
    # Ray prints of each worker that died; the tables alone are the result.
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(sys.stderr):
        ground = Ground(Path(name))
        outcomes = spread(ground)
        outcomes.append(kill_runs(ground, kills, seed))
        in_a_pool = ("--workers 2, a worker killed", "killed-workers", Workers(2))
        on_ray = ("Ray, a worker killed", "killed-ray", ON_RAY)
        outcomes += [kill_workers(ground, *case, worker_kills, seed) for case in (in_a_pool, on_ray)]
    found: list[dict[str, Any]] = [{**asdict(own), "good": own.good} for own in outcomes]
    print_json(found) if as_json else show(outcomes)
    bad = [own.run for own in outcomes if not own.good]
    verdict = f"BAD: {'; '.join(bad)}" if bad else "all good"
    say(f"{len(outcomes)} runs in {time.monotonic() - started:.0f} s: {verdict}")
    with contextlib.suppress(ImportError):
        import ray

        ray.shutdown()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(run_app(app, prog_name="torture_pipeline.py"))
