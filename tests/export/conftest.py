"""transformers keeps its cache in a folder that goes with the tests, and asks no network."""

import os
import tempfile

_home = tempfile.TemporaryDirectory(prefix="hf-home-")  # goes with the process
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HOME", _home.name)
