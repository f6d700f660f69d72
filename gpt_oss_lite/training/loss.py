"""Next-token cross-entropy without the logits: head and loss are one operation over chunks of tokens.

A head of 128,256 rows makes 8.4 GB of bf16 logits from a micro-batch of 8 x 4,096 tokens. Here each chunk's logits are
made, turned in place into their own gradient, multiplied out into the gradients of hidden states and head, and dropped,
all in the forward pass; the backward pass only scales. The idea is that of Liger Kernel (Hsu et al., 2024) and Cut
Cross-Entropy (Wijmans et al., 2024).

Shapes: B micro-batch, T positions, D width, V vocabulary rows, N = B * T tokens, C tokens of a chunk.
"""

from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_oss_lite.training.fp8 import GRADIENT_DTYPE, GRADIENT_SCALE, Fp8Head
from gpt_oss_lite.training.rounding import times

IGNORE_INDEX = -100

# Kernels index elements with 32 bits in places (pytorch#85005): no chunk reaches this many logits.
MAX_CHUNK_LOGITS = 2**31 - 1


class ChunkKernel(Protocol):
    """What turns one chunk of logits into its loss and, in place and but for a factor per row, its gradient."""

    def __call__(
        self, logits_CV: Tensor, targets_C: Tensor, ignore_index: int, with_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropy of each token and its row's factor, both (C,) fp32 (float64 of such logits), 0 where ignored.

        factor * logits_CV is then d(sum of losses) / d(logits): a softmax divides by its row's sum, which is known only
        when the row has been written, and the products that follow are narrower by V / D.
        """


def plain_chunk_kernel(
    logits_CV: Tensor, targets_C: Tensor, ignore_index: int, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """The ChunkKernel of plain PyTorch: one fp32 buffer, every step in place."""
    valid_C = targets_C != ignore_index
    index_C1 = targets_C.where(valid_C, 0).unsqueeze(1)
    max_C1 = logits_CV.amax(dim=-1, keepdim=True)
    target_logit_C1 = logits_CV.gather(1, index_C1) - max_C1
    logits_CV.sub_(max_C1).exp_()
    sum_C1 = logits_CV.sum(dim=-1, keepdim=True)
    # A row with a NaN or an infinity has a NaN loss, as it must; `where` keeps such a row out only if it is ignored.
    losses_C = (sum_C1.log() - target_logit_C1).squeeze(1).where(valid_C, 0.0)
    if with_gradient:
        logits_CV.scatter_add_(1, index_C1, -sum_C1)
        logits_CV.masked_fill_(~valid_C.unsqueeze(1), 0.0)
    return losses_C, sum_C1.reciprocal().squeeze(1).where(valid_C, 0.0)


def triton_chunk_kernel(
    logits_CV: Tensor, targets_C: Tensor, ignore_index: int, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """The ChunkKernel in one pass over a row of logits in bf16 or fp32; it always makes the gradient."""
    from gpt_oss_lite.model.kernels.cross_entropy import cross_entropy_

    return cross_entropy_(logits_CV, targets_C, ignore_index)


def fastest_chunk_kernel(h: Tensor, compute_dtype: torch.dtype, with_gradient: bool) -> ChunkKernel:
    """Triton's for training in bf16 on CUDA, where its logits stay in bf16; else the plain one, in fp32."""
    if with_gradient and h.is_cuda and compute_dtype == torch.bfloat16 and find_spec("triton") is not None:
        return triton_chunk_kernel
    return plain_chunk_kernel


def head_cross_entropy(
    h_BTD: Tensor,
    head_weight_VD: Tensor,
    targets_BT: Tensor,
    *,
    chunk_size: int,
    ignore_index: int = IGNORE_INDEX,
    kernel: ChunkKernel | None = None,
    fp8: bool = False,
) -> Tensor:
    """Sum of the cross-entropy of h @ head^T over the targets that are not ignored.

    Args:
        h_BTD: hidden states after the final norm, any float dtype.
        head_weight_VD: the head; its gradient is accumulated over chunks in fp32 (float64 for a float64 head).
        targets_BT: int64 ids in [0, V), or ignore_index.
        chunk_size: tokens whose logits are alive at one time.
        kernel: what computes a chunk; None: the fastest for the device.
        fp8: make logits and the hidden states' gradient from 8-bit floats (see `fp8`) where gradients are wanted; the
            Triton kernel computes the chunk then.

    Returns:
        The sum, fp32 (float64 for a float64 head). The caller divides by the number of valid targets of its step. Under
        autocast the products run in autocast's dtype, and so are the logits of the Triton kernel; all else is fp32.
    """
    with_gradient = torch.is_grad_enabled() and (h_BTD.requires_grad or head_weight_VD.requires_grad)
    losses_sum, _ = _HeadCrossEntropy.apply(
        h_BTD, head_weight_VD, targets_BT, chunk_size, ignore_index, with_gradient, kernel, fp8 and with_gradient
    )
    return losses_sum


@torch.no_grad()
def head_token_losses(
    h_BTD: Tensor, head_weight_VD: Tensor, targets_BT: Tensor, *, chunk_size: int, ignore_index: int = IGNORE_INDEX
) -> Tensor:
    """Cross-entropy of each target, (B, T) fp32, 0 where ignored; for evaluation, without gradients."""
    _, losses_N = _HeadCrossEntropy.apply(
        h_BTD, head_weight_VD, targets_BT, chunk_size, ignore_index, False, plain_chunk_kernel, False
    )
    return losses_N.view_as(targets_BT)


class _HeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_BTD: Tensor,
        weight_VD: Tensor,
        targets_BT: Tensor,
        chunk_size: int,
        ignore_index: int,
        with_gradient: bool,
        kernel: ChunkKernel | None,
        fp8: bool,
    ) -> tuple[Tensor, Tensor]:
        device_type = h_BTD.device.type
        compute_dtype = h_BTD.dtype
        if torch.is_autocast_enabled(device_type):
            compute_dtype = torch.get_autocast_dtype(device_type)
        with torch.autocast(device_type, enabled=False):
            h_ND = h_BTD.reshape(-1, h_BTD.shape[-1]).to(compute_dtype)
            w_VD = weight_VD.to(compute_dtype)
            targets_N = targets_BT.reshape(-1)
            sum_dtype = torch.promote_types(weight_VD.dtype, torch.float32)
            kernel = kernel or fastest_chunk_kernel(h_ND, compute_dtype, with_gradient)
            logits_dtype = compute_dtype if kernel is triton_chunk_kernel else sum_dtype
            losses_N = h_ND.new_empty(targets_N.shape, dtype=sum_dtype)
            if with_gradient:
                grad_h_ND = torch.empty_like(h_ND)
                grad_w_VD = torch.zeros_like(weight_VD, dtype=sum_dtype)
            rows = max(1, min(chunk_size, MAX_CHUNK_LOGITS // w_VD.shape[0]))
            head8 = Fp8Head(w_VD) if fp8 else None
            for start in range(0, targets_N.shape[0], rows):
                chunk = slice(start, start + rows)
                if head8 is not None:
                    losses_N[chunk], grad_h_ND[chunk] = _fp8_chunk(
                        head8, h_ND[chunk], targets_N[chunk], ignore_index, grad_w_VD
                    )
                    continue
                logits_CV = _product(h_ND[chunk], w_VD.T, logits_dtype)
                losses_N[chunk], factor_C = kernel(logits_CV, targets_N[chunk], ignore_index, with_gradient)
                if with_gradient:
                    grad_logits_CV = logits_CV.to(compute_dtype)
                    del logits_CV
                    times(_product(grad_logits_CV, w_VD, sum_dtype), factor_C, out=grad_h_ND[chunk])
                    _add_product_(grad_w_VD, grad_logits_CV.T, times(h_ND[chunk], factor_C))
                    del grad_logits_CV
        if with_gradient:
            ctx.save_for_backward(grad_h_ND.view_as(h_BTD), grad_w_VD)
            ctx.dtypes = h_BTD.dtype, weight_VD.dtype
        ctx.mark_non_differentiable(losses_N)
        return losses_N.sum(), losses_N

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_h_BTD, grad_w_VD = ctx.saved_tensors
        h_dtype, weight_dtype = ctx.dtypes
        grad_h_ND = grad_h_BTD.view(-1, grad_h_BTD.shape[-1])
        grad_h_ND = times(grad_h_ND, grad_outputs[0], out=torch.empty_like(grad_h_ND, dtype=h_dtype))
        grad_w_VD = times(grad_w_VD, grad_outputs[0], out=torch.empty_like(grad_w_VD, dtype=weight_dtype))
        return grad_h_ND.view_as(grad_h_BTD), grad_w_VD, None, None, None, None, None, None


def _fp8_chunk(
    head: Fp8Head, h_CD: Tensor, targets_C: Tensor, ignore_index: int, grad_w_VD: Tensor
) -> tuple[Tensor, Tensor]:
    """Losses (C,) of a chunk and d(sum of losses) / dh (C, D); the head's part is added to grad_w_VD."""
    from gpt_oss_lite.model.kernels.cross_entropy import cross_entropy_

    logits_CV = head.logits(h_CD)
    # Triton's interpreter, which stands for the GPU on a CPU, rounds to 8 bits wrongly; there PyTorch does it.
    gradient_CV = torch.empty_like(logits_CV, dtype=GRADIENT_DTYPE if logits_CV.is_cuda else torch.float32)
    losses_C, factor_C = cross_entropy_(logits_CV, targets_C, ignore_index, gradient_CV, GRADIENT_SCALE)
    _add_product_(grad_w_VD, logits_CV.T, times(h_CD, factor_C))
    return losses_C, head.input_gradient(gradient_CV.to(GRADIENT_DTYPE), h_CD.dtype)


def _product(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a @ b in out_dtype. On CUDA the fp32 accumulators of a bf16 product are kept as they are, not rounded to bf16."""
    if a.dtype == out_dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=out_dtype)
    return (a @ b).to(out_dtype)


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, accumulated in total's dtype."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


def chunked_cross_entropy(
    logits: Tensor, targets: Tensor, chunk_size: int = 4096, ignore_index: int = IGNORE_INDEX
) -> Tensor:
    """Mean cross-entropy of finished logits, equal to F.cross_entropy's, summed in fp32 over chunks.

    For code that has logits already. It bounds the temporary of one chunk, not the logits; training uses
    `head_cross_entropy`.

    Args:
        logits: (..., V), any float dtype.
        targets: (...) int64 ids, or ignore_index.

    Returns:
        fp32 scalar; NaN when every target is ignored, as F.cross_entropy gives.
    """
    flat_logits_NV = logits.reshape(-1, logits.shape[-1])
    flat_targets_N = targets.reshape(-1)
    total = flat_logits_NV.new_zeros((), dtype=torch.promote_types(logits.dtype, torch.float32))
    for start in range(0, flat_targets_N.shape[0], chunk_size):
        chunk = slice(start, start + chunk_size)
        total = total + F.cross_entropy(
            flat_logits_NV[chunk].to(total.dtype), flat_targets_N[chunk], ignore_index=ignore_index, reduction="sum"
        )
    return total / (flat_targets_N != ignore_index).sum()
