"""PyTorch's Muon (Jordan et al., 2024), for matrices of equal shape at once.

`torch.optim.Muon` takes one matrix after another: 15 small products and eight other operations for each, which the host
launches one by one while the GPU waits. Here matrices of one shape are stacked and orthogonalized by batched products,
and momentum and weights are updated by operations on lists, which on CUDA are few kernels however long the list. The
arithmetic is PyTorch's, rounding by rounding; only the order of sums within a product or a norm may be another.

Shapes: B matrices of a stack, R rows, C columns, S = min(R, C).
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon

STACK_ELEMENTS = 2**26
"""Of a stack at the most, unless one matrix has more: 56 matrices of 768 x 1,536. Their products fill a GPU of 132
multiprocessors some 15 times over, so that little is lost in the last round, and their workspace is 0.4 GB."""
STACK_BYTES = 6
"""Workspace for each element of a stack: the update in fp32 beside its copy in bf16, or, later, as much in bf16: the
matrix, its next iterate and a polynomial of at most its size."""


class StackedMuon(Muon):
    """`torch.optim.Muon`, its groups and its state, with a step of its own."""

    # Of PyTorch's two signatures the one without a closure: nothing here evaluates the loss again.
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all matrices that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            for stack in stacks(matrix for matrix in group["params"] if matrix.grad is not None):
                self._update(stack, group)

    def _update(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        """Update matrices of one shape."""
        lr, rows, columns = float(group["lr"]), *matrices[0].shape
        update_BRC = orthogonal(self._directions(matrices, group), group["ns_coefficients"], group["ns_steps"])
        factor = rate_factor(rows, columns, group["adjust_lr_fn"])
        torch._foreach_mul_(matrices, 1 - lr * group["weight_decay"])
        # In the weights' dtype already: lists of two dtypes have no common kernel.
        torch._foreach_add_(matrices, update_BRC.to(matrices[0].dtype).unbind(), alpha=-lr * factor)

    def _directions(self, matrices: list[Tensor], group: dict[str, Any]) -> Tensor:
        """Update the momenta; the directions that they give, as a stack in bf16, each of Frobenius norm 1."""
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        for matrix, gradient in zip(matrices, gradients, strict=True):
            if "momentum_buffer" not in self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(gradient)
        momenta = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, momenta, group["momentum"]) if group["nesterov"] else momenta
        stack_BRC = torch.empty(len(ahead), *ahead[0].shape, dtype=torch.bfloat16, device=ahead[0].device)
        torch._foreach_copy_(stack_BRC.unbind(), ahead)
        norm_B11 = torch.linalg.vector_norm(stack_BRC, dim=(1, 2), keepdim=True)
        return stack_BRC.div_(norm_B11.clamp_(min=group["eps"]))


def stacks(matrices: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Matrices that are updated together: of one shape, dtype and device, and at most STACK_ELEMENTS, or one alone."""
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]] = {}
    for matrix in matrices:
        alike.setdefault((matrix.shape, matrix.dtype, matrix.device), []).append(matrix)
    for one_shape in alike.values():
        most = max(STACK_ELEMENTS // one_shape[0].numel(), 1)
        yield from (one_shape[start : start + most] for start in range(0, len(one_shape), most))


def orthogonal(stack_BRC: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Bring the singular values of matrices, at most 1, near 1 by Newton-Schulz iterations.

    Args:
        stack_BRC: bf16.
        coefficients: a, b, c of the polynomial a x + b x^3 + c x^5 that an iteration applies to each singular value.
        steps: iterations.

    Returns:
        (B, R, C), bf16.
    """
    for _ in range(steps):
        stack_BRC = _iterate(stack_BRC, coefficients)
    return stack_BRC


def _iterate(x_BRC: Tensor, coefficients: tuple[float, float, float]) -> Tensor:
    a, b, c = coefficients
    wide = x_BRC.shape[1] <= x_BRC.shape[2]
    # On the smaller side. PyTorch transposes a tall matrix for it; this is the same without another layout.
    gram_BSS = torch.bmm(x_BRC, x_BRC.mT) if wide else torch.bmm(x_BRC.mT, x_BRC)
    polynomial_BSS = torch.baddbmm(gram_BSS, gram_BSS, gram_BSS, beta=b, alpha=c)
    del gram_BSS  # before the next iterate takes its place
    if wide:
        return torch.baddbmm(x_BRC, polynomial_BSS, x_BRC, beta=a)
    return torch.baddbmm(x_BRC, x_BRC, polynomial_BSS.mT, beta=a)


def rate_factor(rows: int, columns: int, adjust_lr_fn: str | None) -> float:
    """What the rate is multiplied by for a shape, by the names that `torch.optim.Muon` has for it."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * float(max(rows, columns)) ** 0.5
    assert adjust_lr_fn in (None, "original"), adjust_lr_fn
    return max(1.0, rows / columns) ** 0.5
