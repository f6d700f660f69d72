"""A run's second home: an fsspec URL that every committed checkpoint is copied to, and that a lost run comes back from.

    URL/<run folder's name>/config.yaml  run.json  metrics.jsonl  events.jsonl  checkpoints/...

A step's meta is copied last, so a step that is there with its meta is whole. What a failed or killed copy left out is
copied with the next checkpoint: meta_step_N.json.part says which state of the step the files there belong to, and those
in the right size are not copied again. Of a step that has changed its form here (`checkpoints consolidate`) the former
files go when the new ones are there. Any store that fsspec knows will do: the libraries of s3://, gs:// and others are
installed besides.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpt_oss_lite.training.checkpoint import CHECKPOINTS, CheckpointManager
from gpt_oss_lite.training.checkpoint_names import file_name, step_of
from gpt_oss_lite.training.disk import kept_steps
from gpt_oss_lite.training.logger import EVENTS_NAME, METRICS_NAME
from gpt_oss_lite.training.run_folder import CONFIG_NAME, RECORD_NAME
from gpt_oss_lite.training.snapshot import DamagedCheckpoint
from shared_data.console import progress, say
from shared_data.errors import UserError, require_extra
from shared_data.files import atomic_writer, fsync_folder

RUN_FILES = (CONFIG_NAME, RECORD_NAME, METRICS_NAME, EVENTS_NAME)
PART_SUFFIX = ".part"
BLOCK_BYTES = 16 * 2**20


class Mirror:
    """The copy of one run's folder under a URL.

    Args:
        url: any URL that fsspec opens; a path is the local file system's.
        folder: the run's folder; its name is the copy's.

    Raises:
        UserError: fsspec or the store's library is missing, or the URL is none.
    """

    def __init__(self, url: str, folder: Path) -> None:
        fsspec: Any = require_extra("fsspec", "remote")
        try:
            self._store, root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise UserError(f"training.mirror is {url}: {error}") from None
        self.url = url
        self._folder = folder
        self._root = f"{root.rstrip('/')}/{folder.resolve().name}"

    def holds_run(self) -> bool:
        """Whether a run of this name is there."""
        return bool(self._store.exists(f"{self._root}/{RECORD_NAME}"))

    def steps(self) -> list[int]:
        """Steps whose copy is complete, ascending."""
        self._store.invalidate_cache()
        place = f"{self._root}/{CHECKPOINTS}"
        if not self._store.exists(place):
            return []
        found = self._store.find(place, detail=True)
        # By what a meta calls a file: with its folder where it is a shard.
        sizes = {path.rpartition(f"/{CHECKPOINTS}/")[2]: about["size"] for path, about in found.items()}
        complete = []
        for name in sizes:
            step = step_of(name)
            if step is None or name != file_name("meta", step):
                continue
            try:
                files = json.loads(self._store.cat_file(f"{place}/{name}"))["files"]
                whole = all(sizes.get(file) == about["size"] for file, about in files.items())
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
            complete += [step] if whole else []
        return sorted(complete)

    def push(self, manager: CheckpointManager) -> list[int]:
        """Copy the steps that are complete here and not, or not the same, there; then drop those that the manager's
        rules no longer keep.

        Returns:
            The steps that were copied.
        """
        there = self.steps()
        for name in RUN_FILES:
            if (self._folder / name).is_file():
                self._put(self._folder / name, name)
        copied = [step for step in manager.list_checkpoints() if self._push_step(manager, step, step in there)]
        self._prune(manager)
        self._remove_leftovers()
        return copied

    def _push_step(self, manager: CheckpointManager, step: int, there: bool) -> bool:
        *files, meta = manager.files(step)
        name = f"{CHECKPOINTS}/{meta.name}"
        content = meta.read_bytes()
        if self._content(name) == content and there:
            return False
        self._remove(name)
        part = f"{name}{PART_SUFFIX}"
        fresh = self._content(part) != content
        if fresh:
            self._put(meta, part)
        for path in files:
            place = f"{CHECKPOINTS}/{path.relative_to(manager.folder).as_posix()}"
            if fresh or self._size(place) != path.stat().st_size:
                self._put(path, place)
        self._put(meta, name)
        self._remove(part)
        return True

    def fetch(self, step: int, manager: CheckpointManager) -> None:
        """Copy a step from there to here, its meta last.

        Raises:
            DamagedCheckpoint: what arrived does not match its hashes.
        """
        manager.folder.mkdir(parents=True, exist_ok=True)
        meta = file_name("meta", step)
        names = [*json.loads(self._content(f"{CHECKPOINTS}/{meta}") or b"")["files"], meta]
        with progress(f"fetch step {step} from {self.url}", None, "B") as report:
            for name in names:
                path = manager.folder / name
                if path.resolve().parent not in (manager.folder.resolve(), manager.shards(step).resolve()):
                    raise DamagedCheckpoint(f"{self.url}: {meta} names {name}, which is no file of a checkpoint")
                path.parent.mkdir(exist_ok=True)
                report.advance(self._download(f"{CHECKPOINTS}/{name}", path))
        manager.verify(step)

    def fetch_run(self) -> None:
        """Copy the run's own files, run.json last, to a folder that was lost."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in sorted(RUN_FILES, key=lambda name: name == RECORD_NAME):
            if self._store.exists(f"{self._root}/{name}"):
                self._download(name, self._folder / name)

    def _put(self, path: Path, name: str) -> None:
        target = f"{self._root}/{name}"
        self._store.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
        self._store.put_file(str(path), target)

    def _content(self, name: str) -> bytes | None:
        target = f"{self._root}/{name}"
        return bytes(self._store.cat_file(target)) if self._store.exists(target) else None

    def _size(self, name: str) -> int | None:
        target = f"{self._root}/{name}"
        return int(self._store.size(target)) if self._store.exists(target) else None

    def _remove(self, name: str) -> None:
        """Delete a file; with the last of a step's shards their folder, where the store has folders of its own."""
        if self._store.exists(f"{self._root}/{name}"):
            self._store.rm_file(f"{self._root}/{name}")
            folder = f"{self._root}/{name}".rpartition("/")[0]
            if name.count("/") > 1 and self._store.isdir(folder) and not self._store.ls(folder, refresh=True):
                with suppress(OSError):  # a store without folders that knew of one
                    self._store.rmdir(folder)

    def _download(self, name: str, path: Path) -> int:
        total = 0
        with self._store.open(f"{self._root}/{name}", "rb") as source, atomic_writer(path) as target:
            while block := source.read(BLOCK_BYTES):
                target.write(block)
                total += len(block)
        fsync_folder(path.parent)
        return total

    def _prune(self, manager: CheckpointManager) -> None:
        steps = self.steps()
        newest = manager.latest_step()
        past = [step for step in steps if newest is not None and step <= newest]
        for step in set(past) - kept_steps(past, manager.keep, manager.keep_every):
            meta = f"{CHECKPOINTS}/{file_name('meta', step)}"
            names = json.loads(self._content(meta) or b"{}").get("files", {})
            for name in (meta, *(f"{CHECKPOINTS}/{name}" for name in names)):
                self._remove(name)

    def _remove_leftovers(self) -> None:
        """Delete what no step there consists of: the form of a step that a copy has replaced (shards, where it is one
        file now), and what a killed copy or deletion left without a meta. A step whose meta cannot be read stays."""
        self._store.invalidate_cache()
        by_step: dict[int, set[str]] = {}
        for path in self._store.find(f"{self._root}/{CHECKPOINTS}"):
            name = path.rpartition(f"/{CHECKPOINTS}/")[2]
            step = step_of(name.partition("/")[0].removesuffix(PART_SUFFIX))
            if step is not None:
                by_step.setdefault(step, set()).add(name)
        for step, names in by_step.items():
            meta = file_name("meta", step)
            try:
                parts = {meta, *json.loads(self._content(f"{CHECKPOINTS}/{meta}") or b'{"files": {}}')["files"]}
            except (ValueError, KeyError, TypeError):
                continue
            for name in names - parts:
                self._remove(f"{CHECKPOINTS}/{name}")


def bring_back(mirror: Mirror, folder: Path, step: int | None) -> None:
    """Before a run goes on: fetch from its second home what is missing here.

    Args:
        mirror: the run's.
        folder: the run's folder, perhaps empty.
        step: the step asked for; None: the newest, when it is newer than what is here.

    Raises:
        UserError: the store cannot be read.
    """
    manager = CheckpointManager(folder / CHECKPOINTS)
    try:
        if not (folder / RECORD_NAME).is_file() and mirror.holds_run():
            mirror.fetch_run()
        here, there = manager.list_checkpoints(), mirror.steps()
        newest = max(there, default=None)
        if step is not None and step in there and step not in here:
            mirror.fetch(step, manager)
        elif step is None and newest is not None and newest > max(here, default=-1):
            mirror.fetch(newest, manager)
    except DamagedCheckpoint as damage:
        say(f"warning: what came from {mirror.url}: {damage}")
    except (UserError, OSError):
        raise
    except Exception as error:  # each store has errors of its own
        raise UserError(f"training.mirror is {mirror.url}: {type(error).__name__}: {error}") from None
