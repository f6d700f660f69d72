"""transformers' cache and temporary code of these tests lie in pytest's folder, and nothing asks the network."""

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HOME", tempfile.mkdtemp(prefix="hf-home-"))
