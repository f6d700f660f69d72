"""The recipes that come with the package, which are known by name: `--config quickstart`."""

import re
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
        UserError: there is no such file, but a recipe of that name comes with the package.
    """
    shipped = shipped_recipes().get(path.stem)
    if shipped is None or path.is_file():
        return path
    if str(path) == path.stem:
        return shipped
    raise UserError(f"{path}: there is no such file; the recipe {path.stem} of the package is taken by its name alone")


def summary(path: Path) -> str:
    """The first sentence of a recipe's head."""
    head = re.match(r"(?:# .*\n)+", path.read_text())
    text = " ".join(line.removeprefix("# ") for line in head.group().splitlines()) if head else ""
    return re.split(r"(?<=[.?:]) ", text)[0].rstrip(".:")
