"""A run's folder: which one a command means, what it records, and whether it may go on with what is asked now.

RUN/config.yaml     the recipe as resolved
RUN/run.json        seed, corpus, what the weights were started from, versions
RUN/metrics.jsonl   RUN/events.jsonl   RUN/checkpoints/
"""

import glob
import hashlib
import json
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gpt_oss_lite
from gpt_oss_lite.config import Recipe
from gpt_oss_lite.config.recipe import dump_recipe, load_recipe
from gpt_oss_lite.training.checkpoint import CHECKPOINTS, CheckpointManager, digest_of
from gpt_oss_lite.training.run_lock import LOCK_NAME
from shared_data.console import say
from shared_data.errors import UserError
from shared_data.files import TEMPORARY_SUFFIX, sha256_file, write_atomic
from shared_data.yaml_files import check_config, parse_yaml

RUNS = Path("runs")
CONFIG_NAME = "config.yaml"
RECORD_NAME = "run.json"
# What a run that was killed before it was recorded may have left: the folder counts as empty.
START_FILES = {LOCK_NAME, CONFIG_NAME, CONFIG_NAME + TEMPORARY_SUFFIX, RECORD_NAME + TEMPORARY_SUFFIX}

# Keys that do not change the numbers, so that a run may go on with other values.
FREE_ON_RESUME = {
    "training.num_workers", "training.pin_memory", "training.keep_last_n", "training.keep_every", "training.mirror",
    "training.tensorboard", "training.wandb", "training.wandb_project", "training.parallelism",
    "training.distributed_timeout_s", "training.expert_parallel_size",
}  # fmt: skip


@dataclass(frozen=True)
class ResumeRequest:
    """What the command line says about going on; all off: a new run."""

    from_step: int | None = None
    latest: bool = False
    auto: bool = False

    @property
    def wanted(self) -> bool:
        """Whether any of the options was given."""
        return self.from_step is not None or self.latest or self.auto


def choose_run_folder(config: Path, out: Path | None, resume: ResumeRequest) -> tuple[Path, bool]:
    """Decide which folder a command means: without --out, to go on with a run's own config.yaml means that run.

    Returns:
        The folder and whether a run is in it already (which the command then goes on with).

    Raises:
        UserError: --out holds a run and nothing says to go on with it, or no folder is named or found to go on in.
    """
    if out is None and resume.wanted and is_a_runs_own(config):
        out = config.parent
    if out is None:
        numbered = _numbered_runs(config.stem)
        if resume.wanted and numbered:
            return numbered[-1], True
        if resume.wanted and not resume.auto:
            raise UserError(f"there is no {RUNS}/{config.stem}-NNN to go on with; name the run with --out")
        number = int(numbered[-1].name.rsplit("-", 1)[1]) + 1 if numbered else 1
        return RUNS / f"{config.stem}-{number:03d}", False
    if _holds_run(out):
        if resume.wanted:
            return out, True
        raise UserError(
            f"{out} already holds a run: go on with it (--resume latest), or start another (--out elsewhere)"
        )
    if out.exists() and (not out.is_dir() or {path.name for path in out.iterdir()} - START_FILES):
        raise UserError(f"{out} is not an empty folder, and holds no run; choose another --out")
    return out, False


def is_a_runs_own(config: Path) -> bool:
    """Whether a recipe's file is the one that a run has recorded."""
    return config.name == CONFIG_NAME and _holds_run(config.parent)


def _holds_run(folder: Path) -> bool:
    return (folder / RECORD_NAME).is_file() or (folder / CHECKPOINTS).is_dir()


def _numbered_runs(stem: str) -> list[Path]:
    pattern = re.compile(re.escape(stem) + r"-(\d{3,})")
    found = [path for path in RUNS.glob(f"{glob.escape(stem)}-*") if pattern.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.rsplit("-", 1)[1]))


def record_new_run(folder: Path, recipe: Recipe, seed: int, corpus: dict[str, Any], init_from: str | None) -> None:
    """Write config.yaml and run.json of a new run; run.json last, since its presence makes the folder a run."""
    folder.mkdir(parents=True, exist_ok=True)
    config = dump_recipe(recipe)
    write_atomic(folder / CONFIG_NAME, config)
    record = {
        "seed": seed,
        "corpus": corpus,
        "init_from": init_from,
        "versions": versions(),
        "config_sha256": hashlib.sha256(config.encode()).hexdigest(),
    }
    write_atomic(folder / RECORD_NAME, json.dumps({**record, "sha256": digest_of(record)}, indent=2) + "\n")


def read_record(folder: Path) -> dict[str, Any]:
    """The content of run.json.

    Raises:
        UserError: it or config.yaml is missing or damaged.
    """
    path, config = folder / RECORD_NAME, folder / CONFIG_NAME
    try:
        record = json.loads(path.read_bytes())
        good = record.pop("sha256") == digest_of(record)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the run's seed and corpus are unknown") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        good = False
    if not good:
        raise UserError(f"{path} is damaged: its SHA-256 is not the one that it holds")
    if not config.is_file() or sha256_file(config) != record["config_sha256"]:
        raise UserError(f"{config} is missing or not as the run wrote it: its SHA-256 is not the one in {RECORD_NAME}")
    return record


def run_files(folder: Path) -> dict[str, str]:
    """The texts of config.yaml and run.json: every checkpoint's meta holds them, so that neither can be lost alone."""
    return {name: (folder / name).read_text() for name in (CONFIG_NAME, RECORD_NAME)}


def mend_run_files(folder: Path) -> None:
    """Put back config.yaml and run.json, where one is missing or damaged, from the newest good checkpoint.

    Raises:
        UserError: there is none.
    """
    try:
        read_record(folder)
    except UserError as damage:
        manager = CheckpointManager(folder / CHECKPOINTS)
        step = manager.newest_good()
        files = manager.meta(step).get("run_files") if step is not None else None
        if not isinstance(files, dict):
            raise
        say(f"warning: {damage}; put back as they were at step {step}")
        for name in (CONFIG_NAME, RECORD_NAME):
            write_atomic(folder / name, files[name])


def check_recipe_unchanged(folder: Path, recipe: Recipe, seed: int | None, allow_changed: bool) -> None:
    """Refuse to go on with another recipe or seed than the run was started with.

    Raises:
        UserError: names every field that differs, with both values; with allow_changed it is a warning.
    """
    record = read_record(folder)
    before = keys_of(load_recipe(folder / CONFIG_NAME))
    after = keys_of(recipe)
    changes = [
        f"{key} was {before.get(key)}, is {after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key not in FREE_ON_RESUME
    ]
    if seed is not None and seed != record["seed"]:
        changes.append(f"--seed was {record['seed']}, is {seed}")
    there, here = before["training.optimizer"], after["training.optimizer"]
    if there != here and allow_changed:
        raise UserError(
            f"{folder} was started with training.optimizer {there}, whose moments {here} cannot go on from, also with "
            f"--allow-changed: start a new run with --init-from {folder}"
        )
    _refuse_changes(folder, changes, allow_changed)


def words_to_go_on(config: str, recipe: Recipe, stop_step: int) -> list[str]:
    """The options with which a run's own config.yaml, given as text, becomes this recipe, and stops at this step."""
    before = keys_of(check_config(Recipe, parse_yaml(config, CONFIG_NAME), CONFIG_NAME))
    after = keys_of(recipe)
    changed = [key for key in after if before.get(key) != after[key]]
    words = [word for key in changed for word in ("--set", f"{key}={json.dumps(after[key])}")]
    if stop_step != recipe.training.total_steps:
        words += ["--max-steps", str(stop_step)]
    return words + ["--allow-changed"] * any(key not in FREE_ON_RESUME for key in changed)


def check_corpus_unchanged(folder: Path, corpus: dict[str, Any], allow_changed: bool) -> None:
    """Refuse to go on with another corpus than the run was started with.

    Raises:
        UserError: as `check_recipe_unchanged`.
    """
    before = read_record(folder)["corpus"]
    changes = [
        f"the corpus's {key} was {before.get(key)}, is {corpus.get(key)}"
        for key in sorted(before.keys() | corpus.keys())
        if before.get(key) != corpus.get(key)
    ]
    _refuse_changes(folder, changes, allow_changed)


def _refuse_changes(folder: Path, changes: list[str], allow_changed: bool) -> None:
    """An error, or where that is allowed a warning."""
    if not changes:
        return
    text = f"{folder} was started with other values: {'; '.join(changes)}"
    if not allow_changed:
        raise UserError(
            f"{text}. --config {folder / CONFIG_NAME} has the run's own; or start a new run with --init-from, or say "
            "--allow-changed"
        )
    say(f"warning: {text}")


def keys_of(recipe: Recipe) -> dict[str, Any]:
    """A recipe's values, as JSON can hold them, by block.key."""
    return _flatten(recipe.model_dump(mode="json"))


def _flatten(block: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in block.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def resume_step(folder: Path, resume: ResumeRequest) -> int | None:
    """The step to go on from: the one asked for, or the newest that verifies; None: the start, there is none yet.

    Raises:
        DamagedCheckpoint: the step that was asked for is not there, or damaged.
        UserError: checkpoints are there, but none verifies; or run.json is missing or damaged.
    """
    read_record(folder)
    manager = CheckpointManager(folder / CHECKPOINTS)
    if resume.from_step is not None:
        manager.verify(resume.from_step)
        return resume.from_step
    step = manager.newest_good()
    if step is None and manager.marked_steps():
        raise UserError(f"{manager.folder}: every checkpoint is damaged")
    return step


def versions() -> dict[str, str]:
    """What the run's numbers depend on."""
    return {
        "gpt_oss_lite": gpt_oss_lite.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
