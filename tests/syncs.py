"""A stretch of work on a GPU during which the host must not wait for it."""

import contextlib
from collections.abc import Iterator

import pytest
import torch


@contextlib.contextmanager
def syncs_refused() -> Iterator[None]:
    """An operation for which the host waits is an error within the block. That it is one is tried at the end: a mode
    that refuses nothing would let everything pass."""
    value = torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
        with pytest.raises(RuntimeError, match="synchroniz"):
            value.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
