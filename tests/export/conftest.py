"""transformers keeps the modelling files that it copies in a folder that goes with the tests, and asks no network."""

import tempfile
from collections.abc import Iterator

import datasets.config
import huggingface_hub.constants
import pytest
import transformers.dynamic_module_utils

# One folder a process: transformers imports what it copies there as one package, `transformers_modules`.
_home = tempfile.TemporaryDirectory(prefix="hf-home-")


@pytest.fixture(scope="module", autouse=True)
def _offline_hub() -> Iterator[None]:
    """For the modules of this folder alone: the libraries read the environment once, when they are imported, which is
    above; what these tests start reads it too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HOME", _home.name)
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", f"{_home.name}/modules")
        yield
