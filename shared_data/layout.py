"""Where everything lies below the data folder (`data/`, or $LLM_DATA_ROOT)."""

import fcntl
import glob
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shared_data.errors import UserError

LOCK_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Layout:
    """The folders of one data root."""

    root: Path

    def stage(self, name: str, source: str) -> Path:
        """Output of a stage for a source: raw/SOURCE, clean/SOURCE or tokens/SOURCE."""
        return self.root / name / source

    @property
    def shards(self) -> Path:
        """What packing writes; validation shards lie in validation/ below it."""
        return self.root / "shards"

    @property
    def corpus(self) -> Path:
        """What training reads."""
        return self.root / "pretrain_chinchilla"

    @property
    def state(self) -> Path:
        """Commit records and intermediate results: what a killed run goes on from."""
        return self.root / "state"

    @property
    def reports(self) -> Path:
        """One JSON report per stage."""
        return self.state / "reports"

    @contextmanager
    def locked(self, *, shared: bool = False) -> Iterator[None]:
        """Hold the data folder against a second run; if shared, only against one that does not share it.

        Raises:
            UserError: another run still holds it after ten seconds.
        """
        self.state.mkdir(parents=True, exist_ok=True)
        with open(self.state / "lock", "a") as file:
            deadline = time.monotonic() + LOCK_PATIENCE_S
            while True:
                try:
                    fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise UserError(
                            f"{self.root}: another run is preparing data there; wait for it to end"
                        ) from None
                    time.sleep(0.05)
            yield


class TurnLock:
    """Lets one process after another do what is not a task: plan, record, publish. Held in its `with` block."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "turn"

    def __enter__(self) -> Self:
        self._file = open(self._path, "a")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @contextmanager
    def given(self) -> Iterator[None]:
        """Let others have their turn meanwhile."""
        fcntl.flock(self._file, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_EX)


def resolve_source_path(pattern: str, root: Path) -> Path:
    """A path or glob of a source; where it begins with data/ and finds nothing, data/ stands for the data root."""
    path = Path(pattern).expanduser()
    if path.parts[:1] == ("data",) and not glob.glob(str(path), recursive=True):
        return root.joinpath(*path.parts[1:])
    return Path(os.path.normpath(path))
