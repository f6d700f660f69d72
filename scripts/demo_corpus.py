"""Raw text for `make demo`, from what the installed packages carry: no download, the same bytes on every run.

These are stand-ins for the kinds of the real mixture, and small ones: they are not FineWeb, The Stack or arXiv.

    code    sources of Python's standard library (PSF licence)
    prose   docstrings of 400 characters and more: prose about science and code, under their packages' licences
    web     README bodies from the installed packages' METADATA: what their project pages show
    maths   worked grade-school problems from reasoning-gym's gsm_symbolic (Apache-2.0)
"""

import ast
import json
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from email.parser import HeaderParser
from importlib.metadata import distributions
from pathlib import Path

from shared_data.console import progress
from shared_data.files import atomic_writer

MIN_DOCSTRING_CHARS = 400
MATHS_SEED = 20260101
# Packages that this project installs anyway and that explain themselves at length.
PROSE_PACKAGES = ("matplotlib", "networkx", "numpy", "pandas", "sympy", "torch")

Record = dict[str, str]


def code() -> Iterator[Record]:
    """The standard library's modules, tests left out."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if not {"test", "tests", "site-packages", "idlelib", "lib2to3"}.intersection(parts):
            yield {"text": path.read_text(errors="replace")}


def prose() -> Iterator[Record]:
    """Long docstrings of PROSE_PACKAGES, one from each in turn so that none fills the whole."""
    installed = Path(sysconfig.get_path("purelib"))
    streams = [_docstrings(installed / package) for package in PROSE_PACKAGES]
    while streams:
        for stream in list(streams):
            if record := next(stream, None):
                yield record
            else:
                streams.remove(stream)


def _docstrings(package: Path) -> Iterator[Record]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(package.rglob("*.py")):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)  # of other people's escapes
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, documented) else None
            if text and len(text) >= MIN_DOCSTRING_CHARS:
                yield {"text": text}


def web() -> Iterator[Record]:
    """README bodies of the installed packages."""
    for _, body in sorted((item.metadata["Name"], item.read_text("METADATA") or "") for item in distributions()):
        readme = HeaderParser().parsestr(body).get_payload()
        if isinstance(readme, str) and readme.strip():
            yield {"text": readme}


def maths() -> Iterator[Record]:
    """Grade-school problems with worked solutions, endless."""
    import reasoning_gym

    for number in range(2**31):
        item = reasoning_gym.create_dataset("gsm_symbolic", size=1, seed=MATHS_SEED + number)[0]
        yield {"problem": item["question"], "generated_solution": item["metadata"]["answer_cot"]}


SOURCES: dict[str, tuple[Callable[[], Iterable[Record]], int]] = {
    "code": (code, 2_500_000),
    "prose": (prose, 2_000_000),
    "web": (web, 1_500_000),
    "maths": (maths, 1_000_000),
}
"""Source -> (its records, cap in bytes of JSON)."""


def write_raw(folder: Path, cap: int | None = None) -> None:
    """Write `<source>.jsonl` for each source into `folder`; a file that is there is kept.

    Args:
        folder: where to.
        cap: bytes of each source; None: the source's own.
    """
    for source, (records, own_cap) in SOURCES.items():
        path, limit = folder / f"{source}.jsonl", cap or own_cap
        if path.exists():
            continue
        with progress(f"raw text: {source}", limit, "B") as report, atomic_writer(path) as file:
            size = 0
            for record in records():
                line = (json.dumps(record) + "\n").encode()
                size += len(line)
                if size > limit:
                    break
                file.write(line)
                report.advance(len(line))
            report.finish()
