"""The errors that are meant for the person at the keyboard.

A command prints such an error as one line and exits with code 2 (bad input). Everything else that escapes is a defect
of ours, or of the machine, and exits with code 1.
"""

import importlib
from types import ModuleType


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
