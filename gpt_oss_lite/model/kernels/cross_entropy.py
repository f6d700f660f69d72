"""Cross-entropy of a chunk of logits and its gradient, which replaces them: one kernel, one pass over a row.

A softmax needs its row's sum before it can divide by it, so it reads a row twice. Here the exponentials themselves
replace the logits, and the sum follows at the row's end: the two products that take the gradient divide their small
side by it (loss.py). Exponentials are relative to a reference that moves, as Milakov and Gimelshein's (2018) online
softmax moves its maximum, but only when a logit exceeds it by HEADROOM; what is written already is then scaled again,
which bf16 and fp32 bear without loss, having eight bits of exponent.

Shapes: C tokens of a chunk, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt_oss_lite.model.kernels.launch import check_contiguous

BLOCK = 2048
WARPS = 4
HEADROOM = tl.constexpr(40.0)
"""e^40 times the largest vocabulary is far below the largest bf16, e^88."""


@triton.jit
def _cross_entropy(
    logits_ptr, target_ptr, loss_ptr, factor_ptr, copy_ptr, copy_scale, V: tl.constexpr, IGNORE: tl.constexpr,
    HAS_COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * V
    target = tl.load(target_ptr + row)
    valid = target != IGNORE
    target_ptr = row_ptr + tl.where(valid, target, 0)
    target_logit = tl.load(target_ptr).to(tl.float32)
    cols = tl.arange(0, BLOCK)
    reference = float("-inf")
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, V, BLOCK):
        at = start + cols
        x = tl.load(row_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32)
        top = tl.max(x, axis=0)
        if top > reference + HEADROOM:
            shrink = tl.exp(reference - top)
            total *= shrink
            tl.debug_barrier()
            for back in range(0, start, BLOCK):
                written = tl.load(row_ptr + back + cols).to(tl.float32)
                tl.store(row_ptr + back + cols, (written * shrink).to(logits_ptr.dtype.element_ty))
            reference = top
        # A row that has shown only -inf has no reference yet: exp(-inf - 0) is 0, where -inf - -inf would be NaN.
        e = tl.exp(x - tl.where(reference == float("-inf"), 0.0, reference))
        total += e
        tl.store(row_ptr + at, tl.where(valid, e, 0.0).to(logits_ptr.dtype.element_ty), mask=at < V)
    row_total = tl.sum(total, axis=0)
    factor = tl.where(valid, 1.0 / row_total, 0.0)
    tl.store(factor_ptr + row, factor)
    # Logits are subtracted from each other first: beside a reference of 1e4 a small loss would lose its digits.
    tl.store(loss_ptr + row, tl.where(valid, tl.log(row_total) - (target_logit - reference), 0.0))
    tl.debug_barrier()
    at_target = tl.where(valid, tl.exp(target_logit - reference) - row_total, 0.0)
    tl.store(target_ptr, at_target.to(logits_ptr.dtype.element_ty))
    if HAS_COPY:
        tl.debug_barrier()
        for start in range(0, V, BLOCK):
            at = start + cols
            gradient = tl.load(row_ptr + at, mask=at < V, other=0.0).to(tl.float32) * factor
            copy = (gradient * copy_scale).to(copy_ptr.dtype.element_ty)
            tl.store(copy_ptr + row * V + at, copy, mask=at < V)


def cross_entropy_(
    logits_CV: Tensor, target_C: Tensor, ignore_index: int, copy_CV: Tensor | None = None, copy_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Losses of the tokens and a factor for each; factor times what replaces the logits is d(sum of losses) / d logits.

    Ignored targets have loss, factor and gradient 0. A target out of range is the caller's to refuse.

    Args:
        logits_CV: bf16 or fp32. fp16 has too few bits of exponent.
        copy_CV: takes the gradient itself times `copy_scale`, in its own dtype.

    Returns:
        Losses (C,) and factors (C,), fp32.
    """
    check_contiguous(logits_CV, target_C)
    assert logits_CV.dtype != torch.float16
    n_tokens, vocabulary = logits_CV.shape
    loss_C = torch.empty(n_tokens, dtype=torch.float32, device=logits_CV.device)
    factor_C = torch.empty_like(loss_C)
    _cross_entropy[(n_tokens,)](
        logits_CV, target_C, loss_C, factor_C, copy_CV, copy_scale, V=vocabulary, IGNORE=ignore_index,
        HAS_COPY=copy_CV is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return loss_C, factor_C
