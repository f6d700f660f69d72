"""Real text for docs/learning.md, small enough to carry: Debian's documentation and sources, cleaned, compressed by xz.

    python scripts/learning_corpus.py fetch --folder /tmp/debian-docs      # downloads 330 MB, installs nothing
    python scripts/learning_corpus.py make --folder /tmp/debian-docs --out .bench/learn
    gpt-oss-lite prepare --mixture .bench/learn/mixture.yaml --data-config .bench/learn/data_config.yaml \\
        --data-root .bench/learn-data

`make` extracts the text, lets the pipeline's own stages clean it and remove exact and near duplicates over all sources,
and writes what is left as one file a source, with the mixture and the settings that the last command reads. The last
command may run elsewhere: it needs the files, not the packages. It holds out validation documents by hash, after the
duplicates are gone.

    rust, java, c, python   API references and guides of the languages and their libraries
    tools                   manuals of programs: Git, PostgreSQL, SQLite, Apache, Node.js, Erlang, Octave, Maxima, Perl
    prose                   the Debian Administrator's Handbook, policy, GNOME's help; docstrings
    code-python, code-c     sources of the installed Python packages and of Linux
"""

import ast
import functools
import hashlib
import itertools
import json
import lzma
import random
import re
import subprocess
import sys
import sysconfig
import tarfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated

import needs_packages  # noqa: F401
import typer
from debian_packages import fetch_packages

from shared_data.console import progress, run_app, say
from shared_data.errors import UserError
from shared_data.files import atomic_writer, write_atomic
from shared_data.html import text_of_html
from shared_data.tokenizing import read_ids, read_index

PACKAGES = (
    "rust-doc", "petsc3.18-doc", "linux-doc-6.1", "cppreference-doc-en-html", "openjdk-17-doc",
    "python3.11-doc", "python-scipy-doc", "python-sympy-doc", "python-django-doc", "python-pandas-doc",
    "python-sklearn-doc", "git-doc", "postgresql-doc-15", "sqlite3-doc", "apache2-doc", "nodejs-doc", "erlang-doc",
    "octave-doc", "maxima-doc", "perl-doc", "debian-handbook", "debian-policy", "developers-reference",
    "gnome-user-docs", "linux-source-6.1",
)  # fmt: skip
DOC = "usr/share/doc"
MEGABYTE = 1_000_000
MAX_PAGE_BYTES = 2 * MEGABYTE
MIN_DOCSTRING_CHARS = 400
Pieces = Iterator[tuple[str, str]]
"""(id, text) of documents."""


def pages(*folders: str) -> Callable[[Path], Pieces]:
    """The HTML pages below folders of the unpacked packages."""

    def read(root: Path) -> Pieces:
        paths = [
            path
            for folder in folders
            for path in sorted((root / folder).rglob("*.htm*"))
            if path.is_file() and not path.is_symlink() and path.stat().st_size < MAX_PAGE_BYTES
        ]
        random.Random(1).shuffle(paths)  # a cap takes a sample, not the first folders
        with ProcessPoolExecutor() as workers:
            texts = workers.map(_page_text, paths, chunksize=64)
            for path, text in zip(paths, texts, strict=True):
                yield str(path.relative_to(root)), text

    return read


def _page_text(path: Path) -> str:
    return text_of_html(path.read_text(errors="replace"))


def prose(root: Path) -> Pieces:
    """Books, policy, GNOME's English help, perl's manual, and long docstrings of the installed packages."""
    books = (f"{DOC}/debian-handbook/html/en-US", f"{DOC}/debian-policy", "usr/share/developers-reference")
    yield from pages(*books)(root)
    for path in sorted((root / "usr/share/help/C").rglob("*.page")):
        text = re.sub(r"<[^>]*>", " ", path.read_text(errors="replace"))
        yield str(path.relative_to(root)), re.sub(r"[ \t]*\n\s*\n", "\n\n", re.sub(r"[ \t]+", " ", text)).strip()
    for name, source in python_files():
        yield from ((f"{name}#{index}", text) for index, text in enumerate(_docstrings(source)))


def _docstrings(source: bytes) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of other people's escapes
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, documented) else None
        if text and len(text) >= MIN_DOCSTRING_CHARS:
            yield text


def tools(root: Path) -> Pieces:
    """Manuals of programs, as HTML; perl's as it is written."""
    names = (
        "git-doc",
        "postgresql-doc-15",
        "sqlite3",
        "apache2-doc/manual/en",
        "nodejs",
        "erlang-doc",
        "octave",
        "maxima-doc",
    )
    yield from pages(*(f"{DOC}/{name}" for name in names))(root)
    for path in sorted((root / "usr/share/perl").rglob("*.pod")):
        yield str(path.relative_to(root)), path.read_text(errors="replace")


@functools.cache
def python_files() -> tuple[tuple[str, bytes], ...]:
    """Sources of the installed packages, shuffled."""
    installed = Path(sysconfig.get_path("purelib"))
    paths = [path for path in sorted(installed.rglob("*.py")) if path.stat().st_size < MAX_PAGE_BYTES]
    random.Random(1).shuffle(paths)
    return tuple((str(path.relative_to(installed)), path.read_bytes()) for path in paths)


def code_python(root: Path) -> Pieces:
    """Sources of the installed packages."""
    for name, source in python_files():
        yield name, source.decode("utf-8", "replace")


def code_c(root: Path) -> Pieces:
    """A sample of Linux's sources: the files whose name's hash falls into an eighth."""
    for archive in sorted((root / "usr/src").glob("linux-source-*.tar.xz")):
        with tarfile.open(archive, mode="r|xz") as files:
            for member in files:
                chosen = hashlib.sha256(member.name.encode()).digest()[0] < 32
                if not (chosen and member.isfile() and member.name.endswith(".c") and member.size < MAX_PAGE_BYTES):
                    continue
                content = files.extractfile(member)
                assert content is not None
                yield member.name, content.read().decode("utf-8", "replace")


PYTHON = ("python3.11", "python-scipy-doc", "python-sympy-doc", "python-django-doc", "python-pandas-doc",
          "python-sklearn-doc")  # fmt: skip
SOURCES: dict[str, tuple[Callable[[Path], Pieces], int, int, str | None]] = {
    "rust": (pages(f"{DOC}/rust-doc"), 75, 75, None),
    "java": (pages(f"{DOC}/openjdk-17-jre-headless"), 60, 60, None),
    "c": (pages(f"{DOC}/linux-doc-6.1", f"{DOC}/petsc3.18-doc", "usr/share/cppreference"), 110, 110, None),
    "python": (pages(*(f"{DOC}/{name}" for name in PYTHON)), 60, 60, None),
    "tools": (tools, 60, 60, None),
    "prose": (prose, 60, 60, None),
    "code-python": (code_python, 90, 30, "code"),
    "code-c": (code_c, 60, 22, "code"),
}
"""Source -> (its documents, most MB of text read, and most kept after cleaning, the pipeline's quality rules)."""

app = typer.Typer(
    help="Make the text of docs/learning.md.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
Folder = Annotated[Path, typer.Option(metavar="DIR", help="Where the packages are unpacked.", show_default=False)]


@app.command()
def fetch(folder: Folder) -> None:
    """Download the packages and unpack them; nothing is installed, and no rights are needed."""
    fetch_packages(folder, PACKAGES)


@app.command()
def make(
    folder: Folder,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the compressed text goes.")] = Path(".bench/learn"),
    work: Annotated[Path, typer.Option(metavar="DIR", help="Where the stages work; kept.")] = Path(".bench/corpus"),
    megabytes: Annotated[float, typer.Option(help="Most MB of compressed text.")] = 55.0,
    share: Annotated[float, typer.Option(min=0, max=1, help="Of each source's cap, to make a smaller corpus.")] = 1.0,
) -> None:
    """Extract, clean, remove duplicates, compress."""
    root = folder / "files"
    if not root.is_dir():
        raise UserError(f"--folder {folder}: {root} is not there; make it with: learning_corpus.py fetch")
    for source, (documents, cap, _, _) in SOURCES.items():
        extract(documents(root), work / f"{source}.jsonl", int(cap * share * MEGABYTE), source)
    clean(work)
    out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(max_workers=2) as workers:
        caps = [int(kept * share * MEGABYTE) for _, _, kept, _ in SOURCES.values()]
        packed = list(workers.map(compress, [work] * len(SOURCES), SOURCES, caps, [out] * len(SOURCES)))
    tokens = {source: n_tokens for source, (_, _, n_tokens) in zip(SOURCES, packed, strict=True)}
    sizes = [(text, n_bytes) for text, n_bytes, _ in packed]
    write_settings(out, tokens)
    for source, (text, n_bytes) in zip(SOURCES, sizes, strict=True):
        say(f"{source:<12} {text / 1e6:7.1f} MB -> {n_bytes / 1e6:5.1f} MB xz, {tokens[source] / 1e6:6.2f} M tokens")
    text, total = (sum(column) for column in zip(*sizes, strict=True))
    say(f"{'all':<12} {text / 1e6:7.1f} MB -> {total / 1e6:5.1f} MB xz, {sum(tokens.values()) / 1e6:6.2f} M tokens")
    if total > megabytes * 2**20:
        raise UserError(f"{total / 2**20:.1f} MiB: more than --megabytes {megabytes:g}; take a smaller --share")


def extract(documents: Pieces, path: Path, cap: int, source: str) -> None:
    """Write documents as JSON lines until `cap` bytes of text; a file that is there is kept."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with progress(f"extract: {source}", cap, "B") as report, atomic_writer(path) as file:
        n_bytes = 0
        for name, text in documents:
            size = len(text.encode(errors="replace"))
            if not text or n_bytes + size > cap:
                continue
            n_bytes += size
            file.write((json.dumps({"id": f"{source}/{name}", "text": text}) + "\n").encode())
            report.advance(size)
        report.finish()


def clean(work: Path) -> None:
    """Run the pipeline's first three stages on what was extracted."""
    sources = [
        {"id": source, "weight": 1 / len(SOURCES), "files": [str((work / f"{source}.jsonl").resolve())],
         "rules": rules}
        for source, (_, _, _, rules) in SOURCES.items()
    ]  # fmt: skip
    mixture, config = work / "mixture.yaml", work / "data_config.yaml"
    write_atomic(mixture, json.dumps({"name": "learning", "sources": sources}))
    write_atomic(config, json.dumps({"dedup": {"near": {"enabled": True}}}))
    for stage in ("download_raw", "clean", "tokenize"):
        module = f"shared_data.scripts.{stage}"
        options: list[str | Path] = ["--mixture", mixture, "--data-config", config, "--data-root", work / "data"]
        command: list[str | Path] = [sys.executable, "-m", module, *options]
        if code := subprocess.run(command, check=False).returncode:
            raise UserError(f"the stage {stage} ended with exit code {code}; see what it said above")


def compress(work: Path, source: str, cap: int, out: Path) -> tuple[int, int, int]:
    """Write id and text of a source's clean documents, by id so that pages of one kind lie together; a file that is
    there is kept.

    Args:
        work: where the stages worked.
        source: its id.
        cap: most bytes of text. More is sampled, by the hashes of the ids.
        out: folder of the file.

    Returns:
        Bytes of text, bytes of the file, and tokens.
    """
    streams = sorted((work / "data" / "tokens" / source).glob("*.bin"))
    n_tokens = {name: int(n) for path in streams
                for name, n in zip(read_ids(path), read_index(path).n_tokens, strict=True)}  # fmt: skip
    records = [json.loads(line) for part in sorted((work / "data" / "clean" / source).glob("*.jsonl"))
               for line in part.read_bytes().splitlines()]  # fmt: skip
    records.sort(key=lambda record: hashlib.sha256(record["id"].encode()).digest())
    sizes = itertools.accumulate(len(record["text"].encode()) for record in records)
    kept = [record for record, size in zip(records, sizes, strict=True) if size <= cap]
    kept.sort(key=lambda record: record["id"])
    target = out / f"{source}.jsonl.xz"
    if not target.exists():
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 27}]
        with atomic_writer(target) as file, lzma.open(file, "wb", filters=filters) as packed:
            for record in kept:
                line = json.dumps({"id": record["id"], "text": record["text"]}, ensure_ascii=False) + "\n"
                packed.write(line.encode())
    n_bytes = sum(len(record["text"].encode()) for record in kept)
    return n_bytes, target.stat().st_size, sum(n_tokens[record["id"]] for record in kept)


def write_settings(out: Path, tokens: dict[str, int]) -> None:
    """The mixture, each source at the share that it has, and the settings of the last stages."""
    total = sum(tokens.values())
    sources = [
        {"id": source, "weight": round(own / total, 6), "files": [str(out / f"{source}.jsonl.xz")], "min_chars": 1}
        for source, own in tokens.items()
    ]
    mixture = {"name": "learning", "on_shortage": "stop", "sources": sources}
    settings = {
        "total_tokens": total,
        "shard_size_tokens": 10_000_000,
        "validation_share": 0.01,  # the corpus is small: 0.1 % would be 100,000 tokens
        "pipeline": {"redact": {"emails": False, "ips": False}},  # done
    }
    long = {**settings, "pack": {"long_context": {"share": 0.5, "window_tokens": 32_768}}}
    for name, content in (("mixture.yaml", mixture), ("data_config.yaml", settings), ("long_config.yaml", long)):
        write_atomic(out / name, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(run_app(app, prog_name="learning_corpus.py"))
