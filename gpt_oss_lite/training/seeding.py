"""Seeds, and the state of every random number generator in a form that `torch.load(weights_only=True)` reads."""

import os
import random
from typing import Any

import numpy as np
import torch

from shared_data.errors import UserError

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
MAX_SEED = 2**32 - 1  # what NumPy's global generator takes


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy, torch and every CUDA device, and fix the cuBLAS workspace unless the environment has one.

    Raises:
        UserError: the seed is outside [0, 2**32).
    """
    check_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)  # queued until CUDA starts; nothing without it
    os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")


def check_seed(seed: int) -> None:
    """Raise UserError for a seed outside [0, 2**32)."""
    if not 0 <= seed <= MAX_SEED:
        raise UserError(f"--seed is {seed}: it must lie between 0 and {MAX_SEED}")


def fresh_seed() -> int:
    """A seed for a run that was given none; it is recorded, so the run can be repeated."""
    return int.from_bytes(os.urandom(4), "little")


def capture_rng() -> dict[str, Any]:
    """State of the generators of Python, NumPy, torch and CUDA; tensors, numbers and strings only."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    return {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Set every generator to a state of `capture_rng`. CUDA states of devices that are not here are left out."""
    python, numpy_state = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(
        (
            "MT19937",
            numpy_state["key"].numpy().astype(np.uint32),
            numpy_state["pos"],
            numpy_state["has_gauss"],
            numpy_state["gauss"],
        )
    )
    torch.set_rng_state(state["torch"])
    for device, cuda_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda_state, device)
