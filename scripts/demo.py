"""The whole road on this machine's CPU: raw text -> shards -> a trained, sampled model. `make demo` runs it.

Every stage is the ordinary command, printed before it runs, so that it can be typed again by hand. What is done already
is not done again: a second run only reads the results, and a run that was killed goes on where it was.
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from demo_corpus import write_raw
from demo_report import Figures, PeakMemory, plot_losses, read_figures

from gpt_oss_lite.config import load_recipe
from gpt_oss_lite.training.checkpoint import CHECKPOINTS, CheckpointManager
from shared_data.console import run_app, say
from shared_data.files import write_atomic

SCRIPTS = Path(__file__).resolve().parent
RECIPE = SCRIPTS.parent / "configs" / "quickstart.yaml"
DATA = Path("data/quickstart")
RUN = Path("runs/demo")
SAMPLES = RUN / "samples.txt"
PLOT = RUN / "loss.svg"

PROMPT = "The function returns"
TEMPERATURES = (0, 0.7, 1.0)
NEW_TOKENS = 48
# What the run must at least learn: held-out bits per byte, last over first.
LARGEST_RATIO = 0.85

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def demo(
    total_tokens: Annotated[int | None, typer.Option(min=1, help="Training tokens of the corpus.")] = None,
    source_bytes: Annotated[int | None, typer.Option(min=1, help="Cap on the raw text of each source.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="For the recipe.")] = None,
) -> int:
    """Walk from raw text to samples; the options make it smaller."""
    started = time.monotonic()
    with PeakMemory() as memory:
        prepare_corpus(total_tokens, source_bytes)
        train(overrides or [])
        samples = draw_samples()
        figures = read_figures(RUN)
        if is_older(PLOT, newest_meta()):
            plot_losses(RUN, PLOT)
    summarise(figures, samples, time.monotonic() - started, memory.peak_bytes)
    if figures.last_bpb > LARGEST_RATIO * figures.first_bpb:
        say(f"error: held-out bits per byte should fall to {LARGEST_RATIO:.0%} of the first value at least")
        return 1
    return 0


def prepare_corpus(total_tokens: int | None, source_bytes: int | None) -> None:
    """Raw text from the installed packages, through the four stages, and checked."""
    write_raw(DATA / "sources", source_bytes)
    sizes = ["--total-tokens", str(total_tokens)] if total_tokens else []
    run("prepare", "--mixture", SCRIPTS / "demo_mixture.yaml", "--data-config", SCRIPTS / "demo_data.yaml",
        "--data-root", DATA, *sizes)  # fmt: skip
    run("verify", DATA / "pretrain_chinchilla")


def train(overrides: list[str]) -> None:
    """Train half of the steps, then go on from the checkpoint as after any stop."""
    recipe = load_recipe(RECIPE, overrides)
    half = recipe.training.total_steps // 2
    settings = [word for override in overrides for word in ("--set", override)]
    command: list[str | Path] = [
        "pretrain",
        "--config",
        RECIPE,
        "--out",
        RUN,
        "--seed",
        "0",
        *settings,
        "--auto-resume",
    ]
    done = newest_step()
    if done < half:
        run(*command, "--max-steps", str(half))
    if done < recipe.training.total_steps:
        say("the run was stopped on purpose; now it goes on from its checkpoint, as if it had never stopped")
    run(*command)


def newest_step() -> int:
    """Step of the newest complete checkpoint, 0 without one."""
    return CheckpointManager(RUN / CHECKPOINTS).latest_step() or 0


def newest_meta() -> Path:
    """The file that the newest checkpoint was finished with."""
    return RUN / CHECKPOINTS / f"meta_step_{newest_step()}.json"


def draw_samples() -> str:
    """Continuations of one prompt, from greedy to free; kept in a file beside the run."""
    if is_older(SAMPLES, newest_meta()):
        parts = []
        for temperature in TEMPERATURES:
            text = run("generate", "--checkpoint", RUN, "--prompt", PROMPT, "--temperature", str(temperature),
                       "--max-new-tokens", str(NEW_TOKENS), "--seed", "0", keep_output=True)  # fmt: skip
            parts.append(f"--- temperature {temperature}\n{text.rstrip()}\n")
        write_atomic(SAMPLES, "".join(parts))
    return SAMPLES.read_text()


def is_older(made: Path, source: Path) -> bool:
    """Whether a file is missing or older than what it is made from."""
    return not made.exists() or made.stat().st_mtime < source.stat().st_mtime


def run(*words: str | Path, keep_output: bool = False) -> str:
    """Run a gpt-oss-lite command; its standard output is returned, or goes where ours goes."""
    arguments = [str(word) for word in words]
    shown = [
        str(Path(word).relative_to(Path.cwd())) if Path(word).is_relative_to(Path.cwd()) else word for word in arguments
    ]
    say(f"\n$ gpt-oss-lite {' '.join(repr(word) if ' ' in word else word for word in shown)}")
    command = [sys.executable, "-m", "gpt_oss_lite", *arguments]
    result = subprocess.run(command, stdout=subprocess.PIPE if keep_output else None, text=True, errors="replace")
    if result.returncode:
        say(f"the command above ended with exit code {result.returncode}")
        raise typer.Exit(result.returncode)
    return result.stdout or ""


def summarise(figures: Figures, samples: str, seconds: float, peak_bytes: int) -> None:
    """Say what was learnt and where everything is."""
    print(f"\n{samples}")
    print(f"corpus    {DATA / 'pretrain_chinchilla'} (stand-ins for the real mixture: see scripts/demo_corpus.py)")
    print(f"run       {RUN} (config.yaml, metrics.jsonl, events.jsonl, checkpoints/)")
    print(f"samples   {SAMPLES}")
    print(f"plot      {PLOT}")
    print(f"again     gpt-oss-lite pretrain --config configs/{RECIPE.name}")
    print(f"ask       gpt-oss-lite generate --checkpoint {RUN} --prompt 'import '")
    print(f"time      {seconds:.0f} s, peak RSS of all processes {peak_bytes / 1e9:.2f} GB")
    print(f"val_bpb   first={figures.first_bpb:.4f} last={figures.last_bpb:.4f}")


if __name__ == "__main__":
    sys.exit(run_app(app, prog_name="demo.py"))
