"""transformers' cache and temporary code of these tests lie in a folder that goes with the tests, and nothing asks the network."""

import os
import tempfile

_home = tempfile.TemporaryDirectory(prefix="hf-home-")  # goes with the process
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HOME", _home.name)
