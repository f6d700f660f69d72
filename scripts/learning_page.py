"""How a page's marked parts and pictures are written: what scripts/learning_tables.py is made of.

A part of a page stands between the lines `<!-- NAME -->` and `<!-- end -->`.
"""

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpt_oss_lite.pictures import save_picture
from shared_data.console import say
from shared_data.errors import UserError, require_extra

Results = Mapping[str, Any]


@contextmanager
def left_where_incomplete(name: str) -> Iterator[None]:
    """What is written inside stays as it is, with a line that says so, where the results lack what it wants."""
    try:
        yield
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
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
