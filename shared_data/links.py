"""A second name for a file, or a copy where that cannot be."""

import os
import shutil
from pathlib import Path

from shared_data.files import TEMPORARY_SUFFIX, atomic_writer, fsync_folder


def share_file(source: Path, target: Path, *, symbolic: bool) -> None:
    """Make `target` the same file as `source`: a hard link, else (if allowed) a symbolic one, else a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and target.samefile(source):
        return
    temporary = target.with_name(target.name + TEMPORARY_SUFFIX)
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        try:
            if not symbolic:
                raise
            os.symlink(os.path.relpath(source, target.parent), temporary)
        except OSError:
            with open(source, "rb") as content, atomic_writer(target) as file:
                shutil.copyfileobj(content, file, 1 << 20)
            return
    os.replace(temporary, target)
    fsync_folder(target.parent)
