"""Attention sinks on top of any kernel that returns its output and log-sum-exp.

With L = logaddexp(lse, sink), the output with the sink in the denominator is o' = o * exp(lse - L). A kernel's own
backward pass, given do', o' and L in place of do, o and lse, then yields dq, dk and dv of the whole, since it only uses
p = exp(score - L) and delta = do' . o'; and dsink = -sum exp(sink - L) * delta.

Shapes: B batch, T time, H heads, hd head width; o is (B, T, H, hd), lse is (B, H, T).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt_oss_lite.model.kernels.launch import check_contiguous, next_power_of_2, persistent_programs

PROGRAMS = 16


@triton.jit
def _add_sink(
    o_ptr, lse_ptr, sink_ptr, seq_len,
    H: tl.constexpr, HD: tl.constexpr, HEADS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    heads = tl.arange(0, HEADS)
    cols = tl.arange(0, COLS)
    mask = (heads[:, None] < H) & (cols[None, :] < HD)
    lse_ptrs = lse_ptr + (row // seq_len) * H * seq_len + heads * seq_len + row % seq_len
    lse = tl.load(lse_ptrs, mask=heads < H, other=0.0)
    sink = tl.load(sink_ptr + heads, mask=heads < H, other=0.0)
    top = tl.maximum(lse, sink)
    total = top + tl.log(tl.exp(lse - top) + tl.exp(sink - top))
    o_ptrs = o_ptr + row.to(tl.int64) * H * HD + heads[:, None] * HD + cols[None, :]
    o = tl.load(o_ptrs, mask=mask, other=0.0).to(tl.float32) * tl.exp(lse - total)[:, None]
    tl.store(o_ptrs, o.to(o_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptrs, total, mask=heads < H)


@triton.jit
def _sink_gradient(
    do_ptr, o_ptr, lse_ptr, sink_ptr, dsink_ptr, n_rows, seq_len,
    H: tl.constexpr, HD: tl.constexpr, HEADS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    heads = tl.arange(0, HEADS)
    cols = tl.arange(0, COLS)
    mask = (heads[:, None] < H) & (cols[None, :] < HD)
    sink = tl.load(sink_ptr + heads, mask=heads < H, other=0.0)
    dsink = tl.zeros([HEADS], dtype=tl.float32)
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        offsets = tl.cast(row, tl.int64) * H * HD + heads[:, None] * HD + cols[None, :]
        do = tl.load(do_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        o = tl.load(o_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        lse = tl.load(
            lse_ptr + (row // seq_len) * H * seq_len + heads * seq_len + row % seq_len, mask=heads < H, other=0.0
        )
        dsink -= tl.exp(sink - lse) * tl.sum(do * o, axis=1)
    tl.store(dsink_ptr + tl.program_id(0) * H + heads, dsink, mask=heads < H)


def add_sink_(o_BTHd: Tensor, lse_BHT: Tensor, sink_H: Tensor) -> None:
    """Put the sinks into the denominator, in place: o becomes o', lse (fp32) becomes L. `sink_H` is clamped already."""
    check_contiguous(o_BTHd, lse_BHT)
    batch, seq_len, n_heads, head_dim = o_BTHd.shape
    _add_sink[(batch * seq_len,)](
        o_BTHd, lse_BHT, sink_H, seq_len,
        H=n_heads, HD=head_dim, HEADS=next_power_of_2(n_heads), COLS=next_power_of_2(head_dim),
    )  # fmt: skip


def sink_gradient(do_BTHd: Tensor, o_BTHd: Tensor, lse_BHT: Tensor, sink_H: Tensor) -> Tensor:
    """Gradient of the clamped sinks (H,) fp32, from o' and L."""
    check_contiguous(do_BTHd, o_BTHd, lse_BHT)
    batch, seq_len, n_heads, head_dim = o_BTHd.shape
    programs = persistent_programs(o_BTHd.device, PROGRAMS)
    dsink_PH = torch.empty(programs, n_heads, dtype=torch.float32, device=o_BTHd.device)
    _sink_gradient[(programs,)](
        do_BTHd, o_BTHd, lse_BHT, sink_H, dsink_PH, batch * seq_len, seq_len,
        H=n_heads, HD=head_dim, HEADS=next_power_of_2(n_heads), COLS=next_power_of_2(head_dim),
    )  # fmt: skip
    return dsink_PH.sum(0)
