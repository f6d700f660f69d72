"""Checkpoints that say of themselves that they are whole, whatever was done to their files."""

import json
from pathlib import Path
from typing import Any

from gpt_oss_lite.training.checkpoint import digest_of
from shared_data.files import sha256_file


def forge(folder: Path, name: str, step: int = 2) -> None:
    """Make a meta's size and hash those of a file that was replaced; its name is as the meta has it."""
    path, meta_path = folder / name, folder / f"meta_step_{step}.json"
    meta = json.loads(meta_path.read_text())
    meta["files"][name] = {"size": path.stat().st_size, "sha256": sha256_file(path)}
    reseal(meta_path, meta)


def reseal(path: Path, meta: dict[str, Any]) -> None:
    """Write a changed meta with its own hash made anew."""
    rest = {key: value for key, value in meta.items() if key != "meta_sha256"}
    path.write_text(json.dumps({**rest, "meta_sha256": digest_of(rest)}))
