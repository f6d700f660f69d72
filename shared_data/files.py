"""Files that are whole or not there: write to a temporary name, fsync, rename, fsync the folder.

Pillai et al. (OSDI 2014, "All File Systems Are Not Created Equal") list why each of the four steps is needed.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

TEMPORARY_SUFFIX = ".tmp"


def fsync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block ends without an error, and leaves no trace when it does not.

    The temporary file lies beside `path` under the same name plus `.tmp`: one left by a killed process is overwritten.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        temporary.unlink(missing_ok=True)  # it may be a link, that would lead the write elsewhere
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:  # whatever it was, nothing half-written stays
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk fails in write(), which does not know the file's name
        raise
    fsync_folder(path.parent)


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace the content of `path`, or leave it as it was."""
    with atomic_writer(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_if_changed(path: Path, content: bytes | str) -> None:
    """Replace the content of `path` unless it is that already."""
    wanted = content.encode() if isinstance(content, str) else content
    if not path.is_file() or path.read_bytes() != wanted:
        write_atomic(path, wanted)


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
