"""The experiments of docs/learning.md: parity with transformers' GptOss, a real run, what pays, long context.

    python scripts/learning.py list                                                what there is, with expected seconds
    python scripts/learning.py run --data DATA --out OUT                           all: half an hour on an H200
    python scripts/learning.py run --data DATA --out OUT --only real --minutes 9   some of it
    python scripts/learning.py tables --results OUT/results.json                   into docs/learning.md

DATA is a corpus of scripts/learning_corpus.py, packed by `gpt-oss-lite prepare`. Each experiment is `gpt-oss-lite
pretrain` in its own process (transformers' model: scripts/learning_peer.py), then scripts/learning_questions.py. What
is done is not done again; what there is no time for is named. results.json holds everything that the tables say.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import needs_packages  # noqa: F401
import torch
import typer
from learning_plan import Base, Experiment, Plan, Size, choose

from gpt_oss_lite.training.run_folder import versions
from shared_data.console import run_app, say
from shared_data.errors import UserError
from shared_data.files import write_atomic
from shared_data.manifest import Manifest

app = typer.Typer(
    help="The experiments of docs/learning.md.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
HERE = Path(__file__).resolve().parent
KEPT_COLUMNS = ("step", "tokens", "ce", "aux", "grad_norm", "lr", "tokens_per_s", "mfu", "memory_gib", "epoch")
JOBS = {"parity": 2, "ablations": 4}
"""Runs of a group at a time: they are small, and start while others train. Their speeds are not figures."""
ALONE_FIRST = "baseline-0"
"""It compiles the kernels that the others then find in the cache."""


@dataclass(frozen=True)
class Bench:
    """Where experiments run, and until when."""

    out: Path
    deadline: float
    """time.monotonic() after which none is begun."""

    def run_folder(self, name: str) -> Path:
        """The run of an experiment."""
        return self.out / "runs" / name

    def result_file(self, name: str) -> Path:
        """The result of an experiment."""
        return self.out / "results" / f"{name}.json"

    def is_done(self, name: str) -> bool:
        """Whether there is a result without an error."""
        path = self.result_file(name)
        return path.is_file() and "error" not in json.loads(path.read_bytes())

    def has_time(self, experiment: Experiment) -> bool:
        """Whether the expected seconds are left."""
        return time.monotonic() + experiment.seconds <= self.deadline

    def perform(self, experiment: Experiment) -> str:
        """Run one: "done" (now or before), "no time", "needs NAME", or the error."""
        if self.is_done(experiment.name):
            return "done"
        needed = experiment.init_from
        if needed is not None and not (self.run_folder(needed) / "checkpoints").is_dir():
            return f"needs {needed}"
        if not self.has_time(experiment):
            return "no time"
        started = time.monotonic()
        say(f"{experiment.name}: begins")
        try:
            result = self._run(experiment)
        except subprocess.CalledProcessError as failure:
            lines = self._log(experiment.name).read_text(errors="replace").strip().splitlines()
            said = [line for line in lines if not line.startswith("$ ")] or ["no output"]
            result = {"error": f"exit code {failure.returncode}: " + " | ".join(said[-3:])}
        except (OSError, ValueError, KeyError, IndexError) as error:  # the others still have their turn
            result = {"error": f"{type(error).__name__}: {error}"}
        result.update(name=experiment.name, group=experiment.group, seed=experiment.seed,
                      init_from=experiment.init_from,
                      sets={key: str(value) for key, value in experiment.sets.items()},
                      seconds=time.monotonic() - started)  # fmt: skip
        write_atomic(self.result_file(experiment.name), json.dumps(result))
        say(f"{experiment.name}: {result.get('error', 'done')}, {result['seconds']:.0f} s")
        return str(result.get("error", "done"))

    def unanswered(self, name: str) -> str | None:
        """The first question of an experiment that failed, with its error; None: there is none."""
        path = self.result_file(name)
        answers = json.loads(path.read_bytes()).get("answers", {}) if path.is_file() else {}
        failed = [f"{key}: {value['error']}" for key, value in answers.items()
                  if isinstance(value, dict) and "error" in value]  # fmt: skip
        return failed[0] if failed else None

    def _run(self, experiment: Experiment) -> dict[str, Any]:
        run = self.run_folder(experiment.name)
        source = self.run_folder(experiment.init_from) if experiment.init_from else None
        shutil.rmtree(run, ignore_errors=True)
        options: list[object] = ["--config", experiment.recipe, "--seed", experiment.seed, *experiment.words()]
        result: dict[str, Any] = {}
        self._log(experiment.name).parent.mkdir(parents=True, exist_ok=True)
        self._log(experiment.name).unlink(missing_ok=True)
        if experiment.peer:
            figures = self._log(experiment.name).with_suffix(".peer.json")
            self._call(experiment, [HERE / "learning_peer.py", *options, "--out", figures])
            return dict(json.loads(figures.read_bytes()))
        if experiment.trains:
            start = ["--init-from", source] if source else []
            self._call(experiment, ["-m", "gpt_oss_lite", "pretrain", *options, *start, "--out", run])
            result = {**collect(run), "corpus": corpus_of(Path(str(experiment.sets["data.train_data_path"])))}
        if experiment.questions:
            asked, answers = (self._log(experiment.name).with_suffix(f".{kind}.json") for kind in ("asked", "answers"))
            write_atomic(asked, json.dumps(experiment.questions, default=str))
            asks = [HERE / "learning_questions.py", "--checkpoint", run if experiment.trains else source]
            self._call(experiment, [*asks, "--questions", asked, "--out", answers])
            result["answers"] = json.loads(answers.read_bytes())
        else:
            shutil.rmtree(run / "checkpoints")  # of the 502M model 6 GB, which nothing reads
        return result

    def _log(self, name: str) -> Path:
        return self.out / "logs" / f"{name}.log"

    def _call(self, experiment: Experiment, words: Sequence[object]) -> None:
        with open(self._log(experiment.name), "a") as log:
            command = [sys.executable, *map(str, words)]
            log.write("$ " + " ".join(command) + "\n")
            log.flush()
            subprocess.run(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, check=True)


def collect(run: Path) -> dict[str, Any]:
    """What a run logged: its rows without what no table says, its evaluations, the largest share of an expert."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    evaluations = [event for event in events if event["event"] == "eval"]
    kept = [{key: row[key] for key in KEPT_COLUMNS} | {"imbalance": max(row["expert_imbalance"]),
            "mean_imbalance": sum(row["expert_imbalance"]) / len(row["expert_imbalance"])} for row in rows]  # fmt: skip
    return {"rows": kept, "evaluations": evaluations, "final": evaluations[-1], "load": rows[-1]["expert_load"],
            "skips": sum(event["event"] == "skip" for event in events)}  # fmt: skip


def corpus_of(path: Path) -> dict[str, Any]:
    """What the tables say of a corpus."""
    return Manifest.load(path).model_dump(include={"total_tokens", "sources"})


def perform_all(bench: Bench, experiments: Sequence[Experiment]) -> dict[str, str]:
    """Run them group by group; the outcome of each."""
    outcomes: dict[str, str] = {}
    for group in dict.fromkeys(one.group for one in experiments):
        mine = [one for one in experiments if one.group == group]
        jobs = JOBS.get(group, 1) if torch.cuda.is_available() else 1
        if mine[0].name == ALONE_FIRST and jobs > 1:
            outcomes[ALONE_FIRST] = bench.perform(mine.pop(0))
        with ThreadPoolExecutor(max_workers=jobs) as workers:
            outcomes |= dict(zip([one.name for one in mine], workers.map(bench.perform, mine), strict=True))
    return outcomes


def gather(out: Path) -> Path:
    """All results in one file."""
    results = [read_results(path, "name") for path in sorted((out / "results").glob("*.json"))]
    content = {"versions": versions(), "results": {result["name"]: result for result in results}}
    write_atomic(out / "results.json", json.dumps(content))
    return out / "results.json"


def read_results(path: Path, key: str) -> dict[str, Any]:
    """A file of results, which has a key.

    Raises:
        UserError: it is not JSON, or has not.
    """
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error})") from None
    if not isinstance(content, dict) or key not in content:
        raise UserError(f"{path} is no file of results: it has no key {key}")
    return content


def print_outcomes(out: Path, outcomes: Mapping[str, str]) -> None:
    """A line for each experiment."""
    print(f"{'experiment':<22} {'seconds':>8} {'loss':>8} {'val loss':>9} {'val bpb':>8}  outcome")
    for name, outcome in outcomes.items():
        path = out / "results" / f"{name}.json"
        result = json.loads(path.read_bytes()) if path.is_file() else {}
        final, rows = result.get("final") or result.get("answers", {}).get("held_out") or {}, result.get("rows") or [{}]
        columns = (result.get("seconds"), rows[-1].get("ce"), final.get("loss"), final.get("bits_per_byte"))
        formats: tuple[Callable[[float], str], ...] = ("{:8.0f}".format, "{:8.4f}".format, "{:9.4f}".format,
                                                       "{:8.4f}".format)  # fmt: skip
        shown = ["-".rjust(len(form(0.0))) if value is None else form(value)
                 for value, form in zip(columns, formats, strict=True)]  # fmt: skip
        print(f"{name:<22} {' '.join(shown)}  {outcome[:200]}")


Data = Annotated[Path, typer.Option(metavar="DIR", help="Corpus, with validation/.", show_default=False)]
LongData = Annotated[Path | None, typer.Option(metavar="DIR", help="The same with long windows. Default: --data.")]
Only = Annotated[str, typer.Option(help="Experiments or groups, separated by commas. Default: all.")]
SizeOption = Annotated[Size, typer.Option(help="mini: a plan that a CPU runs; its figures mean nothing.")]


@app.command()
def run(
    data: Data,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where runs and results go.")] = Path(".bench/learning"),
    long_data: LongData = None,
    only: Only = "",
    minutes: Annotated[float, typer.Option(help="No experiment is begun that would end later.")] = 60.0,
    size: SizeOption = "full",
    real_steps: Annotated[int, typer.Option(min=2, help="Steps of the real run.")] = 900,
    winners_steps: Annotated[int, typer.Option(min=2, help="Steps of the two runs with and without what won.")] = 440,
    parity_steps: Annotated[int, typer.Option(min=2, help="Steps of the comparison.")] = 300,
    parity_micro_batch: Annotated[int, typer.Option(min=1, help="Windows of a step of the comparison.")] = 2,
    ablation_steps: Annotated[int, typer.Option(min=2, help="Steps of the ablations.")] = 300,
    long_steps: Annotated[int, typer.Option(min=2, help="Steps of the extension.")] = 40,
    long_window: Annotated[int, typer.Option(min=64, help="Its window, tokens.")] = 32_768,
    passkey_length: Annotated[int, typer.Option(min=64, help="Longest text with a passkey, tokens.")] = 131_072,
    long_from: Annotated[Base, typer.Option(help="Run that the long-context part starts from.")] = "real",
) -> int:
    """Run experiments; 0 if all are done."""
    started = time.monotonic()
    plan = Plan(
        data=data, long_data=long_data, size=size, real_steps=real_steps, winners_steps=winners_steps,
        parity_steps=parity_steps, parity_micro_batch=parity_micro_batch, ablation_steps=ablation_steps,
        long_steps=long_steps, long_window=long_window, passkey_length=passkey_length, long_from=long_from,
    )  # fmt: skip
    chosen = chosen_of(plan, only)
    if not (data / "manifest.json").is_file():
        raise UserError(f"--data {data}: there is no manifest.json; make a corpus with scripts/learning_corpus.py")
    bench = Bench(out, started + 60 * minutes)
    outcomes = perform_all(bench, chosen)
    for name, outcome in outcomes.items():
        if outcome == "done" and (failed := bench.unanswered(name)):
            outcomes[name] = f"trained, but {failed}"
    gathered = gather(out)
    print_outcomes(out, outcomes)
    print(f"{gathered}: {gathered.stat().st_size / 1e6:.1f} MB, after {time.monotonic() - started:.0f} s")
    return 0 if all(outcome == "done" for outcome in outcomes.values()) else 1


@app.command("list")
def list_experiments(data: Data = Path("DATA"), only: Only = "", size: SizeOption = "full") -> None:
    """Print the experiments and their commands."""
    for one in chosen_of(Plan(data=data, size=size), only):
        print(f"{one.name:<22} {one.group:<10} about {one.seconds:4.0f} s  {' '.join(one.words())}")


def chosen_of(plan: Plan, only: str) -> list[Experiment]:
    """The experiments that --only names. Raises UserError."""
    try:
        return choose(plan.experiments(), [name for name in only.split(",") if name])
    except ValueError as error:
        raise UserError(f"--only: {error}") from None


@app.command()
def tables(
    results: Annotated[
        Path, typer.Option(metavar="PATH", help="results.json, or the folder that a run wrote to.", show_default=False)
    ],
    page: Annotated[Path, typer.Option(metavar="FILE", help="Page whose marked parts are written.")] = Path(
        "docs/learning.md"
    ),
) -> None:
    """Write tables and pictures of results into the page."""
    from learning_tables import write_page

    if results.is_dir() and not any((results / "results").glob("*.json")):
        raise UserError(f"--results {results}: there is no results/*.json in it; scripts/learning.py run writes them")
    path = gather(results) if results.is_dir() else results
    content = read_results(path, "results")
    runs = content["results"]
    if not isinstance(runs, dict) or not all(isinstance(run, dict) for run in runs.values()):
        raise UserError(f"{path} is no file of results: its key results has to hold an object for each experiment")
    print("\n".join(map(str, write_page(content, page))))


if __name__ == "__main__":
    sys.exit(run_app(app, prog_name="learning.py"))
