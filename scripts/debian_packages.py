"""Debian's packages as a source of text: fetched and unpacked beside the system, nothing is installed."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from shared_data.errors import UserError


def fetch_packages(folder: Path, names: Sequence[str]) -> None:
    """Download packages into `folder`/packages and unpack them into `folder`/files; no rights are needed.

    Raises:
        UserError: one of the tools failed, after it said why.
        OSError: there are no such tools here, or the folder cannot be written.
    """
    packages = folder / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    _run(["apt-get", "download", *names], packages)
    for package in sorted(packages.glob("*.deb")):
        _run(["dpkg-deb", "-x", str(package.resolve()), str((folder / "files").resolve())], packages)


def _run(command: list[str], folder: Path) -> None:
    code = subprocess.run(command, cwd=folder, check=False).returncode
    if code:
        raise UserError(f"{' '.join(command[:2])} ended with exit code {code} in {folder}; see what it said above")
