"""Checkpoints of a sharded model: each rank writes what it holds, and any number of ranks reads it.

    shards_step_N/shard-RRRRR-model-00001-of-00001.safetensors   weights and both moments, as rank R - 1 holds them
    counts_step_N.pt                                             the optimizer's step counts by parameter name
    sched_step_N.pt  rng_step_N.pt  meta_step_N.json             as in the single-file form

Tensors go through PyTorch's distributed checkpoint and its safetensors storage; its default storage would unpickle what
it reads. Completeness and hashes follow the rules of `checkpoint`: meta comes last, and names every file. PyTorch's
module is imported where it is used: it loads more than it needs.
"""

import errno
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.training.checkpoint import CheckpointManager, Writer
from gpt_oss_lite.training.checkpoint_names import SHARDED_KINDS, file_name
from gpt_oss_lite.training.disk import OVERHEAD_BYTES, assert_room_to_write
from gpt_oss_lite.training.distributed import Ranks
from gpt_oss_lite.training.leftovers import remove_leftovers
from gpt_oss_lite.training.memory import meta_model
from gpt_oss_lite.training.optimizer import moments_of
from gpt_oss_lite.training.seeding import capture_rng
from gpt_oss_lite.training.snapshot import (
    DamagedCheckpoint,
    Snapshot,
    applying,
    read_tensors,
    set_optimizer_state,
    whole_shapes,
)
from shared_data.console import describe
from shared_data.errors import UserError
from shared_data.files import fsync_folder, sha256_file


def named_tensors(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Weights and, where there are any yet, moments: the live tensors, each tied one once."""
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    if optimizer is not None:
        moments = moments_of(optimizer)
        for name, parameter in model.named_parameters():
            if parameter in optimizer.state:
                tensors |= {f"{key}.{name}": optimizer.state[parameter][key] for key in moments[id(parameter)]}
    return tensors


def counts_of(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """What an optimizer holds besides moments for each parameter that it has updated, by name: AdamW's step count."""
    moments = moments_of(optimizer)
    return {
        name: {
            key: value.detach().cpu().clone()
            for key, value in optimizer.state[parameter].items()
            if key not in moments[id(parameter)]
        }
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


def write_shards(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, dict[str, Any]]:
    """Write each rank's part of some tensors into a folder, emptied first, and make it durable. All ranks call it.

    Returns:
        Size and SHA-256 of every rank's file, by name.

    Raises:
        OSError: on every rank, where the part of one of them could not be written.
    """
    from torch.distributed import checkpoint as dcp

    ranks.from_main(lambda: _empty(folder), share=False)
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(dict(tensors), storage_writer=writer)
    except dcp.CheckpointException as failure:  # on every rank, when one of them failed
        raise _not_written(folder, {rank: str(error[0]) for rank, error in failure.failures.items()}) from None
    mine, reason = {}, None
    try:
        for path in folder.glob(f"shard-{ranks.rank + 1:05d}-*.safetensors"):
            with open(path, "r+b") as file:
                order_metadata(file)
                os.fsync(file.fileno())
            mine[path.name] = {"size": path.stat().st_size, "sha256": sha256_file(path)}
    except OSError as error:  # the others wait for this rank's answer all the same
        reason = describe(error)
    answers = ranks.gather((mine, reason))
    if reasons := {rank: reason for rank, (_, reason) in enumerate(answers) if reason is not None}:
        raise _not_written(folder, reasons)
    ranks.from_main(lambda: fsync_folder(folder), share=False)
    return {name: about for part, _ in answers for name, about in part.items()}


def order_metadata(file: BinaryIO) -> None:
    """Put the metadata in a safetensors file's header in the order of its keys, in place: same tensors, same bytes.

    The library writes it from a map that it walks in random order, so that every save of the same tensors has another
    SHA-256 (https://github.com/safetensors/safetensors/issues/584). A header of another layout than its own is left.
    """
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(length))
    if "__metadata__" in header:
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    ordered = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    if len(ordered) <= length:
        file.seek(8)
        file.write(ordered.ljust(length))


def _not_written(folder: Path, reasons: Mapping[int, str]) -> OSError:
    words = "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(reasons.items()))
    return OSError(errno.EIO, f"could not be written ({words})", str(folder))


def _empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def read_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Read tensors, whole ones or a rank's shards of them, in place from what any number of ranks wrote.

    Raises:
        DamagedCheckpoint: they are not there.
    """
    from torch.distributed import checkpoint as dcp

    # Without a process group each process plans and reads for itself: only its own part of each tensor.
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # it says just that
        try:
            dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
        except dcp.CheckpointException as failure:
            error: Any = next(iter(failure.failures.values()))[0]
            if isinstance(error, OSError):  # of the disk, not of what is on it
                raise error from None
            raise DamagedCheckpoint(f"{folder} cannot be read: {describe(error)}") from None


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """The whole tensors that shards make up, on the meta device.

    Raises:
        ValueError: they declare more than they hold, or do not make up whole tensors.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    tensors = {}
    for name, about in metadata.items():
        assert isinstance(about, TensorStorageMetadata)  # safetensors holds nothing else
        _check_pieces(name, about.size, [(tuple(piece.offsets), tuple(piece.sizes)) for piece in about.chunks])
        tensors[name] = torch.empty(about.size, dtype=about.properties.dtype, device="meta")
    declared = sum(tensor.nbytes for tensor in tensors.values())
    there = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if declared > there:
        raise ValueError(f"tensors of {declared} bytes in files of {there}")
    return tensors


def _check_pieces(name: str, shape: tuple[int, ...], pieces: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Hold offsets and sizes of a tensor's pieces, which divide its first dimension, against its shape."""
    rows = 0
    for offsets, sizes in sorted(pieces):
        if offsets != (rows, *(0 for _ in shape[1:])) or sizes[1:] != shape[1:]:
            raise ValueError(f"{name} has a piece {sizes} at {offsets}, where row {rows} of {shape} is to be")
        rows += sizes[0]


def save_shards(
    manager: CheckpointManager,
    model: nn.Module,
    optimizer: Optimizer,
    step: int,
    scheduler: LambdaLR,
    extra_meta: Mapping[str, Any],
    ranks: Ranks,
) -> None:
    """Write the checkpoint of `step` of a sharded model, while it stands still. All ranks call it.

    Raises:
        OSError: it could not be written; there is no meta of this step then.
        MainRankFailed: the same, on a rank that could do its own part.
    """
    tensors, folder = named_tensors(model, optimizer), manager.shards(step)
    sizes = {name: n for part in ranks.gather({k: t.nbytes for k, t in tensors.items()}) for name, n in part.items()}
    n_bytes = sum(sizes.values())
    ranks.from_main(lambda: manager.begin(step, n_bytes), share=False)
    files = write_shards(folder, tensors, ranks)
    counts = {name: n for part in ranks.gather(counts_of(model, optimizer)) for name, n in part.items()}
    rng = capture_rng()
    writers: dict[str, Writer] = {
        "counts": lambda path: torch.save({"state": counts}, path),
        "sched": lambda path: torch.save(scheduler.state_dict(), path),
        "rng": lambda path: torch.save(rng, path),
    }
    written = {f"{folder.name}/{name}": about for name, about in files.items()}
    ranks.from_main(lambda: manager.commit(step, extra_meta, writers, written), share=False)
    ranks.from_main(lambda: manager.prune(newest=step), share=False)


def load_shards(model: nn.Module, optimizer: Optimizer | None, folder: Path, counts_path: Path) -> None:
    """Load weights, and moments and step counts where an optimizer is given, as the model lies: whole or in shards."""
    counts = read_tensors(counts_path)["state"]
    if optimizer is not None:
        with applying(counts_path):
            _make_room(model, optimizer, counts)
    tensors = named_tensors(model, optimizer)
    others = {f"model.{name}" for name in whole_shapes(model)} - tensors.keys()
    _check_shapes(folder, tensors, others)
    with applying(folder):
        read_shards(folder, tensors)


def _check_shapes(folder: Path, tensors: Mapping[str, Tensor], others: set[str]) -> None:
    """Hold what shards make up together against what is to be read.

    Args:
        others: weights that may be there besides: those that other ranks read, and second names of tied ones.

    Raises:
        UserError: names the first tensor that differs.
    """
    with applying(folder):
        there = {name: tuple(tensor.shape) for name, tensor in tensors_in(folder).items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    weights = {name for name in there if name.startswith("model.")}
    for name in sorted(wanted.keys() | (weights - others)):
        found, here = there.get(name, "missing"), wanted.get(name, "missing")
        if found != here:
            raise UserError(f"{folder} is of another model: {name} is {found} there and {here} in the model")


def _make_room(model: nn.Module, optimizer: Optimizer, counts: dict[str, dict[str, Tensor]]) -> None:
    """Give the optimizer moments of zeros for exactly the parameters that are in `counts`, and their counts."""
    parameters, moments = dict(model.named_parameters()), moments_of(optimizer)
    unknown = counts.keys() - whole_shapes(model).keys()
    if unknown:
        raise ValueError(f"no parameter is called {min(unknown)}")
    state = {
        name: {**counts[name], **{key: torch.zeros_like(parameter) for key in moments[id(parameter)]}}
        for name, parameter in parameters.items()
        if name in counts
    }
    set_optimizer_state(model, optimizer, state)


def consolidate(manager: CheckpointManager, step: int) -> None:
    """Turn a step in shards into the single-file form, which replaces it when it is whole on the disk.

    Both forms share the schedule's and the random numbers' files, which stay as they are, so that the meta, whose
    replacement is the one moment at which the step changes its form, names whole files before and after. Killed at any
    point, a second call finishes: it begins by deleting what does not belong to the form that the meta names.

    Raises:
        DamagedCheckpoint: the shards do not match their hashes.
        UserError: they are not the model that their meta says.
    """
    meta, folder = manager.verify(step), manager.shards(step)
    remove_leftovers(manager)
    if not manager.is_sharded(step):
        return
    with applying(folder):
        tensors = {name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors_in(folder).items()}
        model = meta_model(ModelConfig(**meta["model"]))
    _check_shapes(folder, {f"model.{name}": parameter for name, parameter in model.named_parameters()}, set())
    with applying(folder):
        read_shards(folder, tensors)
    counts, sched, rng = (read_tensors(manager.folder / file_name(kind, step)) for kind in SHARDED_KINDS)
    weights, state = {}, counts["state"]
    for name, tensor in sorted(tensors.items()):
        kind, _, parameter = name.partition(".")
        if kind == "model":
            weights[parameter] = tensor
        else:
            state[parameter][kind] = tensor
    others = {key: value for key, value in meta.items() if key not in ("format", "step", "files")}
    snapshot = Snapshot(step, weights, {"state": state}, sched, rng, others)
    assert_room_to_write(manager.folder, snapshot.n_bytes + OVERHEAD_BYTES)
    writers = manager.writers_of(snapshot)
    kept = {name: meta["files"][name] for name in (file_name("sched", step), file_name("rng", step))}
    manager.commit(step, others, {"model": writers["model"], "optim": writers["optim"]}, kept)
    manager.remove_shards(step)
