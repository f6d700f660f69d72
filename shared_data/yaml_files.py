"""YAML as people mean it, and errors of typed configuration as one line. Shared by recipes and pipeline configuration.

PyYAML follows YAML 1.1, where `4e-4` is text, `010` is 8, `1:30` is 90 and the later of two equal keys wins silently.
Here scalars follow YAML 1.2's core schema (plus `_` between digits), equal keys are refused, and so are aliases: a page
of nested aliases expands to gigabytes, and no configuration of ours needs them.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from shared_data.errors import UserError


class ConfigBlock(BaseModel):
    """A block of a configuration file: strict types, no unknown key, immutable once made.

    Wrong input raises pydantic's ValidationError, which is a ValueError. The doc string under a field says what it is.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    OTHER_NAMES: ClassVar[Mapping[str, str]] = {}
    """Of a whole file: keys as other programs call them, at any depth, and as they are called here."""


Block = TypeVar("Block", bound=BaseModel)

# (tag, pattern, first characters): YAML 1.2, section 10.3.2.
_SCALARS = [
    ("tag:yaml.org,2002:null", r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
]


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars, without equal keys and without aliases."""

    yaml_implicit_resolvers: dict = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(None, None, "aliases are not allowed here", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"a key must be text, not {key}", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key} is there twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what _Loader would not read back as text."""

    yaml_implicit_resolvers: dict = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_sequence(self, tag: str, sequence: Iterable, flow_style: bool | None = None) -> yaml.SequenceNode:
        return super().represent_sequence(tag, sequence, flow_style=True)


for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})$"), _first)
    _Dumper.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})$"), _first)


def parse_yaml(text: str | bytes, origin: str) -> Any:
    """The value of one YAML document, None when it is empty.

    Raises:
        UserError: the text is not YAML that we take; the message begins with `origin` and has the line.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{origin}, line {mark.line + 1}" if mark else origin
        raise UserError(f"{where}: {error.problem or error.context}") from None
    except RecursionError:
        raise UserError(f"{origin}: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{origin}: not YAML: {' '.join(str(error).split())}") from None


def dump_yaml(value: Any) -> str:
    """YAML text that parse_yaml reads back as the same value. Keys keep their order."""
    # Characters beyond ASCII are escaped: PyYAML writes a bare U+0085, which it then reads as the end of a line.
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=False, default_flow_style=False)


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds.

    Raises:
        UserError: the file is empty, is not YAML, or holds something else.
        OSError: it cannot be read.
    """
    value = parse_yaml(path.read_bytes(), str(path))
    if value is None:
        raise UserError(f"{path}: the file is empty: it must hold keys and values")
    if not isinstance(value, dict):
        raise UserError(f"{path}: it holds {show(value)}: it must hold keys and values")
    return value


def load_config(block: type[Block], path: Path) -> Block:
    """Read a file as a typed block.

    Raises:
        UserError: as `read_yaml_mapping` and `check_config`.
        OSError: it cannot be read.
    """
    return check_config(block, read_yaml_mapping(path), str(path))


def check_config(
    block: type[Block], content: Mapping[str, Any], origin: str, options: Mapping[str, str] | None = None
) -> Block:
    """Make a block from keys and values.

    Args:
        block: its type.
        content: keys and values.
        origin: the file, for the error's line.
        options: key -> the command line's option that set it; such a key's error names the option, not the file.

    Raises:
        UserError: a key is unknown or missing, or a value or a pair of them is not allowed; one line.
    """
    try:
        return block.model_validate(content)
    except ValidationError as error:
        raise UserError(one_line(error, block, origin, options)) from None


def show(value: Any) -> str:
    """A value as a person would write it in YAML, on one short line."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, str):
        text = value if value.isprintable() and _reads_back(value) else repr(value)
    else:
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _reads_back(text: str) -> bool:
    """Whether a text without quotes is that text in YAML, and not a number or null."""
    try:
        return parse_yaml(text, "") == text
    except UserError:
        return False


def nearest(word: str, known: Iterable[str], other_names: Mapping[str, str] = MappingProxyType({})) -> str:
    """A hint at the known word that is meant by a mistyped one, or by another program's, as the end of a sentence."""
    known = list(known)
    if (close := nearest_of(word, known, other_names)) is not None:
        return f"the nearest known key is {close}"
    return f"the known keys are {', '.join(known)}"


def nearest_of(word: str, known: Collection[str], other_names: Mapping[str, str]) -> str | None:
    """The known word that is meant by a mistyped one, or by another program's; None where none is near."""
    if (meant := other_names.get(word.lower())) in known:
        return meant
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.5)), None)


_ALLOWED = {
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "finite_number": "a finite number",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "model_type": "a mapping of keys to values",
    "dict_type": "a mapping of keys to values",
    "list_type": "a list",
    "tuple_type": "a list",
    "string_pattern_mismatch": "text of the form {pattern}",
    "too_long": "a list of {max_length}",
    "too_short": "a list of at least {min_length}",
}


def one_line(
    error: ValidationError, block: type[BaseModel], origin: str, options: Mapping[str, str] | None = None
) -> str:
    """The first error of a validation as one line: file, key, value, and what is allowed.

    Args:
        error: what pydantic raised for `block`.
        block: the type that was validated, for the names of the known keys.
        origin: the file.
        options: key -> the command line's option that set it; such a key's error names the option, not the file.
    """
    # An unknown key comes first: a mistyped one is often also reported as a missing one.
    details = sorted(error.errors(), key=lambda detail: detail["type"] != "extra_forbidden")
    first, more = details[0], len(details) - 1
    message = _describe(first, block)
    key = message.split(" ")[0]
    by_option = [
        option
        for name, option in (options or {}).items()
        if f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.")
    ]
    if by_option:
        origin = by_option[-1]
    elif options and first["type"] == "value_error":  # a pair, of which an option may have set the other half
        origin = " ".join([origin, "with", *options.values()])
    return f"{origin}: {message}" + (f" (and {more} more)" if more else "")


def _describe(detail: Any, block: type[BaseModel]) -> str:
    """`key is value: it must be ...` for one of pydantic's error details."""
    kind, context = detail["type"], detail.get("ctx", {})
    # Of a key that takes two kinds of value, pydantic names the kind too: by our tags, which have brackets.
    place = tuple(part for part in detail["loc"] if not str(part).startswith("("))
    key = ".".join(str(part) for part in place)
    if kind == "extra_forbidden":
        return f"{key} is not a known key; {_hint(str(place[-1]), block, place[:-1])}"
    if kind == "missing":
        return f"{key} is missing"
    if kind == "value_error":  # from a validator of ours: "key is value: it must ..."
        message = str(context["error"])
        if not key:
            return message
        return f"{key}.{message}" if message.split(" ")[0] in known_keys(block, place) else f"{key}: {message}"
    if kind in _ALLOWED:
        numbers = {name: f"{value:g}" for name, value in context.items() if isinstance(value, int | float)}
        return f"{key} is {show(detail['input'])}: it must be {_ALLOWED[kind].format(**{**context, **numbers})}"
    if kind == "literal_error":
        choices = context["expected"].replace("'", "").replace("True", "true").replace("False", "false")
        return f"{key} is {show(detail['input'])}: it must be {choices}"
    return f"{key} is {show(detail['input'])}: {detail['msg']}"


def _hint(key: str, block: type[BaseModel], path: Sequence[Any]) -> str:
    elsewhere = [name for name in block.model_fields if path and key in known_keys(block, [name])]
    if elsewhere:
        return f"the nearest known key is {elsewhere[0]}.{key}"
    return nearest(key, known_keys(block, path), block.OTHER_NAMES if issubclass(block, ConfigBlock) else {})


def known_keys(block: type[BaseModel], path: Iterable[Any]) -> list[str]:
    """The keys of the block at `path` inside `block`, positions in lists included; empty when there is no block."""
    for part in path:
        if isinstance(part, str):
            found = _block_of(block.model_fields[part].annotation) if part in block.model_fields else None
            if found is None:
                return []
            block = found
    return list(block.model_fields)


def _block_of(annotation: Any) -> type[BaseModel] | None:
    """The block in a field's type: itself, or the one in list[Block] or Block | None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for found in map(_block_of, get_args(annotation)) if found), None)
