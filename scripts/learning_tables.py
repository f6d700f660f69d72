"""From results.json of scripts/learning.py to the tables and pictures of docs/learning.md.

A part of the page between the lines `<!-- NAME -->` and `<!-- end -->` is written anew where the results have what it
says, and stays as it is where they have not. Pictures likewise.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from learning_long import (
    LONG,
    cells_of,
    draw_passkeys,
    found_of,
    has_long,
    long_passkeys,
    long_positions,
    picture_of,
    surprise_of,
)
from learning_page import Results, answered, has, image, left_where_incomplete, picture, prose, replaced, table
from learning_plan import ABLATIONS

from gpt_oss_lite.training.flops import format_mfu
from shared_data.files import write_atomic

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
FP32 = "gpt-oss-fp32"


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
    names = {key: name for key, (name, _) in MODELS.items()}
    if all(f"{FP32}-{seed}" in results for seed in SEEDS):
        names[FP32] = "ours, GPT-OSS's variant, residual stream in fp32"
    for key, name in names.items():
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
    speed, mfu = speed_of(result)
    imbalance = imbalance_of(result)
    steps, tokens = rows[-1]["step"], rows[-1]["tokens"]
    said = (
        f"{steps} steps, {tokens / 1e6:.1f} M tokens ({rows[-1]['epoch'] + 1} epochs begun), "
        f"{result['seconds']:.0f} s with start, evaluations and questions; {speed:,.0f} tokens/s, MFU {mfu}, peak "
        f"{peak_of(result):.1f} GiB. At the end the busiest expert of the worst layer has "
        f"{imbalance.max():.2f} times its share (aimed for: at most 1.5), {imbalance.mean():.2f} in the mean over "
        f"layers. Steps skipped: {result['skips']}."
    )
    return [*lines, "", *prose(said), "", image("real.svg", "training and held-out loss")]


def speed_of(result: Mapping[str, Any]) -> tuple[float, str]:
    """Tokens per second in the median over a run's rows, and MFU as it is written."""
    settled = [row for row in result["rows"] if row["step"] > 1]
    shares = [row["mfu"] for row in settled if row["mfu"] is not None]
    speed = float(np.median([row["tokens_per_s"] for row in settled]))
    return speed, format_mfu(float(np.median(shares)) if shares else None)


def imbalance_of(result: Mapping[str, Any]) -> np.ndarray:
    """Of each layer the busiest expert's load, in shares of an expert, at the end of a run."""
    load = np.array(result["load"])
    return np.asarray(load.max(axis=1) / load.mean(axis=1))


def peak_of(result: Mapping[str, Any]) -> float:
    """GiB."""
    return float(max(row["memory_gib"] for row in result["rows"]))


def draw_real(results: Results, path: Path) -> None:
    """Training and held-out loss."""
    result = results["real"]
    with picture(path) as axes:
        axes.plot([row["step"] for row in result["rows"]], losses(result), color="C0", label="training")
        axes.plot([one["step"] for one in result["evaluations"]], [one["loss"] for one in result["evaluations"]], "o-",
                  color="C1", label="held out")  # fmt: skip
        axes.set(xlabel="step", ylabel="nats per token")


def passkeys(results: Results) -> list[str]:
    """Found of asked and the surprise at the key: a row for each length, a column for each depth."""
    cells = cells_of(results["real"])
    depths = sorted({cell.depth for cell in cells})
    rows = []
    for length in sorted({cell.length for cell in cells}):
        own = {cell.depth: cell for cell in cells if cell.length == length}
        rows.append([f"{length:,}", *(f"{own[depth].found} of {own[depth].trials}; {own[depth].nats_per_token:.2f}"
                                      for depth in depths)])  # fmt: skip
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


# The winners at the real run's size

BOTH = {"winners-recipe": ("the recipe", "C0"), "real-muon-wsd": ("Muon and WSD", "C1")}
"""Their names on the page and colours."""


def winners(results: Results) -> list[str]:
    """Both runs side by side: losses on the windows that training evaluates, then by source, and what they cost."""
    theirs, ours = (results[name] for name in BOTH)
    before, after = theirs["final"], ours["final"]
    rows = [
        [name, f"{one['loss']:.4f}", f"{other['loss']:.4f}", f"{other['loss'] - one['loss']:+.4f}",
         f"{one['bits_per_byte']:.4f}", f"{other['bits_per_byte']:.4f}"]
        for name, one, other in [*((name, own, after["by_source"][name]) for name, own in before["by_source"].items()),
                                 ("all", before, after)]
    ]  # fmt: skip
    names = [name for name, _ in BOTH.values()]
    header = ["at the end", *(f"loss, {name}" for name in names), "", *(f"bits per byte, {name}" for name in names)]
    at_theirs, at_ours = ({one["step"]: one["loss"] for one in run["evaluations"]} for run in (theirs, ours))
    during = [[f"{step:,}", f"{at_theirs[step]:.4f}", f"{at_ours[step]:.4f}", f"{at_ours[step] - at_theirs[step]:+.4f}"]
              for step in sorted(at_theirs.keys() & at_ours.keys()) if step]  # fmt: skip
    return [
        *table(["evaluated at step", *(f"loss, {name}" for name in names), ""], during), "",
        *table(header, rows), "", *table(["", *names], run_figures([theirs, ours])), "",
        image("winners.svg", "training and held-out loss of both runs by tokens"),
    ]  # fmt: skip


def run_figures(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A column for each run: length, speed, memory, balance, passkeys."""
    rows = {
        "steps": [f"{run['rows'][-1]['step']:,}" for run in runs],
        "tokens": [f"{run['rows'][-1]['tokens'] / 1e6:.1f} M" for run in runs],
        "tokens/s": [f"{speed_of(run)[0]:,.0f}" for run in runs],
        "MFU": [speed_of(run)[1] for run in runs],
        "peak memory": [f"{peak_of(run):.1f} GiB" for run in runs],
        "worst layer's busiest expert": [f"{imbalance_of(run).max():.2f}" for run in runs],
        "the same, mean over layers": [f"{imbalance_of(run).mean():.2f}" for run in runs],
        "steps skipped": [str(run["skips"]) for run in runs],
    }
    if all(answered(run, "passkey_lengths") for run in runs):
        of_runs = [cells_of(run) for run in runs]
        for length in sorted({cell.length for cells in of_runs for cell in cells}):
            rows[f"passkeys in {length:,} tokens; nats per token"] = [
                f"{found_of(cells, length)}; {surprise_of(cells, length)}" for cells in of_runs
            ]
    return [[name, *values] for name, values in rows.items()]


def draw_winners(results: Results, path: Path) -> None:
    """Training and held-out loss of both by tokens."""
    with picture(path) as axes:
        for key, (name, colour) in BOTH.items():
            result = results[key]
            rows, evaluations = result["rows"], result["evaluations"]
            millions = rows[-1]["tokens"] / rows[-1]["step"] / 1e6
            axes.plot([row["tokens"] / 1e6 for row in rows], losses(result), color=colour, alpha=0.5,
                      label=f"{name}, training")  # fmt: skip
            axes.plot([one["step"] * millions for one in evaluations], [one["loss"] for one in evaluations], "o-",
                      color=colour, label=f"{name}, held out")  # fmt: skip
        axes.set(xlabel="million tokens", ylabel="nats per token")


SIX = [f"{key}-{seed}" for key in MODELS for seed in SEEDS]
PARTS: dict[str, tuple[Callable[[Results], list[str]], Callable[[Results], bool]]] = {
    "corpus": (corpus, has("real", answer="held_out")),
    "parity": (parity, has(*SIX)),
    "real": (real, has("real", answer="held_out")),
    "passkeys": (passkeys, has("real", answer="passkey_lengths")),
    "samples": (samples, has("real", answer="samples")),
    "exported": (exported, has("real", answer="export")),
    "ablations": (ablations, has("baseline-0", "baseline-1")),
    "winners": (winners, has(*BOTH)),
    "long-passkeys": (long_passkeys, has_long("passkey_lengths")),
    "long-positions": (long_positions, has_long("positions")),
}
PICTURES: dict[str, tuple[Callable[[Results, Path], None], Callable[[Results], bool]]] = {
    "parity.svg": (draw_parity, has(*SIX)),
    "real.svg": (draw_real, has("real")),
    "winners.svg": (draw_winners, has(*BOTH)),
    **{picture_of(name): (partial(draw_passkeys, name), has(name, answer="passkey_lengths")) for name in LONG},
}  # fmt: skip
