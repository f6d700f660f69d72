"""What a killed process leaves in a folder of checkpoints, and the end of it."""

import shutil
from pathlib import Path

from gpt_oss_lite.training.checkpoint import CheckpointManager
from gpt_oss_lite.training.checkpoint_names import file_name, step_of
from gpt_oss_lite.training.snapshot import DamagedCheckpoint
from shared_data.files import TEMPORARY_SUFFIX


def remove_leftovers(manager: CheckpointManager) -> None:
    """Delete temporary files, files of steps without their meta, and beside a good step what its meta does not name: a
    form of it that was not finished, or that another has replaced. Only who holds the run's lock may call it."""
    by_step: dict[int | None, list[Path]] = {}
    for path in manager.folder.iterdir() if manager.folder.is_dir() else ():
        by_step.setdefault(step_of(path.name), []).append(path)
    for path in by_step.pop(None, []):
        # safetensors writes to .tmp and random letters, and renames.
        if path.name.endswith(TEMPORARY_SUFFIX) or path.name.startswith(".tmp"):
            path.unlink(missing_ok=True)
    for step, paths in by_step.items():
        assert step is not None
        for path in _no_parts_of(manager, step, paths):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _no_parts_of(manager: CheckpointManager, step: int, paths: list[Path]) -> list[Path]:
    """Of the files and folders with a step's number those that are no part of it; none where the step is damaged, since
    they may be the better form then."""
    meta = file_name("meta", step)
    if not (manager.folder / meta).exists():
        return paths
    try:
        parts = {meta, *(name.partition("/")[0] for name in manager.meta(step)["files"])}
        others = [path for path in paths if path.name not in parts]
        if others:
            manager.verify(step)
    except DamagedCheckpoint:
        return []
    return others
