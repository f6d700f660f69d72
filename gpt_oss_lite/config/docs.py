"""What the code knows of its keys, as pages for people: docs/configuration.md and the comments in configs/*.yaml.

    python -m gpt_oss_lite.config.docs      from the repository's root, after a change of a key or of a recipe's value

A test holds the pages to the code, so neither can fall behind.
"""

import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from gpt_oss_lite.config.base import ConfigBlock
from gpt_oss_lite.config.recipe import load_recipe
from gpt_oss_lite.config.training import Recipe
from shared_data.files import write_atomic
from shared_data.yaml_files import dump_yaml

PAGE = Path("docs/configuration.md")
RECIPES = Path("configs")

_PREFACE = """\
# Configuration

<!-- Made by `python -m gpt_oss_lite.config.docs`; edit the doc strings in gpt_oss_lite/config/ instead. -->

A recipe is one YAML file with the blocks `model`, `training` and `data`. Every key has the type, default and range
below; a key that is left out has its default. `--set block.key=value` on the command line overrides one key and may be
repeated: `--set training.lr=3e-4 --set model.window_size=null`. A run folder keeps the recipe as resolved in
`config.yaml`.

An unknown or repeated key, a wrong type, a value out of range or a pair that contradicts itself ends the command with
exit code 2 and one line that names the file or option, the key, the value, and what is allowed. A key that is set
and that another key's value leaves without effect (`muon_momentum` with `optimizer: adamw`) is named in a warning when
a run starts, and by `doctor`. Not named are a key of the file that `--set` switches off, and what a run's own
`config.yaml`, which has all keys, has in vain.

Numbers may be written as `4e-4` or `61_000`. Values follow YAML 1.2: `yes` and `on` are text, `true` and `false` are
truth values. Aliases (`*name`) are refused.
"""


def blocks() -> Iterator[tuple[str, type[ConfigBlock]]]:
    """The blocks of a recipe with their names."""
    for name, field in Recipe.model_fields.items():
        yield name, cast(type[ConfigBlock], field.annotation)


def sections(block: type[ConfigBlock]) -> dict[str, list[str]]:
    """Section title -> keys, from the comments that group the fields in a block's source."""
    grouped: dict[str, list[str]] = {"": []}
    title = ""
    for line in inspect.getsource(block).splitlines():
        if heading := re.fullmatch(r"    # ([A-Z][A-Za-z -]+)", line):
            title = heading[1]
        elif (field := re.match(r"    (\w+): ", line)) and field[1] in block.model_fields:
            grouped.setdefault(title, []).append(field[1])
    return {name: keys for name, keys in grouped.items() if keys}


def type_name(annotation: Any) -> str:
    """The type of a key in words: integer, number, text, true or false, or the choices."""
    if get_origin(annotation) is Annotated:
        return type_name(get_args(annotation)[0])
    if get_origin(annotation) is list:
        keys = ", ".join(get_args(annotation)[0].model_fields)
        return f"list of {{{keys}}}"
    if get_origin(annotation) is Literal:
        return " | ".join(str(choice) for choice in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join(type_name(option) for option in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"list of {len(get_args(annotation))} numbers"
    return {int: "integer", float: "number", str: "text", bool: "true | false", types.NoneType: "null"}[annotation]


def value_text(value: Any) -> str:
    """A value as a person writes it in a recipe: 4e-4, null, [0.9, 0.95]."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(value_text(item) for item in value)}]"
    if isinstance(value, float):
        return f"{Decimal(repr(value)):e}" if 0 < abs(value) < 1e-3 else repr(value).removesuffix(".0")
    return dump_yaml(value).removesuffix("\n...\n").rstrip("\n")


def range_text(field: FieldInfo) -> str:
    """The range of a key: `> 0`, `0 ... 1`, or nothing."""
    bounds = {}
    for part in field.metadata:
        for sign, kind, name in ((">", annotated_types.Gt, "gt"), (">=", annotated_types.Ge, "ge"),
                                 ("<", annotated_types.Lt, "lt"), ("<=", annotated_types.Le, "le")):  # fmt: skip
            if isinstance(part, kind):
                bounds[sign] = value_text(getattr(part, name))
    return ", ".join(f"{sign} {bound}" for sign, bound in bounds.items())


def default_text(field: FieldInfo) -> str:
    """The default of a key, or `required`."""
    return "required" if field.is_required() else value_text(field.default)


def configuration_page() -> str:
    """The text of docs/configuration.md."""
    return _PREFACE + "".join(_block_page(name, block) for name, block in blocks())


def _block_page(name: str, block: type[ConfigBlock]) -> str:
    lines = [f"\n## {name}\n", (block.__doc__ or "").strip()]
    for title, keys in sections(block).items():
        lines += [
            f"\n### {title}\n" if title else "",
            "| key | type | default | range | meaning |",
            "|---|---|---|---|---|",
        ]
        for key in keys:
            entry = block.model_fields[key]
            cells = (
                f"`{key}`",
                type_name(entry.annotation),
                f"`{default_text(entry)}`",
                range_text(entry),
                meaning(entry),
            )
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def meaning(field: FieldInfo) -> str:
    """The doc string of a key on one line."""
    return " ".join((field.description or "").split())


def commented_recipe(recipe: Recipe, header: str) -> str:
    """A recipe with every key and, above each, its meaning, type, default and range.

    Args:
        recipe: the values.
        header: comment lines for the top of the file.
    """
    lines = [header.rstrip("\n")]
    for name, block in blocks():
        lines += ["", "", f"{name}:"]
        for title, keys in sections(block).items():
            lines += ["", f"  # ---- {title} ----"] if title else []
            for key in keys:
                lines += _key_lines(key, block.model_fields[key], getattr(getattr(recipe, name), key))
    return "\n".join(lines) + "\n"


def _key_lines(key: str, field: FieldInfo, value: Any) -> Iterator[str]:
    default = default_text(field)
    parts = (type_name(field.annotation), default if default == "required" else f"default {default}", range_text(field))
    allowed = f"[{'; '.join(part for part in parts if part)}]"
    lines = textwrap.wrap(meaning(field), 116)
    if len(lines[-1]) + len(allowed) < 116:
        lines[-1] += f" {allowed}"
    else:
        lines.append(allowed)
    yield from (f"  # {line}" for line in lines)
    yield f"  {key}: {value_text(value)}"


def pages() -> dict[Path, str]:
    """Every page that is made from the code: path from the repository's root -> text. Recipes keep their header."""
    made = {PAGE: configuration_page()}
    for path in sorted(RECIPES.glob("*.yaml")):
        header = "".join(re.findall(r"\A(?:#.*\n)+", path.read_text()))
        made[path] = commented_recipe(load_recipe(path), header)
    return made


if __name__ == "__main__":
    for page, text in pages().items():
        write_atomic(page, text)
        print(page)
