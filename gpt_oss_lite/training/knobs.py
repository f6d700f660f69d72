"""PyTorch's global switches for speed and determinism, each read back after setting; and the autocast context."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def set_knobs(deterministic: bool) -> dict[str, Any]:
    """Set the switches and return what PyTorch then says they are.

    TF32 for fp32 products (the router computes outside it), cuDNN's search over all of its algorithms, cuBLASLt,
    float32 precision "high". `preferred_blas_library` is a function: assigning to it, as is often seen, sets nothing.

    Args:
        deterministic: no search (its choice may differ between runs), and deterministic algorithms only.
    """
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = not deterministic
    torch.backends.cudnn.benchmark_limit = 0
    torch.backends.cudnn.deterministic = deterministic
    torch.use_deterministic_algorithms(deterministic)
    if torch.cuda.is_available():
        torch.backends.cuda.preferred_blas_library("cublaslt")
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "matmul.allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "cudnn.benchmark_limit": torch.backends.cudnn.benchmark_limit,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "blas": str(torch.backends.cuda.preferred_blas_library()).rsplit(".", 1)[-1].lower(),
    }


def compute_dtype_on(device: torch.device, dtype: str) -> torch.dtype:
    """The dtype of the products that `autocast` gives: the recipe's on CUDA, fp32 elsewhere."""
    return AUTOCAST_DTYPES.get(dtype, torch.float32) if device.type == "cuda" else torch.float32


def autocast(device: torch.device, dtype: str) -> AbstractContextManager[Any]:
    """Autocast to `dtype` (bf16, fp16, fp32) on CUDA; nothing on the CPU, where everything is fp32, nor for fp32."""
    if device.type != "cuda" or dtype not in AUTOCAST_DTYPES:
        return nullcontext()
    return torch.autocast("cuda", dtype=AUTOCAST_DTYPES[dtype])
