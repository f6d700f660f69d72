"""Every public module, class, function and method says what it is."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("gpt_oss_lite", "shared_data", "training", "data")
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def undocumented(source: str) -> list[str]:
    """The names without a docstring; those that begin with an underscore are nobody's business."""
    tree = ast.parse(source)
    return [*(["the module"] if ast.get_docstring(tree) is None else []), *_within(tree.body, "")]


def _within(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if not (ast.get_docstring(node) or "").strip():
                yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from _within(node.body, f"{prefix}{node.name}.")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_public_name_has_a_docstring(path):
    assert undocumented(path.read_text()) == []


def test_what_is_missing_is_seen():
    source = "class A:\n    '''A.'''\n    def f(self): ...\n    def _g(self): ...\ndef h():\n    ''' '''\n"
    assert undocumented(source) == ["the module", "A.f", "h"]
