"""The errors that are meant for the person at the keyboard.

A command prints such an error as one line and exits with code 2 (bad input). Everything else that escapes is a defect
of ours, or of the machine, and exits with code 1.
"""

import importlib
import sys
from types import ModuleType
from typing import NoReturn


class UserError(ValueError):
    """Bad input. The message names the file, key or option, the value, and what is allowed; it is one line."""


def require_extra(module: str, extra: str) -> ModuleType:
    """Import an optional package.

    Raises:
        UserError: it is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.split(".")[0] != module.split(".")[0]:
            raise
        raise UserError(
            f"the package {module.split('.')[0]} is not installed; it comes with: pip install 'gpt-oss-lite[{extra}]'"
        ) from None


def leave_without(missing: ModuleNotFoundError) -> NoReturn:
    """End a program that was started by a Python without our packages, with one line that says what to do.

    Raises:
        ModuleNotFoundError: it is one of our own modules that is missing.
    """
    name = (missing.name or "").split(".")[0]
    if name in ("", "gpt_oss_lite", "shared_data"):
        raise missing
    print(
        f"error: {sys.executable} has no package {name}: run `make venv` once and `. .venv/bin/activate` in each shell",
        file=sys.stderr,
    )
    sys.exit(2)
