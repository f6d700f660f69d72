"""Checkpoints: five files a step, whole or not there, without pickled objects.

    model_step_N.safetensors   every tensor once (a tied head is the embedding), fp32
    optim_step_N.pt            AdamW's state by parameter name
    sched_step_N.pt            the schedule's counters
    rng_step_N.pt              every random number generator
    meta_step_N.json           step, position, model config; size and SHA-256 of the four others

(A sharded model's ranks write the form of `sharded` instead, under the same rules.)

Each file is written to a temporary name, fsynced and renamed; meta comes last. A step is complete only when meta and
all that it names are there in the right size, and loading compares the hashes too: a torn write is never taken for a
checkpoint, and a flipped byte never reaches a model. The .pt files hold tensors, numbers and strings, and load with
weights_only=True.
"""

import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gpt_oss_lite.training.checkpoint_names import KINDS, file_name, make_one_form, shards_name, step_of
from gpt_oss_lite.training.disk import OVERHEAD_BYTES, assert_room_to_write, kept_steps
from gpt_oss_lite.training.seeding import restore_rng
from gpt_oss_lite.training.snapshot import (
    DamagedCheckpoint,
    Snapshot,
    applying,
    load_model_tensors,
    load_optimizer,
    load_scheduler,
    read_tensors,
    take_snapshot,
)
from gpt_oss_lite.training.whole_files import as_os_error, assert_whole, atomic_path
from shared_data.console import say
from shared_data.errors import UserError
from shared_data.files import fsync_folder, sha256_file, write_atomic

Writer = Callable[[Path], None]

FORMAT_VERSION = 1
CHECKPOINTS = "checkpoints"


class CheckpointManager:
    """Saves, finds, loads and prunes the checkpoints of one run.

    Args:
        folder: where the files lie; made when first needed.
        keep: newest checkpoints that `prune` keeps.
        keep_every: `prune` also keeps every step that is a multiple of it; 0: none.
    """

    def __init__(self, folder: str | Path, keep: int = 3, keep_every: int = 0) -> None:
        self.folder = Path(folder)
        self.keep, self.keep_every = keep, keep_every

    # Finding

    def list_checkpoints(self) -> list[int]:
        """Steps whose checkpoint is complete, ascending."""
        return [step for step in self.marked_steps() if self._is_complete(step)]

    def marked_steps(self) -> list[int]:
        """Steps that have a meta, ascending: those that are complete, and those that something damaged."""
        steps = (step_of(path.name) for path in self.folder.glob("meta_step_*.json"))
        return sorted(step for step in steps if step is not None)

    def latest_step(self) -> int | None:
        """The newest complete step; None when there is none."""
        return max(self.list_checkpoints(), default=None)

    def newest_good(self, at_most: int | None = None) -> int | None:
        """The newest step whose files match their hashes; each damaged one is named in a warning and passed over."""
        for step in reversed(self.marked_steps()):
            if at_most is not None and step > at_most:
                continue
            try:
                self.verify(step)
                return step
            except DamagedCheckpoint as damage:
                say(f"warning: {damage}")
        return None

    def meta(self, step: int) -> dict[str, Any]:
        """The content of meta_step_N.json.

        Raises:
            DamagedCheckpoint: there is no such file, or it is not what `save` writes.
        """
        path = self._path("meta", step)
        try:
            meta = json.loads(path.read_bytes())
            digest = meta.pop("meta_sha256")
            well_formed = (
                digest == digest_of(meta)
                and (meta["format"], meta["step"]) == (FORMAT_VERSION, step)
                and make_one_form(set(meta["files"]), step)
            )
        except FileNotFoundError:
            steps = ", ".join(map(str, self.list_checkpoints())) or "none"
            raise DamagedCheckpoint(
                f"{self.folder} has no complete checkpoint of step {step} (complete: {steps})"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, IsADirectoryError):
            well_formed = False
        if not well_formed:
            raise DamagedCheckpoint(f"{path} is damaged; choose another step")
        return meta

    def verify(self, step: int) -> dict[str, Any]:
        """Compare every file of a step with the size and hash in its meta, which is returned.

        Raises:
            DamagedCheckpoint: names the first file that differs.
        """
        meta = self.complete_meta(step)
        for name, about in meta["files"].items():
            path = self.folder / name
            if sha256_file(path) != about["sha256"]:
                raise DamagedCheckpoint(
                    f"{path} is damaged: its SHA-256 is not the one in its meta; choose another step"
                )
        return meta

    def complete_meta(self, step: int) -> dict[str, Any]:
        """The meta of a step all of whose files are there in the right size; nothing of them is read.

        Raises:
            DamagedCheckpoint: names the first one that is not.
        """
        meta = self.meta(step)
        for name, about in meta["files"].items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != about["size"]:
                raise DamagedCheckpoint(f"{path} is missing or incomplete; choose another step")
        return meta

    # Saving

    def save(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        step: int,
        scheduler: LambdaLR | None = None,
        extra_meta: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the checkpoint of `step` and prune old ones.

        Args:
            model, optimizer, scheduler: as they stand between two steps.
            step: finished steps.
            extra_meta: JSON values for meta_step_N.json.
        """
        self.write(take_snapshot(model, optimizer, step, scheduler, extra_meta))
        self.prune(newest=step)

    def write(self, snapshot: Snapshot) -> None:
        """Write a snapshot. An older checkpoint of the same step is void from the first byte on.

        Raises:
            OSError: it could not be written whole, or has no room; there is no meta of this step then.
        """
        self.begin(snapshot.step, snapshot.n_bytes)
        self.commit(snapshot.step, snapshot.meta, self.writers_of(snapshot))

    @staticmethod
    def writers_of(snapshot: Snapshot) -> dict[str, Writer]:
        """How each file of the single-file form but meta is written."""
        return {
            "model": lambda path: save_file(snapshot.model, path, metadata={"format": "pt"}),
            "optim": lambda path: torch.save(snapshot.optimizer, path),
            "sched": lambda path: torch.save(snapshot.scheduler, path),
            "rng": lambda path: torch.save(snapshot.rng, path),
        }

    def begin(self, step: int, n_bytes: int) -> None:
        """See that a checkpoint of so many bytes has room, and void an older one of the same step.

        Raises:
            OSError: it has no room.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        assert_room_to_write(self.folder, n_bytes + OVERHEAD_BYTES)
        self._remove(self._path("meta", step))
        self.remove_shards(step)

    def commit(
        self,
        step: int,
        meta: Mapping[str, Any],
        writers: Mapping[str, Writer],
        written: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        """Write files, and meta last.

        Args:
            meta: JSON values besides format, step and files.
            writers: by kind, what writes a file.
            written: size and SHA-256 of files that lie there already, by name.

        Raises:
            OSError: one cannot be written, or is not there; there is no meta of this step then.
        """
        files = dict(written or {})
        for kind, write in writers.items():
            path = self._path(kind, step)
            with atomic_path(path) as temporary, as_os_error(path):
                write(temporary)
                assert_whole(temporary)
                files[path.name] = {"size": temporary.stat().st_size, "sha256": sha256_file(temporary)}
        for path, about in ((self.folder / name, about) for name, about in (written or {}).items()):
            # Another rank's may lie on another host, where its view of the folder is not this one's.
            if not path.is_file() or path.stat().st_size != about["size"]:
                raise OSError(errno.EIO, "is not there as it was written", str(path))
        whole = {"format": FORMAT_VERSION, "step": step, **meta, "files": files}
        write_atomic(self._path("meta", step), json.dumps({**whole, "meta_sha256": digest_of(whole)}, indent=2) + "\n")

    # Loading

    def load(
        self,
        model: nn.Module,
        step: int | None = None,
        optimizer: Optimizer | None = None,
        scheduler: LambdaLR | None = None,
        with_rng: bool = False,
        check_hashes: bool = True,
    ) -> dict[str, Any]:
        """Load a checkpoint, strictly: every tensor of the model is there, in its shape, and no other.

        Args:
            step: None: the newest complete one.
            optimizer, scheduler: loaded too when given.
            with_rng: set every random number generator to where it was.
            check_hashes: False only when `verify` has just read the files.

        Returns:
            The content of meta_step_N.json.

        Raises:
            DamagedCheckpoint: missing, incomplete or damaged files.
            UserError: the checkpoint is of another model.
        """
        step = self.latest_step() if step is None else step
        if step is None:
            raise UserError(f"{self.folder} has no complete checkpoint")
        meta = self.verify(step) if check_hashes else self.meta(step)
        optim, sched, rng = (self._path(kind, step) for kind in ("optim", "sched", "rng"))
        if self.is_sharded(step):
            from gpt_oss_lite.training.sharded import load_shards

            load_shards(model, optimizer, self.shards(step), self._path("counts", step))
        else:
            load_model_tensors(model, self._path("model", step))
            if optimizer is not None:
                with applying(optim):
                    load_optimizer(model, optimizer, read_tensors(optim))
        if scheduler is not None:
            with applying(sched):
                load_scheduler(scheduler, read_tensors(sched))
        if with_rng:
            with applying(rng):
                restore_rng(read_tensors(rng))
        return meta

    # Pruning

    def prune(self, newest: int) -> None:
        """Delete all but the `keep` newest checkpoints up to `newest` and the multiples of `keep_every`."""
        self.keep_last_n(self.keep, newest=newest)

    def keep_last_n(self, n: int, newest: int | None = None) -> None:
        """Delete all but the n newest complete checkpoints and the multiples of `keep_every`.

        Args:
            n: at least 1.
            newest: checkpoints of later steps, left by a run that went back, neither count nor go. None: all count.
        """
        if n < 1:
            raise ValueError(f"n is {n}: at least 1 checkpoint stays")
        steps = [step for step in self.list_checkpoints() if newest is None or step <= newest]
        for step in sorted(set(steps) - kept_steps(steps, n, self.keep_every)):
            self.delete_checkpoint(step)

    def delete_checkpoint(self, step: int) -> None:
        """Delete one checkpoint.

        Raises:
            UserError: it is the only complete one.
        """
        if self.list_checkpoints() == [step]:
            raise UserError(f"{self.folder}: step {step} is the only complete checkpoint; it is not deleted")
        # Meta first: once it is gone no reader takes the rest for a checkpoint.
        for kind in ("meta", *KINDS):
            self._remove(self._path(kind, step))
        self.remove_shards(step)

    def remove_shards(self, step: int) -> None:
        """Delete what only the sharded form of a step has."""
        self._remove(self._path("counts", step))
        shutil.rmtree(self.shards(step), ignore_errors=True)

    def _path(self, kind: str, step: int) -> Path:
        return self.folder / file_name(kind, step)

    def files(self, step: int) -> list[Path]:
        """The paths of a step's files, meta last."""
        if self.is_sharded(step):
            return [*(self.folder / name for name in sorted(self.meta(step)["files"])), self._path("meta", step)]
        return [self._path(kind, step) for kind in (*KINDS, "meta")]

    def shards(self, step: int) -> Path:
        """The folder of a step's shards."""
        return self.folder / shards_name(step)

    def is_sharded(self, step: int) -> bool:
        """Whether a step was written in the sharded form."""
        try:
            return self._path("counts", step).name in self.meta(step)["files"]
        except DamagedCheckpoint:
            return False

    def _is_complete(self, step: int) -> bool:
        try:
            self.complete_meta(step)
        except DamagedCheckpoint:
            return False
        return True

    def _remove(self, path: Path) -> None:
        if path.exists():
            path.unlink()
            fsync_folder(path.parent)


def digest_of(content: dict[str, Any]) -> str:
    """SHA-256 of a JSON file's content, so that a flipped digit in it is noticed too."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def checkpoint_folder(path: str | Path) -> Path:
    """The folder with the checkpoint files, given it or the run's folder.

    Raises:
        UserError: no such folder.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such run folder")
    return path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
