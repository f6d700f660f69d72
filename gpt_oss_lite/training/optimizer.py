"""AdamW with decay for matrices only, and an update that a non-finite step cannot reach."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from gpt_oss_lite.config import TrainingConfig
from gpt_oss_lite.training.distributed import whole
from gpt_oss_lite.training.schedule import make_multiplier


def parameter_groups(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Split the parameters into decayed and not decayed ones, by name; each parameter appears once, tied ones included.

    Matrices decay. The embedding does not, since it is also the head and decay would shrink the logits; nor does
    anything of one dimension: norm gains, biases and sinks.

    Returns:
        (decayed, not decayed), each in the model's order.
    """
    decayed: dict[str, nn.Parameter] = {}
    others: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() >= 2 and not name.startswith("embed.")
        (decayed if is_matrix else others)[name] = parameter
    return decayed, others


def make_optimizer(model: nn.Module, config: TrainingConfig) -> AdamW:
    """AdamW over `parameter_groups`, fused on CUDA and foreach elsewhere (PyTorch refuses both at once)."""
    decayed, others = parameter_groups(model)
    on_cuda = next(model.parameters()).is_cuda
    return AdamW(
        [
            {"params": list(decayed.values()), "weight_decay": config.weight_decay},
            {"params": list(others.values()), "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=on_cuda,
        foreach=not on_cuda,
    )


def make_scheduler(optimizer: AdamW, config: TrainingConfig) -> LambdaLR:
    """The recipe's schedule; it ticks once a step, skipped steps included."""
    # LambdaLR warns when it ticks before the first update, which is what a skipped first step does on purpose.
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return LambdaLR(optimizer, make_multiplier(config))


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Global L2 norm of the gradients, a scalar on their device, over all shards; non-finite when any gradient is."""
    return whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients so that their global norm, given, is at most max_norm; 0 or less: leave them."""
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)


def update_unless(skip: Tensor, optimizer: AdamW) -> None:
    """Step the optimizer unless `skip` (scalar bool on the model's device); a skipped step leaves weights, moments and
    the optimizer's step counts bitwise as they were.

    Multiplying the gradients by 0 would not do: NaN x 0 is NaN, and decay would still act. On CUDA the fused kernel
    reads the flag itself, through the attribute that PyTorch's GradScaler uses, so the host does not wait.
    """
    if optimizer.defaults["fused"]:
        optimizer.found_inf = skip.to(torch.float32)  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.found_inf  # type: ignore[attr-defined]
    elif not skip.item():
        optimizer.step()
