"""Files that a library writes by name: whole, or not there, and an error of the system's when they are not."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from gpt_oss_lite.training.disk import free_bytes
from shared_data.files import TEMPORARY_SUFFIX, fsync_folder


def assert_whole(path: Path) -> None:
    """Refuse a file that a write left short without an error, as some network file systems do.

    Raises:
        OSError: the file does not read as what was written.
    """
    try:
        if path.name.endswith(".safetensors" + TEMPORARY_SUFFIX):
            safe_open(path, "pt")
        else:
            torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise OSError(errno.EIO, f"written incompletely ({type(error).__name__})", str(path)) from None


@contextmanager
def as_os_error(path: Path) -> Iterator[None]:
    """The libraries' own errors in writing a file, which hide the system's, as OSError."""
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        text = str(error).splitlines()[0]
        code = errno.ENOSPC if "No space left" in str(error) or free_bytes(path.parent) == 0 else errno.EIO
        raise OSError(code, f"could not be written ({text})", str(path)) from error


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path for writers that open files by name: fsynced and renamed when the block ends without an error.

    `shared_data.files.atomic_writer` hands out an open file; safetensors replaces the file behind a name, so an fsync
    through a descriptor opened before would reach the wrong one.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        temporary.unlink(missing_ok=True)  # left by a killed process; or a link that would lead the write elsewhere
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        yield temporary
        os.chmod(temporary, mode)  # safetensors' own file is for its owner alone, whatever the umask
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # whatever it was, nothing half-written stays
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)
