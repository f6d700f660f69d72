"""Rows of a matrix by token id, and the sum of the rows' gradients by id.

Adding a token's gradient to its row as it comes would need atomics, whose order changes from call to call, and the
commonest tokens would wait for each other. Instead the ids are sorted: equal ones form a run. Runs are summed chunk by
chunk; one that spans chunks leaves a partial sum in each of them, and these are added in order.

Shapes: N tokens, D width, V rows of the matrix, C = ceil(N / CHUNK) chunks of sorted tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt_oss_lite.model.kernels.launch import check_contiguous, next_power_of_2

ROWS = 4
CHUNK = 32
COLS = 128
WARPS = 1


@triton.jit
def _gather(id_ptr, weight_ptr, out_ptr, n_tokens, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    mask = (tokens[:, None] < n_tokens) & (cols[None, :] < D)
    ids = tl.load(id_ptr + tokens, mask=tokens < n_tokens, other=0).to(tl.int64)
    rows = tl.load(weight_ptr + ids[:, None] * D + cols[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + tokens[:, None].to(tl.int64) * D + cols[None, :], rows.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sum_in_chunks(
    dx_ptr, id_ptr, token_ptr, dweight_ptr, partial_ptr, n_tokens,
    D: tl.constexpr, CHUNK: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    chunk, start = tl.program_id(0).to(tl.int64), tl.program_id(0) * CHUNK
    places = start + tl.arange(0, CHUNK)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    valid, in_row = places < n_tokens, cols < D
    ids = tl.load(id_ptr + places, mask=valid, other=-1)
    before = tl.load(id_ptr + places - 1, mask=valid & (places > 0), other=-1)
    tokens = tl.load(token_ptr + places, mask=valid, other=0).to(tl.int64)
    dx = tl.load(dx_ptr + tokens[:, None] * D + cols[None, :], mask=valid[:, None] & in_row[None, :], other=0.0)
    # Run 0 comes from the chunk before, where there is such a one; the others begin here.
    runs = tl.where(valid, tl.cumsum((valid & (ids != before)).to(tl.int32), axis=0), 0)
    last, next_id = tl.max(runs, axis=0), -1
    if start + CHUNK < n_tokens:
        next_id = tl.load(id_ptr + start + CHUNK)
    for run in range(tl.min(tl.where(valid, runs, CHUNK), axis=0), last + 1):
        mine = valid & (runs == run)
        id = tl.max(tl.where(mine, ids, -1), axis=0)
        total = tl.sum(tl.where(mine[:, None], dx.to(tl.float32), 0.0), axis=0)
        if run == 0:
            tl.store(partial_ptr + 2 * chunk * D + cols, total, mask=in_row)
        elif id == next_id:
            tl.store(partial_ptr + (2 * chunk + 1) * D + cols, total, mask=in_row)
        else:
            tl.store(dweight_ptr + id.to(tl.int64) * D + cols, total, mask=in_row)


@triton.jit
def _sum_over_chunks(
    id_ptr, partial_ptr, dweight_ptr, n_tokens, D: tl.constexpr, CHUNK: tl.constexpr, COLS: tl.constexpr
):
    chunk, start = tl.program_id(0).to(tl.int64), tl.program_id(0) * CHUNK
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    id = tl.load(id_ptr + start + CHUNK - 1)
    before = tl.load(id_ptr + start - 1, mask=start > 0, other=-1)
    if (id != before) & (id == tl.load(id_ptr + start + CHUNK)):  # the run begins in this chunk and leaves it
        total = tl.load(partial_ptr + (2 * chunk + 1) * D + cols, mask=cols < D, other=0.0)
        goes_on = True
        while goes_on:
            chunks = chunk + 1 + tl.arange(0, CHUNK)
            mine = tl.load(id_ptr + chunks * CHUNK, mask=chunks * CHUNK < n_tokens, other=-1) == id
            partials = partial_ptr + 2 * chunks[:, None] * D + cols[None, :]
            total += tl.sum(tl.load(partials, mask=mine[:, None] & (cols < D)[None, :], other=0.0), axis=0)
            chunk += CHUNK
            goes_on = tl.min(mine.to(tl.int32), axis=0) == 1
        tl.store(dweight_ptr + id.to(tl.int64) * D + cols, total, mask=cols < D)


def gather_rows(id_N: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """Row id_N[n] of the matrix for each n, (N, D) in `dtype`; ids lie in [0, V)."""
    check_contiguous(id_N, weight_VD)
    n_tokens, width = id_N.numel(), weight_VD.shape[1]
    out_ND = weight_VD.new_empty(n_tokens, width, dtype=dtype)
    grid = (triton.cdiv(n_tokens, ROWS),)
    _gather[grid](id_N, weight_VD, out_ND, n_tokens, D=width, ROWS=ROWS, COLS=next_power_of_2(width))
    return out_ND


def rows_gradient(dx_ND: Tensor, id_N: Tensor, n_rows: int) -> Tensor:
    """Gradient of the matrix whose rows `gather_rows` took: for each id the sum of its dx, (V, D) fp32."""
    check_contiguous(dx_ND, id_N)
    n_tokens, width = dx_ND.shape
    # Half as many passes over 32 bits as over 64.
    sorted_N, token_N = id_N.to(torch.int32).sort(stable=True)
    n_chunks, columns = triton.cdiv(n_tokens, CHUNK), triton.cdiv(width, COLS)
    dweight_VD = dx_ND.new_zeros(n_rows, width, dtype=torch.float32)
    partial_C2D = dx_ND.new_empty(n_chunks, 2, width, dtype=torch.float32)
    sizes = {"D": width, "CHUNK": CHUNK, "COLS": COLS, "num_warps": WARPS}
    _sum_in_chunks[(n_chunks, columns)](dx_ND, sorted_N, token_N, dweight_VD, partial_C2D, n_tokens, **sizes)
    if n_chunks > 1:  # no run leaves the last chunk
        _sum_over_chunks[(n_chunks - 1, columns)](sorted_N, partial_C2D, dweight_VD, n_tokens, **sizes)
    return dweight_VD
