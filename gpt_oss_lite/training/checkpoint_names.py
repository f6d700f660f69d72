"""What the files of a checkpoint are called, in its two forms: one file of weights, or the shards of several ranks."""

import re

# The single-file form; `meta` besides, in both.
KINDS = ("model", "optim", "sched", "rng")
# The sharded form has these, and a folder with every rank's part of weights and moments.
SHARDED_KINDS = ("counts", "sched", "rng")

_NAME = re.compile(r"(?:model|optim|counts|sched|rng|meta)_step_(\d+)\.(?:safetensors|pt|json)|shards_step_(\d+)")
_SHARD = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")


def file_name(kind: str, step: int) -> str:
    """The name of a step's file of a kind."""
    suffix = {"model": "safetensors", "meta": "json"}.get(kind, "pt")
    return f"{kind}_step_{step}.{suffix}"


def shards_name(step: int) -> str:
    """The name of the folder with a step's shards."""
    return f"shards_step_{step}"


def step_of(name: str) -> int | None:
    """The step that a file or folder belongs to; None: it is no part of a checkpoint."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1] or match[2])


def make_one_form(names: set[str], step: int) -> bool:
    """Whether these, with a meta, are all the files of one form of a step, and nothing else."""
    if names == {file_name(kind, step) for kind in KINDS}:
        return True
    others = {file_name(kind, step) for kind in SHARDED_KINDS}
    folders_and_files = [name.partition("/") for name in names - others]
    return (
        others < names
        and all(folder == shards_name(step) for folder, _, _ in folders_and_files)
        and all(_SHARD.fullmatch(file) for _, _, file in folders_and_files)
    )
