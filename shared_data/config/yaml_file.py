"""YAML files as typed configs: every error is one line that names file, key, value and what is allowed."""

import difflib
import re
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from shared_data.errors import UserError


class ConfigBlock(BaseModel):
    """A block of a config file: strict types, no unknown key, immutable once made."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


Config = TypeVar("Config", bound=ConfigBlock)


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice and takes 4e-4, without a dot, for a number (as YAML 1.2 does)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file whose top is a mapping.

    Raises:
        UserError: it is missing, unreadable, empty or not such a file.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise UserError(f"{path}: {where}{getattr(error, 'problem', None) or 'not YAML'}") from None
    if not isinstance(content, dict):
        what = "empty" if content is None else f"a {type(content).__name__}"
        raise UserError(f"{path} is {what}: it must hold keys and values")
    return content


def load_config(model: type[Config], path: Path) -> Config:
    """Read a config file and check it.

    Raises:
        UserError: see `read_yaml`; or a key is unknown, missing, or has a value that is not allowed.
    """
    return check_config(model, read_yaml(path), str(path))


def check_config(model: type[Config], content: dict[str, Any], name: str) -> Config:
    """Make a config from keys and values; `name` is the file in the error's line."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{name}: {_describe(model, error.errors(include_url=False)[0])}") from None


def _describe(model: type[BaseModel], error: ErrorDetails) -> str:
    location = error["loc"]
    key = ".".join(str(part) for part in location)
    message = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if error["type"] == "extra_forbidden":
        known = sorted(_fields_at(model, location[:-1]))
        near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{key} is {error['input']!r}, but there is no such key{hint} (known: {', '.join(known)})"
    if error["type"] == "missing":
        return f"{key} is missing"
    if error["type"] == "value_error":
        return f"{key}: {message}" if key else message
    return f"{key} is {error['input']!r}: {message.replace('Input should be', 'it must be').replace('Input', 'it', 1)}"


def _fields_at(model: type[BaseModel], location: tuple[int | str, ...]) -> set[str]:
    """The keys that a block at this place of the file may have."""
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            model = _block_of(model.model_fields[part].annotation) or model
    return set(model.model_fields)


def _block_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (list, tuple, typing.Union, types.UnionType):
        blocks = (_block_of(argument) for argument in typing.get_args(annotation))
        return next((block for block in blocks if block), None)
    return None
