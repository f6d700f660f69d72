"""Files that are not on this machine: read from a position on, through outages, never from the start again.

A file is opened with fsspec (https, s3, hf, ...), which fetches the ranges that are read: of a parquet file the footer
and the columns wanted. When the other side fails, the file is opened again after a pause at the document that comes
next. Documents are counted by position: whatever fails, each is read once.
"""

import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, BinaryIO, TypeVar

from shared_data.console import say
from shared_data.errors import UserError, require_extra
from shared_data.records import (
    LINE_SUFFIXES,
    Document,
    Fields,
    base_suffix,
    documents_of_lines,
    documents_of_parquet,
    lines_of_stream,
    open_decompressed,
)

Value = TypeVar("Value")

PATIENCE_S = 1800.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Set, they keep the hub's libraries from asking it."""
_PASSING_STATUSES = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True)
class RemoteFile:
    """One file, and what tells that it is still the same."""

    url: str
    name: str
    """Its name in the ids of its documents."""
    size: int
    version: str
    """A commit, an ETag or the like; empty where the other side has none."""


def is_url(name: str) -> bool:
    """Whether a source's file is named by an address."""
    return "://" in name


def may_pass(error: BaseException) -> bool:
    """Whether trying again can help: the network or a server failed, rather than the request."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None) or getattr(error, "status", None)
    if isinstance(status, int):
        return status in _PASSING_STATUSES
    kinds = {kind.__name__ for kind in type(error).__mro__}
    network = {"ConnectError", "TimeoutException", "TransportError", "ClientError", "ConnectionError"}
    if isinstance(error, TimeoutError | ConnectionError) or kinds & network:
        return True
    cause = error.__cause__ or error.__context__
    return cause is not None and not isinstance(error, UserError) and may_pass(cause)


@dataclass
class Patience:
    """How long to go on trying without anything that works."""

    what: str
    limit_s: float = PATIENCE_S
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _pause_s: float = FIRST_PAUSE_S
    _since: float | None = field(default=None)

    def worked(self) -> None:
        """Something came through: the next failure is the first again."""
        self._pause_s, self._since = FIRST_PAUSE_S, None

    def after(self, error: Exception) -> None:
        """Pause after a failure.

        Raises:
            UserError: it has failed for too long.
            Exception: the error itself, if trying again cannot help.
        """
        if not may_pass(error):
            raise error
        now = self.clock()
        self._since = now if self._since is None else self._since
        words = " ".join(str(error).split())[:160] or type(error).__name__
        if now - self._since > self.limit_s:
            raise UserError(f"{self.what}: no answer for {self.limit_s:.0f} s ({words})") from None
        say(f"{self.what}: {words}; trying again in {self._pause_s:.0f} s")
        self.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def until_it_works(self, action: Callable[[], Value]) -> Value:
        """Do something, again after each failure that may pass."""
        while True:
            try:
                value = action()
            except Exception as error:  # each store has errors of its own; `after` raises what will not pass
                self.after(error)
            else:
                self.worked()
                return value


def refuse_offline(what: str) -> None:
    """Refuse to ask the hub where the environment forbids it: no pause would ever help.

    Raises:
        UserError: its libraries are set offline; names the variable.
    """
    hub, datasets = require_extra("huggingface_hub.constants", "data"), require_extra("datasets.config", "data")
    if hub.HF_HUB_OFFLINE or datasets.HF_HUB_OFFLINE:
        values = {name: os.environ.get(name, "") for name in OFFLINE_VARIABLES}
        given = [f"{name}={value}" for name, value in values.items() if value.upper() in ("1", "ON", "YES", "TRUE")]
        setting = ", ".join(given) or OFFLINE_VARIABLES[0]
        raise UserError(f"{what}: the hub is not asked, since {setting} is set; unset it, or name local files")


@functools.cache
def _file_system(protocol: str) -> Any:
    if protocol == "hf":
        refuse_offline("hf://")
    fsspec = require_extra("fsspec", "data")
    try:
        return fsspec.filesystem(protocol)
    except (ValueError, ImportError) as error:
        raise UserError(f"{protocol}://: {error}") from None


def _open(url: str) -> BinaryIO:
    return _file_system(url.partition("://")[0]).open(url, "rb")


def find_remote_files(pattern: str, source: str) -> list[RemoteFile]:
    """The files that an address or a glob of addresses names, sorted.

    Raises:
        UserError: it names none, or the other side does not answer.
    """
    protocol = pattern.partition("://")[0]
    files = _file_system(protocol)

    def look() -> list[RemoteFile]:
        has_glob = any(mark in pattern for mark in "*?[")
        names = sorted(files.glob(pattern)) if has_glob else [pattern]
        return [_describe(files, name if is_url(name) else f"{protocol}://{name}") for name in names]

    try:
        found = Patience(pattern).until_it_works(look)
    except FileNotFoundError:
        found = []
    if not found:
        raise UserError(f"source {source}: files: {pattern} matches no file")
    return found


def _describe(files: Any, url: str) -> RemoteFile:
    about = files.info(url)
    version = next((about[key] for key in ("blob_id", "ETag", "etag", "mtime", "LastModified") if about.get(key)), "")
    return RemoteFile(url, url.partition("://")[2], int(about.get("size") or 0), str(version))


def read_remote(file: RemoteFile, fields: Fields, start: int, patience: Patience | None = None) -> Iterator[Document]:
    """The documents of a file from number `start` on, through failures that pass.

    Raises:
        UserError: the file is damaged or of an unknown kind, or the other side fails for too long.
    """
    patience = patience or Patience(file.name)
    position = start
    while True:
        try:
            for document in _documents(file, fields, position):
                position += 1
                patience.worked()
                yield document
            return
        except UserError:
            raise
        except Exception as error:  # the same
            patience.after(error)


def _documents(file: RemoteFile, fields: Fields, start: int) -> Iterator[Document]:
    path = PurePosixPath(file.name)
    with _open(file.url) as stream:
        if base_suffix(path) == ".parquet":
            yield from documents_of_parquet(stream, file.name, fields, start)
        elif base_suffix(path) in LINE_SUFFIXES:
            lines = lines_of_stream(open_decompressed(stream, path))
            yield from documents_of_lines(lines, file.name, fields, start)
        else:
            raise UserError(
                f"{file.url}: files from afar can be .jsonl, .json, each also with .gz, .xz or .zst, and .parquet"
            )
