"""Rows times their factors, against PyTorch: in Triton's interpreter on the CPU and on the GPU where there is one."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install triton==3.7.1")

from gpt_oss_lite.model.kernels.scale import scaled

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("shape", [(1, 1), (7, 20), (64, 96)])
@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16])
def test_rows_times_factors_are_rounded_once_and_nothing_beside_them_is_written(shape, by_row, out_dtype):
    torch.manual_seed(0)
    x = torch.randn(shape, device=DEVICE)
    factor = torch.randn(shape[0], device=DEVICE) if by_row else torch.tensor(1 / 3, device=DEVICE)
    expected = (x.double() * factor.double().reshape(-1, 1)).float().to(out_dtype)
    buffer = torch.full((shape[0] + 2, shape[1]), 7.0, dtype=out_dtype, device=DEVICE)
    scaled(x, factor, buffer[1:-1])
    assert torch.equal(buffer[1:-1], expected)
    assert (buffer[0] == 7).all()
    assert (buffer[-1] == 7).all()
