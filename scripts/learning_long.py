"""Passkeys and the long-context part of docs/learning.md: its tables and pictures, for scripts/learning_tables.py."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from learning_page import Results, answered, image, prose, table

from gpt_oss_lite.inference.passkey import Cell, heat_map

LONG = {"long-before": "trained at 4,096, scale as needed", "long-extended": "after the extension",
        "long-scale-32": "scale 32 from the start, 4,096"}  # fmt: skip
BASES = {"real": "the recipe", "winners-recipe": "the recipe", "real-muon-wsd": "the recipe with Muon and WSD"}
"""What an extension can go on from."""


def cells_of(result: Mapping[str, Any]) -> list[Cell]:
    """Passkeys that were looked for in a run's model."""
    fields = Cell.__dataclass_fields__
    return [Cell(**{key: cell[key] for key in fields}) for cell in result["answers"]["passkey_lengths"]]


def found_of(cells: Sequence[Cell], length: int) -> str:
    """Found of asked over all depths; a dash where none was asked."""
    own = [cell for cell in cells if cell.length == length]
    return f"{sum(cell.found for cell in own)} of {sum(cell.trials for cell in own)}" if own else "-"


def surprise_of(cells: Sequence[Cell], length: int) -> str:
    """Nats per token of the keys in the mean over depths; a dash where none was asked."""
    own = [cell.nats_per_token for cell in cells if cell.length == length]
    return f"{np.mean(own):.2f}" if own else "-"


def long_passkeys(results: Results) -> list[str]:
    """The base, and by length over all depths the passkeys found and the surprise at them."""
    done = {name: cells_of(results[name]) for name in LONG if name in results}
    lengths = sorted({cell.length for cells in done.values() for cell in cells})
    lines = long_base(results)
    for title, shown in (("passkeys found", found_of), ("nats per token of the key", surprise_of)):
        rows = [[LONG[name], *(shown(cells, length) for length in lengths)] for name, cells in done.items()]
        lines += [*table([title, *(f"{length:,}" for length in lengths)], rows), ""]
    return [*lines, *(image(picture_of(name), f"passkeys by length and depth: {LONG[name]}") for name in done)]


def long_base(results: Results) -> list[str]:
    """Which run the extension goes on from, where that is known."""
    bases = {results[name]["init_from"] for name in ("long-before", "long-extended") if name in results}
    if not bases:
        return []
    if len(bases) > 1:
        raise ValueError(f"the long-context experiments start from different runs: {', '.join(sorted(bases))}")
    base = bases.pop()
    said = [f"Before the extension: {BASES[base]} in {results[base]['rows'][-1]['step']:,} steps (`{base}`)."]
    if "long-extended" in results:
        last = results["long-extended"]["rows"][-1]
        said.append(f"The extension: {last['step']} steps, {last['tokens'] / 1e6:.1f} M tokens.")
    return [*prose(" ".join(said)), ""]


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


def draw_passkeys(name: str, results: Results, path: Path) -> None:
    """The heat map of an experiment."""
    heat_map(cells_of(results[name]), path, LONG[name])


def has_long(answer: str) -> Callable[[Results], bool]:
    """Whether any of the long-context experiments has an answer, and none an error."""
    return lambda results: (
        any(name in results for name in LONG)
        and all(answered(results[name], answer) for name in LONG if name in results)
    )
