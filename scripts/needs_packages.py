"""The first import of each script: with a Python that has not our packages, one line that says what to do."""

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("shared_data") is None:  # a checkout that is not installed
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from shared_data.errors import leave_without

for name in ("torch", "typer"):
    if find_spec(name) is None:
        leave_without(ModuleNotFoundError(name=name))
