"""From results.json of scripts/learning.py to the tables and pictures of docs/learning.md.

A part of the page between the lines `<!-- NAME -->` and `<!-- end -->` is written anew where the results have what it
says, and stays as it is where they have not. Pictures likewise.
"""

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from learning_plan import ABLATIONS

from gpt_oss_lite.inference.passkey import Cell, heat_map
from gpt_oss_lite.pictures import save_picture
from gpt_oss_lite.training.flops import format_mfu
from shared_data.console import say
from shared_data.errors import UserError, require_extra
from shared_data.files import write_atomic

Results = Mapping[str, Any]
SMOOTHED_STEPS = 20


def write_page(content: Mapping[str, Any], page: Path) -> list[Path]:
    """Write the parts and pictures that the results have; the files written.

    Raises:
        UserError: the page has not just one place for a part.
    """
    results: Results = {name: result for name, result in content["results"].items() if "error" not in result}
    pictures = page.parent / page.stem
    text = page.read_text()
    written = []
    for name, (part, needed) in PARTS.items():
        with left_where_incomplete(name):
            if not needed(results):
                continue
            text = replaced(text, name, part(results), page)
    for name, (draw, needed) in PICTURES.items():
        with left_where_incomplete(name):
            if not needed(results):
                continue
            pictures.mkdir(exist_ok=True)
            draw(results, pictures / name)
            written.append(pictures / name)
    write_atomic(page, text)
    return [page, *written]


@contextmanager
def left_where_incomplete(name: str) -> Iterator[None]:
    """What is written inside stays as it is, with a line that says so, where the results lack what it wants."""
    try:
        yield
    except UserError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        say(f"{name} stays as it is: the results lack something ({type(error).__name__}: {error})")


def replaced(text: str, name: str, lines: Sequence[str], page: Path) -> str:
    """The page's text with other lines in one part."""
    new, count = re.subn(
        rf"^(<!-- {name} -->\n).*?^(<!-- end -->)$",
        lambda match: match[1] + "\n".join(lines) + "\n" + match[2],
        text,
        flags=re.DOTALL | re.MULTILINE,
    )
    if count != 1:
        marks = f"<!-- {name} --> and <!-- end -->"
        raise UserError(f"--page {page}: it has {count} parts between {marks}, it must have one")
    return new


def image(name: str, about: str) -> str:
    """A picture of the page."""
    return f"![{about}](learning/{name})"


def prose(said: str) -> list[str]:
    """A paragraph in lines."""
    return textwrap.wrap(said, 120, break_long_words=False, break_on_hyphens=False)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table; figures to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return [f"| {' | '.join(map(str, row))} |" for row in (header, rule, *rows)]


# The text


def corpus(results: Results) -> list[str]:
    """Tokens of the corpus, and of what was held out, by source."""
    about, held_out = results["real"]["corpus"], results["real"]["answers"]["held_out"]
    rows = [
        [name, f"{own['documents']:,}", f"{own['bytes'] / 1e6:.1f} MB", f"{own['tokens']:,}",
         f"{held_out['by_source'][name]['tokens']:,}"]
        for name, own in about["sources"].items()
    ]  # fmt: skip
    lines = table(["source", "documents", "text", "tokens", "held-out tokens"], rows)
    return [*lines, "", f"Training tokens: {about['total_tokens']:,}; held out: {held_out['tokens']:,}."]


# Parity

SEEDS = (0, 1)
MODELS = {"transformers": ("transformers' GptOss", "C1"), "gpt-oss": ("ours, GPT-OSS's variant", "C0"),
          "recipe": ("our recipe", "C2")}  # fmt: skip
"""Their names on the page and colours."""


def of_both_seeds(results: Results, name: str) -> list[Mapping[str, Any]]:
    """What an experiment gave with each seed."""
    return [results[f"{name}-{seed}"] for seed in SEEDS]


def losses(result: Mapping[str, Any]) -> np.ndarray:
    """Training loss of each step."""
    return np.array([row["ce"] for row in result["rows"]])


def smoothed(values: np.ndarray) -> np.ndarray:
    """Mean over SMOOTHED_STEPS, one value for each step that has so many."""
    width = min(SMOOTHED_STEPS, len(values))
    return np.convolve(values, np.full(width, 1 / width), mode="valid")


def parity(results: Results) -> list[str]:
    """Final losses of the three models, and how far apart their curves lie."""
    rows = []
    for key, (name, _) in MODELS.items():
        pair = of_both_seeds(results, key)
        ends = [f"{smoothed(losses(one))[-1]:.4f}" for one in pair]
        held_out = [f"{one['final']['loss']:.4f}" for one in pair]
        bits = np.mean([one["final"]["bits_per_byte"] for one in pair])
        rows.append([name, *ends, *held_out, f"{bits:.4f}"])
    lines = table(["", "loss, seed 0", "seed 1", "held out, seed 0", "seed 1", "bits per byte"], rows)
    theirs, ours = of_both_seeds(results, "transformers"), of_both_seeds(results, "gpt-oss")
    apart = [np.abs(smoothed(losses(a)) - smoothed(losses(b))) for a, b in zip(theirs, ours, strict=True)]
    spread = np.abs(smoothed(losses(theirs[0])) - smoothed(losses(theirs[1])))
    final = [abs(a["final"]["loss"] - b["final"]["loss"]) for a, b in zip(theirs, ours, strict=True)]
    seeds = abs(theirs[0]["final"]["loss"] - theirs[1]["final"]["loss"])
    said = (
        f"Losses are means of the last {SMOOTHED_STEPS} steps. On the same windows and from the same weights the two "
        f"curves (means of {SMOOTHED_STEPS} steps) lie {np.mean(apart):.4f} apart in the mean and {np.max(apart):.4f} "
        f"at most; two seeds of transformers' model {spread.mean():.4f} and {spread.max():.4f}. Held out they differ "
        f"by {final[0]:.4f} and {final[1]:.4f}, two seeds by {seeds:.4f}."
    )
    return [*lines, "", *prose(said), "", image("parity.svg", "training loss of the three models")]


def draw_parity(results: Results, path: Path) -> None:
    """Smoothed curves of the three models, two seeds each."""
    with picture(path) as axes:
        for key, (name, colour) in MODELS.items():
            for seed, line, result in zip(SEEDS, ("-", "--"), of_both_seeds(results, key), strict=True):
                curve = smoothed(losses(result))
                axes.plot(
                    np.arange(len(curve)) + SMOOTHED_STEPS, curve, line, color=colour, label=f"{name}, seed {seed}"
                )
        axes.set(xlabel="step", ylabel=f"loss, mean of {SMOOTHED_STEPS} steps")


# The real run


def real(results: Results) -> list[str]:
    """Held-out figures by source, and what the run was."""
    result = results["real"]
    held_out, rows = result["answers"]["held_out"], result["rows"]
    sources = [*held_out["by_source"].items(), ("all", held_out)]
    lines = table(
        ["held out", "tokens", "loss", "perplexity", "bits per byte"],
        ([name, f"{own['tokens']:,}", f"{own['loss']:.4f}", f"{own['perplexity']:.2f}", f"{own['bits_per_byte']:.4f}"]
         for name, own in sources),
    )  # fmt: skip
    settled = [row for row in rows if row["step"] > 1]
    speed = np.median([row["tokens_per_s"] for row in settled])
    shares = [row["mfu"] for row in settled if row["mfu"] is not None]
    mfu = format_mfu(float(np.median(shares)) if shares else None)
    load = np.array(result["load"])
    imbalance = load.max(axis=1) / load.mean(axis=1)
    steps, tokens = rows[-1]["step"], rows[-1]["tokens"]
    said = (
        f"{steps} steps, {tokens / 1e6:.1f} M tokens ({rows[-1]['epoch'] + 1} epochs begun), "
        f"{result['seconds']:.0f} s with start, evaluations and questions; {speed:,.0f} tokens/s, MFU {mfu}, peak "
        f"{max(row['memory_gib'] for row in rows):.1f} GiB. At the end the busiest expert of the worst layer has "
        f"{imbalance.max():.2f} times its share (aimed for: at most 1.5), {imbalance.mean():.2f} in the mean over "
        f"layers. Steps skipped: {result['skips']}."
    )
    return [*lines, "", *prose(said), "", image("real.svg", "training and held-out loss")]


def draw_real(results: Results, path: Path) -> None:
    """Training and held-out loss."""
    result = results["real"]
    with picture(path) as axes:
        axes.plot([row["step"] for row in result["rows"]], losses(result), color="C0", label="training")
        axes.plot([one["step"] for one in result["evaluations"]], [one["loss"] for one in result["evaluations"]], "o-",
                  color="C1", label="held out")  # fmt: skip
        axes.set(xlabel="step", ylabel="nats per token")


def passkeys_of(results: Results, name: str) -> list[Cell]:
    """Cells of an experiment."""
    fields = Cell.__dataclass_fields__
    return [Cell(**{key: cell[key] for key in fields}) for cell in results[name]["answers"]["passkey_lengths"]]


def passkeys(results: Results) -> list[str]:
    """Found of asked, by length and depth."""
    return passkey_table(passkeys_of(results, "real"))


def passkey_table(cells: Sequence[Cell]) -> list[str]:
    """A row for each length, a column for each depth."""
    depths = sorted({cell.depth for cell in cells})
    rows = []
    for length in sorted({cell.length for cell in cells}):
        own = {cell.depth: cell for cell in cells if cell.length == length}
        rows.append([f"{length:,}", *(f"{own[depth].found} of {own[depth].trials}" for depth in depths)])
    return table(["tokens", *(f"{depth:.0%}" for depth in depths)], rows)


def samples(results: Results) -> list[str]:
    """The texts, as they came; but a line that begins as the page's marks do is indented, so that it is none."""
    lines = []
    for sample in results["real"]["answers"]["samples"]:
        text = sample["prompt"] + sample["text"]
        fence = "`" * (1 + max(map(len, ["``", *re.findall("`+", text)])))
        shown = [f" {line}" if line.startswith("<!--") else line for line in text.splitlines()]
        lines += [f"Temperature {sample['temperature']:g}:", "", f"{fence}text", *shown, fence, ""]
    return lines


def exported(results: Results) -> list[str]:
    """Our loss and transformers' on the export."""
    own = results["real"]["answers"]["export"]
    said = (
        f"The export (`{own['layout']}`, {own['bytes']:,} bytes, bf16) loaded by transformers has a loss of "
        f"{own['transformers']:.4f} on eight held-out windows of 1,024 tokens; the checkpoint has {own['ours']:.4f}. "
        f"Both would write the same next token at {own['same_choice']:.2%} of the positions."
    )
    return prose(said)


# Ablations


def ablations(results: Results) -> list[str]:
    """Held-out loss of each change, and how far it is from the baseline."""
    done = [name for name in ABLATIONS if all(f"{name}-{seed}" in results for seed in SEEDS)]
    finals = {name: np.array([one["final"]["loss"] for one in of_both_seeds(results, name)]) for name in done}
    base = finals["baseline"]
    spread = max(abs(own[0] - own[1]) for own in finals.values())
    rows = []
    for name, own in finals.items():
        by_seed = own - base
        larger = min(abs(by_seed)) > spread and by_seed[0] * by_seed[1] > 0
        said = "within the noise" if not larger else "better" if by_seed.mean() < 0 else "worse"
        load = np.mean([one["rows"][-1]["imbalance"] for one in of_both_seeds(results, name)])
        rows.append([name, f"{own[0]:.4f}", f"{own[1]:.4f}", f"{by_seed.mean():+.4f}", f"{load:.2f}",
                     "" if name == "baseline" else said])  # fmt: skip
    rows.sort(key=lambda row: float(row[3]))
    header = ["change", "held out, seed 0", "seed 1", "to the baseline", "worst expert's load", ""]
    noise = (
        f"Noise: the largest difference between two seeds of one recipe, {spread:.4f}. A change counts where both "
        "seeds move the same way by more."
    )
    return [*table(header, rows), "", *prose(noise)]


# Long context

LONG = {"long-before": "trained at 4,096, scale as needed", "long-extended": "after the extension",
        "long-scale-32": "scale 32 from the start, 4,096"}  # fmt: skip


def long_passkeys(results: Results) -> list[str]:
    """Share of passkeys found over all depths, by length."""
    done = {name: passkeys_of(results, name) for name in LONG if name in results}
    lengths = sorted({cell.length for cells in done.values() for cell in cells})
    rows = []
    for name, cells in done.items():
        shares = []
        for length in lengths:
            own = [cell for cell in cells if cell.length == length]
            shares.append(f"{sum(c.found for c in own)} of {sum(c.trials for c in own)}" if own else "-")
        rows.append([LONG[name], *shares])
    lines = table(["passkeys found", *(f"{length:,}" for length in lengths)], rows)
    return [*lines, "", *(image(picture_of(name), f"passkeys by length and depth: {LONG[name]}") for name in done)]


def long_positions(results: Results) -> list[str]:
    """Loss by position in long windows."""
    done = {name: results[name]["answers"]["positions"] for name in LONG if name in results}
    spans = [(span["start"], span["stop"]) for span in next(iter(done.values()))]
    rows = [[f"{start:,} to {stop:,}", *(f"{spans_of[index]['loss']:.4f}" for spans_of in done.values())]
            for index, (start, stop) in enumerate(spans)]  # fmt: skip
    return table(["position", *(LONG[name] for name in done)], rows)


def picture_of(name: str) -> str:
    """File of an experiment's heat map."""
    return f"passkeys-{name.removeprefix('long-')}.svg"


def draw_passkeys(name: str, title: str) -> Callable[[Results, Path], None]:
    """The heat map of an experiment."""
    return lambda results, path: heat_map(passkeys_of(results, name), path, title)


@contextmanager
def picture(path: Path) -> Iterator[Any]:
    """A pair of axes to draw on, and then a file."""
    figure_module = require_extra("matplotlib.figure", "plot")
    figure = figure_module.Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    yield axes
    axes.grid(alpha=0.3)
    axes.legend()
    save_picture(figure, path)


def has(*names: str, answer: str | None = None) -> Callable[[Results], bool]:
    """Whether results have experiments, and an answer that is no error."""

    def check(results: Results) -> bool:
        there = all(name in results for name in names)
        return there and (answer is None or all(answered(results[name], answer) for name in names))

    return check


def answered(result: Mapping[str, Any], answer: str) -> bool:
    """Whether a question has an answer that is no error."""
    found = result.get("answers", {}).get(answer)
    return bool(found) and not (isinstance(found, dict) and "error" in found)


def has_long(answer: str) -> Callable[[Results], bool]:
    """Whether any of the long-context experiments has an answer, and none an error."""
    return lambda results: (
        any(name in results for name in LONG)
        and all(answered(results[name], answer) for name in LONG if name in results)
    )


SIX = [f"{key}-{seed}" for key in MODELS for seed in SEEDS]
PARTS: dict[str, tuple[Callable[[Results], list[str]], Callable[[Results], bool]]] = {
    "corpus": (corpus, has("real", answer="held_out")),
    "parity": (parity, has(*SIX)),
    "real": (real, has("real", answer="held_out")),
    "passkeys": (passkeys, has("real", answer="passkey_lengths")),
    "samples": (samples, has("real", answer="samples")),
    "exported": (exported, has("real", answer="export")),
    "ablations": (ablations, has("baseline-0", "baseline-1")),
    "long-passkeys": (long_passkeys, has_long("passkey_lengths")),
    "long-positions": (long_positions, has_long("positions")),
}
PICTURES: dict[str, tuple[Callable[[Results, Path], None], Callable[[Results], bool]]] = {
    "parity.svg": (draw_parity, has(*SIX)),
    "real.svg": (draw_real, has("real")),
    **{picture_of(name): (draw_passkeys(name, title), has(name, answer="passkey_lengths"))
       for name, title in LONG.items()},
}  # fmt: skip
