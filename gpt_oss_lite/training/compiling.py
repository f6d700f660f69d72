"""torch.compile with a way back: a model that does not compile trains uncompiled, with one warning."""

import warnings
from collections.abc import Callable
from typing import Any

import torch

from shared_data.console import say

Forward = Callable[..., Any]


def compiled_or_plain(function: Forward, mode: str) -> Forward:
    """`function` compiled in `mode` at its first call; where the compiler fails, `function` itself from then on."""
    chosen = torch.compile(function, mode=mode)
    # What chooses a backend is cached and has no state, so that tracing through it, as Dynamo says it does, is right.
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`-wrapped")

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal chosen
        try:
            return chosen(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as failure:
            reason = (str(failure).splitlines() or [""])[0]
            say(f"warning: torch.compile failed ({type(failure).__name__}: {reason}); going on without it")
            chosen = function
            return function(*args, **kwargs)

    return call
