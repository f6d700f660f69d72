"""Recipes as files: YAML with overrides in, YAML as resolved out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt_oss_lite.config.shipped import find_recipe
from gpt_oss_lite.config.training import Recipe
from shared_data.errors import UserError
from shared_data.yaml_files import (
    check_config,
    dump_yaml,
    known_keys,
    nearest,
    nearest_of,
    parse_yaml,
    read_yaml_mapping,
    show,
)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        path: YAML file, or the name of a recipe that comes with the package.
        overrides: `block.key=value` each, the value in YAML; a later one wins.

    Raises:
        UserError: not YAML, an unknown or repeated key, a wrong type, a value out of range or an inconsistent pair. One
            line that names the file or the option, the key, the value and what is allowed.
        OSError: the file cannot be read.
    """
    content = read_yaml_mapping(find_recipe(Path(path)))
    options = {}
    for override in overrides:
        options[_apply(override, content)] = f"--set {override}"
    return check_config(Recipe, content, str(path), options)


def dump_recipe(recipe: Recipe) -> str:
    """YAML of every key as resolved; load_recipe of it gives an equal recipe."""
    return dump_yaml(recipe.model_dump(mode="json"))


def _apply(override: str, content: dict[str, Any]) -> str:
    """Set one `block.key=value` in a recipe's content and return the dotted key."""
    option = f"--set {override}"
    key, separator, text = override.partition("=")
    if not separator or not all(key.split(".")):
        raise UserError(f"{option}: it must have the form block.key=value, e.g. --set training.lr=3e-4")
    *blocks, name = key.split(".")
    if not blocks and name not in Recipe.model_fields:
        raise UserError(f"{option}: {name} is not a known key; {_nearest_in_a_block(name)}")
    place: Any = content
    for depth, block in enumerate(blocks):
        if depth == 0 and block not in Recipe.model_fields:
            raise UserError(f"{option}: {block} is not a known key; {nearest(block, Recipe.model_fields)}")
        place = place.setdefault(block, {})
        if not isinstance(place, dict):
            raise UserError(f"{option}: {'.'.join(blocks[: depth + 1])} is {show(place)}: it has no keys below it")
    place[name] = parse_yaml(text, option)
    return key


def _nearest_in_a_block(name: str) -> str:
    """A hint at the key that was meant by a name without its block."""
    dotted = {key: f"{block}.{key}" for block in Recipe.model_fields for key in known_keys(Recipe, [block])}
    close = nearest_of(name, dotted, Recipe.OTHER_NAMES)
    return f"the nearest known key is {dotted[close]}" if close else "it must have the form block.key=value"
