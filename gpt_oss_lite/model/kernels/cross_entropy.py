"""Cross-entropy of a chunk of logits and its gradient, which replaces them: one kernel, two passes over a row.

The online log-sum-exp of the first pass is Milakov and Gimelshein's (2018). The second pass mostly reads from L2.

Shapes: C tokens of a chunk, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt_oss_lite.model.kernels.launch import check_contiguous

BLOCK = 2048
WARPS = 16


@triton.jit
def _cross_entropy(
    logits_ptr, target_ptr, loss_ptr, copy_ptr, copy_scale, V: tl.constexpr, IGNORE: tl.constexpr,
    HAS_COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * V
    target = tl.load(target_ptr + row)
    cols = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    # Four blocks share one correction of the running sum: exponentials, not bytes, would bind otherwise.
    for start in range(0, V, 4 * BLOCK):
        new_top = top
        for part in tl.static_range(4):
            at = start + part * BLOCK + cols
            new_top = tl.maximum(new_top, tl.load(row_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32))
        # A lane that has seen nothing but -inf keeps total 0: exp(-inf - 0) is 0, where -inf - -inf would be NaN.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - shift)
        for part in tl.static_range(4):
            at = start + part * BLOCK + cols
            total += tl.exp(tl.load(row_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32) - shift)
        top = new_top
    row_top = tl.max(top, axis=0)
    lse = row_top + tl.log(tl.sum(total * tl.exp(top - row_top), axis=0))
    valid = target != IGNORE
    target_logit = tl.load(row_ptr + tl.where(valid, target, 0)).to(tl.float32)
    tl.store(loss_ptr + row, tl.where(valid, lse - target_logit, 0.0))
    tl.debug_barrier()
    for start in range(0, V, BLOCK):
        x = tl.load(row_ptr + start + cols, mask=start + cols < V, other=0.0).to(tl.float32)
        gradient = tl.exp(x - lse) - tl.where(start + cols == target, 1.0, 0.0)
        gradient = tl.where(valid, gradient, 0.0)
        tl.store(row_ptr + start + cols, gradient.to(logits_ptr.dtype.element_ty), mask=start + cols < V)
        if HAS_COPY:
            copy = (gradient * copy_scale).to(copy_ptr.dtype.element_ty)
            tl.store(copy_ptr + row * V + start + cols, copy, mask=start + cols < V)


def cross_entropy_(
    logits_CV: Tensor, target_C: Tensor, ignore_index: int, copy_CV: Tensor | None = None, copy_scale: float = 1.0
) -> Tensor:
    """Losses of the tokens (C,) fp32; the logits are replaced by d(sum of losses) / d logits.

    Ignored targets have loss and gradient 0. A target out of range is the caller's to refuse.

    Args:
        copy_CV: takes the gradient times `copy_scale` too, in its own dtype.
    """
    check_contiguous(logits_CV, target_C)
    n_tokens, vocabulary = logits_CV.shape
    loss_C = torch.empty(n_tokens, dtype=torch.float32, device=logits_CV.device)
    _cross_entropy[(n_tokens,)](
        logits_CV, target_C, loss_C, copy_CV, copy_scale, V=vocabulary, IGNORE=ignore_index,
        HAS_COPY=copy_CV is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return loss_C
