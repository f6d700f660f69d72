"""The whole road on this machine's CPU: raw text -> shards -> a trained, sampled model. `make demo` runs it.

Every stage is the ordinary command, printed before it runs, so that it can be typed again by hand. What is done already
is not done again: a second run only reads the results, and a run that was killed goes on where it was.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import needs_packages  # noqa: F401
import typer
from demo_commands import Commands, words_of
from demo_corpus import SOURCES, write_raw
from demo_report import Figures, PeakMemory, plot_losses, read_figures

from gpt_oss_lite.config import load_recipe
from gpt_oss_lite.training.checkpoint import CHECKPOINTS, CheckpointManager
from shared_data.console import run_app, say
from shared_data.files import write_atomic

SCRIPTS = Path(__file__).resolve().parent
RECIPE = SCRIPTS.parent / "configs" / "quickstart.yaml"
DATA = Path("data/quickstart")
CORPUS = DATA / "pretrain_chinchilla"
# The command that made the corpus, written when the corpus was made and checked.
PREPARED = DATA / "prepared.txt"
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
    load_recipe(RECIPE, overrides or [])  # what is wrong with it is said before minutes of preparation
    started, commands = time.monotonic(), Commands()
    went_on = DATA.exists() or RUN.exists()
    with PeakMemory() as memory:
        prepare_corpus(commands, total_tokens, source_bytes)
        training = train(commands, overrides or [])
        samples = draw_samples(commands)
        figures = read_figures(RUN)
        if is_older(PLOT, newest_meta()):
            plot_losses(RUN, PLOT)
    only = " for what an earlier demo had left to do" if went_on else ""
    summarise(figures, samples, training, f"{time.monotonic() - started:.0f} s{only}", memory.peak_bytes)
    if figures.last_bpb > LARGEST_RATIO * figures.first_bpb:
        say(f"error: held-out bits per byte should fall to {LARGEST_RATIO:.0%} of the first value at least")
        return 1
    return 0


def prepare_corpus(commands: Commands, total_tokens: int | None, source_bytes: int | None) -> None:
    """Raw text from the installed packages, through the four stages, and checked."""
    write_raw(DATA / "sources", source_bytes)
    settings = [SCRIPTS / "demo_mixture.yaml", SCRIPTS / "demo_data.yaml"]
    sizes = ["--total-tokens", str(total_tokens)] if total_tokens else []
    # The demo's own folder: another size, or other installed packages, may replace what is in it.
    command: list[str | Path] = ["prepare", "--mixture", settings[0], "--data-config", settings[1], "--data-root", DATA]
    command += [*sizes, "--allow-changed"]
    inputs = [*settings, *(DATA / "sources" / f"{source}.jsonl" for source in SOURCES)]
    if (
        (CORPUS / "manifest.json").exists()
        and not any(is_older(PREPARED, path) for path in inputs)
        and PREPARED.read_text() == words_of(command)
    ):
        say(f"already done: the corpus {CORPUS}, prepared and verified")
        return
    commands.run(*command)
    commands.run("verify", CORPUS)
    write_atomic(PREPARED, words_of(command))


def train(commands: Commands, overrides: list[str]) -> Sequence[str | Path]:
    """Train half of the steps, then go on from the checkpoint as after any stop; the command of the whole run."""
    recipe = load_recipe(RECIPE, overrides)
    half = recipe.training.total_steps // 2
    settings = [word for override in overrides for word in ("--set", override)]
    command: list[str | Path] = ["pretrain", "--config", RECIPE, "--out", RUN, "--seed", "0", *settings]
    command.append("--auto-resume")
    done = newest_step()
    if done < half:
        commands.run(*command, "--max-steps", str(half))
        say("the run was stopped on purpose; now it goes on from its checkpoint, as if it had never stopped")
    commands.run(*command)
    return command


def newest_step() -> int:
    """Step of the newest complete checkpoint, 0 without one."""
    return CheckpointManager(RUN / CHECKPOINTS).latest_step() or 0


def newest_meta() -> Path:
    """The file that the newest checkpoint was finished with."""
    return RUN / CHECKPOINTS / f"meta_step_{newest_step()}.json"


def draw_samples(commands: Commands) -> str:
    """Continuations of one prompt, from greedy to free; kept in a file beside the run."""
    if not is_older(SAMPLES, newest_meta()):
        say(f"already done: the samples {SAMPLES}")
    else:
        parts = []
        for temperature in TEMPERATURES:
            text = commands.run("generate", "--checkpoint", RUN, "--prompt", PROMPT, "--temperature", str(temperature),
                                "--max-new-tokens", str(NEW_TOKENS), "--seed", "0", keep_output=True)  # fmt: skip
            parts.append(f"--- temperature {temperature}\n{text.rstrip()}\n")
        write_atomic(SAMPLES, "".join(parts))
    return SAMPLES.read_text()


def is_older(made: Path, source: Path) -> bool:
    """Whether a file is missing or older than what it is made from."""
    return not made.exists() or made.stat().st_mtime < source.stat().st_mtime


def summarise(figures: Figures, samples: str, training: Sequence[str | Path], duration: str, peak_bytes: int) -> None:
    """Say what was learnt and where everything is."""
    print(f"\n{samples}")
    print(f"corpus    {CORPUS} (stand-ins for the real mixture: see scripts/demo_corpus.py)")
    print(f"run       {RUN} (config.yaml, metrics.jsonl, events.jsonl, checkpoints/)")
    print(f"samples   {SAMPLES}")
    print(f"plot      {PLOT}")
    print(f"again     {words_of(training)}")
    print(f"ask       {words_of(['generate', '--checkpoint', RUN, '--prompt', PROMPT])}")
    print(f"time      {duration}, peak RSS of all processes {peak_bytes / 1e9:.2f} GB")
    print(f"val_bpb   first={figures.first_bpb:.4f} last={figures.last_bpb:.4f}")


if __name__ == "__main__":
    sys.exit(run_app(app, prog_name="demo.py"))
