"""Launch geometry shared by the kernels."""

import functools

import torch
import triton
from torch import Tensor


def next_power_of_2(size: int) -> int:
    """Block width for a row of `size` elements: Triton's ranges are powers of two, the rest is masked."""
    return triton.next_power_of_2(size)


@functools.cache
def persistent_programs(device: torch.device, per_multiprocessor: int) -> int:
    """Programs of a kernel that loops over rows and keeps sums in registers.

    The number decides how many partial sums are added at the end, so it is a constant of the device.
    """
    if device.type != "cuda":
        return 4
    return per_multiprocessor * torch.cuda.get_device_properties(device).multi_processor_count


def check_contiguous(*tensors: Tensor) -> None:
    """The kernels address rows by number: our own invariant."""
    assert all(tensor.is_contiguous() for tensor in tensors)
