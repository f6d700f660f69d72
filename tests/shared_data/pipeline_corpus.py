"""Small corpora for the pipeline's tests, and the stages run on them in this process."""

import hashlib
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from shared_data.executor import Workers
from shared_data.manifest import Manifest, read_sidecar
from shared_data.options import StageOptions
from shared_data.scripts import clean, download_raw, pack_shards, tokenize
from shared_data.stage import Context
from shared_data.tokenizer import load_tokenizer

WEIGHTS = {"web": 0.6, "code": 0.25, "math": 0.15}
SIZES = {"web": 240, "code": 110, "math": 70}
# Small tasks: about as many as a corpus of some gigabytes has.
MANY_TASKS = {"task_bytes": 12_000, "quality": {"min_chars": 60}}
STAGES = (download_raw, clean, tokenize, pack_shards)


def sentence(rng: random.Random, n_words: int) -> str:
    """Text that no two calls make alike."""
    return " ".join("".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 8))) for _ in range(n_words))


def write_lines(path: Path, texts: list[str]) -> None:
    """JSON lines with a text each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def make_corpus(folder: Path, **data_config: Any) -> dict[str, Path]:
    """Three sources with duplicates within and across them, a mixture file and a data config; returns the two files."""
    rng = random.Random(7)
    shared = [sentence(rng, 40) for _ in range(12)]
    for source, size in SIZES.items():
        texts = [sentence(rng, rng.randint(5, 160)) for _ in range(size)]
        texts[3:3] = shared
        texts[50:50] = [text.replace(" ", "  \n") for text in shared[:4]]
        write_lines(folder / "sources" / f"{source}.jsonl", texts)
    sources = [
        {"id": source, "weight": weight, "files": [str(folder / "sources" / f"{source}.jsonl")]}
        for source, weight in WEIGHTS.items()
    ]
    (folder / "mixture.yaml").write_text(yaml.safe_dump({"name": "tiny", "sources": sources}))
    settings = {
        "total_tokens": 20000,
        "shard_size_tokens": 4000,
        "validation_share": 0.05,
        "pipeline": {"task_bytes": 40000, "quality": {"min_chars": 60}},
        "pack": {"long_context": {"share": 0.3, "window_tokens": 1024}},
        **data_config,
    }
    (folder / "data_config.yaml").write_text(yaml.safe_dump(settings))
    return {"mixture": folder / "mixture.yaml", "data_config": folder / "data_config.yaml"}


def context_of(folder: Path, root: str = "data", workers: int | Workers = 1, **options: Any) -> Context:
    """The context of a corpus made by `make_corpus`."""
    mixture, data_config = folder / "mixture.yaml", folder / "data_config.yaml"
    context = StageOptions(mixture=mixture, data_config=data_config, data_root=folder / root, **options).context()
    return replace(context, workers=workers if isinstance(workers, Workers) else Workers(workers))


def run_all(context: Context) -> dict[str, dict[str, Any]]:
    """Run the four stages; returns their reports by stage."""
    return {stage.STAGE: stage.run(context) for stage in STAGES}


def edit_yaml(path: Path, **changes: Any) -> None:
    """Change keys at the top of a YAML file."""
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))


def hashes(root: Path, *, state: bool = False) -> dict[str, str]:
    """SHA-256 of everything that the pipeline publishes: all but state/, or with it."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    wanted = [path for path in files if state or "state" not in path.relative_to(root).parts]
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in wanted}


def lines_of(root: Path, stage: str, source: str) -> list[dict]:
    paths = sorted((root / stage / source).glob("data*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def documents_of(folder: Path, inserts: bool = True) -> list[tuple[str, str]]:
    """(source, text) of every document of a packed corpus, in order; with the passkey inserts unless not wanted."""
    tokenizer, found = load_tokenizer(), []
    for path in Manifest.load(folder).shard_paths(folder):
        sidecar, ids = read_sidecar(path), np.fromfile(path, "<u4")
        left_out = set() if inserts else set(sidecar.inserts.tolist())
        columns = zip(sidecar.starts, sidecar.lengths, sidecar.source_index, strict=True)
        for start, length, source in (line for n, line in enumerate(columns) if n not in left_out):
            found.append((sidecar.sources[source], tokenizer.decode(ids[start : start + length - 1].tolist())))
    return found


def run_prepare(folder: Path, root: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The pipeline as a command, on the config files in a folder."""
    files = ("--mixture", folder / "mixture.yaml", "--data-config", folder / "data_config.yaml")
    command = [sys.executable, "-m", "shared_data.prepare_data", *map(str, files), "--data-root", str(root), *options]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)


def prepare(folder: Path, root: Path, *options: str, **environment: str) -> str:
    """The same where it must work; returns what it said on standard error."""
    ran = run_prepare(folder, root, *options, **environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


class Runs:
    """Counts the tasks that are really done, by the name of their work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from shared_data import executor

        self.names: list[str] = []
        plain = executor.write_commit

        def counted(record: Path, *rest: Any) -> executor.Commit:
            self.names.append(f"{record.parent.name}/{record.stem.split('-')[0]}")
            return plain(record, *rest)

        monkeypatch.setattr(executor, "write_commit", counted)

    def since_last(self) -> set[str]:
        names, self.names = set(self.names), []
        return names
