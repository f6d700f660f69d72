"""The recipes that come with the package, which are known by name: `--config quickstart`."""

import difflib
from pathlib import Path

from shared_data.errors import UserError

# In a checkout a link to configs/; in a wheel a folder with copies.
FOLDER = Path(__file__).resolve().parents[1] / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """Name and file of each."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def find_recipe(path: Path) -> Path:
    """The file that a recipe's path or name stands for; what lies in the working folder goes first.

    Raises:
        UserError: there is no such file.
    """
    if path.exists() and not path.is_dir():
        return path
    known = shipped_recipes()
    if str(path) in known:
        return known[str(path)]
    if path.is_dir():
        inside = next((file for file in sorted(path.glob("*.yaml"))), path / "RECIPE.yaml")
        raise UserError(f"--config {path}: it is a folder; name the file in it, such as {inside}")
    if path.stem in known:
        hint = f"the recipe {path.stem} of the package is taken by its name alone"
    elif close := difflib.get_close_matches(path.stem, known, n=1):
        hint = f"the nearest recipe of the package is {close[0]} (`gpt-oss-lite recipes` lists them)"
    else:
        hint = "`gpt-oss-lite recipes` lists those of the package, which are taken by name"
    raise UserError(f"--config {path}: there is no such file; {hint}")


def summary(path: Path) -> str:
    """The first line of a recipe's head: for what machine it is, and what it trains."""
    first, _, _ = path.read_text().partition("\n")
    return first.removeprefix("#").strip().rstrip(".")
