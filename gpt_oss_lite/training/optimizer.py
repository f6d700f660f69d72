"""AdamW with decay for matrices only, or Muon for the matrices beside it; and an update that a non-finite step cannot
reach."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gpt_oss_lite.config import TrainingConfig
from gpt_oss_lite.training.distributed import whole
from gpt_oss_lite.training.muon import StackedMuon
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


def muon_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The decayed matrices that Muon updates where it is chosen: projections and experts. Routers and an untied head,
    whose rows are choices and not directions, stay with AdamW."""
    decayed, _ = parameter_groups(model)
    return {
        name: matrix for name, matrix in decayed.items()
        if not name.endswith("router.weight") and not name.startswith("head.")
    }  # fmt: skip


def make_optimizer(model: nn.Module, config: TrainingConfig) -> Optimizer:
    """AdamW over `parameter_groups`, fused on CUDA and foreach elsewhere (PyTorch refuses both at once); or Muon
    for the matrices of `muon_matrices`, and AdamW for the rest."""
    decayed, others = parameter_groups(model)
    on_cuda = next(model.parameters()).is_cuda
    matrices = muon_matrices(model) if config.optimizer == "muon" else {}
    adamw = AdamW(
        [
            {"params": [p for name, p in decayed.items() if name not in matrices], "weight_decay": config.weight_decay},
            {"params": list(others.values()), "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=on_cuda,
        foreach=not on_cuda,
    )
    if not matrices:
        return adamw
    muon = StackedMuon(
        matrices.values(),
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.muon_momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return MuonWithAdamW(muon, adamw)


class MuonWithAdamW(Optimizer):
    """Muon (Jordan et al., 2024) and AdamW as one optimizer: one schedule, one state by parameter.

    Muon replaces the momentum of a matrix by the nearest orthogonal one. Its update is scaled to the size that AdamW's
    has (Liu et al., 2025, "Muon is Scalable for LLM Training"), so rate and decay hold for both.
    """

    def __init__(self, muon: StackedMuon, adamw: AdamW) -> None:
        self._muon, self._adamw = muon, adamw
        # The groups are the same objects as those of the two, so that a schedule's rates reach them.
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let the two work on this optimizer's groups and state."""
        n_muon = len(self._muon.param_groups)
        self._muon.param_groups, self._adamw.param_groups = self.param_groups[:n_muon], self.param_groups[n_muon:]
        self._muon.state = self._adamw.state = self.state

    # Of PyTorch's two signatures the one without a closure: nothing here evaluates the loss again.
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None
        self._muon.step()
        self._adamw.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As any optimizer's; the two go on with what was loaded."""
        super().load_state_dict(state_dict)
        self._share()


def moments_of(optimizer: Optimizer) -> dict[int, tuple[str, ...]]:
    """Names of the tensors of a parameter's shape that its state holds once it has been updated, by id(parameter)."""
    names: dict[int, tuple[str, ...]] = {}
    for group in optimizer.param_groups:
        moments = ("momentum_buffer",) if "ns_steps" in group else ("exp_avg", "exp_avg_sq")
        names.update({id(parameter): moments for parameter in group["params"]})
    return names


def make_scheduler(optimizer: Optimizer, config: TrainingConfig) -> LambdaLR:
    """The recipe's schedule; it ticks once a step, skipped steps included."""
    # LambdaLR warns when it ticks before the first update, which is what a skipped first step does on purpose.
    # It looks at an attribute that PyTorch does not declare.
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return LambdaLR(optimizer, make_multiplier(config))


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Global L2 norm of the gradients, a scalar on their device, over all shards; non-finite when any gradient is."""
    return whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


def clipping_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of a global norm are divided by so that it is at most max_norm, fp32: the inverse of the factor of
    PyTorch's clip_grads_with_norm_, with the same 1e-6."""
    return ((norm + 1e-6) / max_norm).clamp(min=1.0).to(torch.float32)


def update_unless(skip: Tensor | None, optimizer: Optimizer, norm: Tensor | None = None, max_norm: float = 0.0) -> None:
    """Clip the gradients and step the optimizer, unless `skip`; a skipped step leaves weights, moments and the
    optimizer's step counts bitwise as they were.

    Multiplying the gradients by 0 would not do: NaN x 0 is NaN, and decay would still act. PyTorch's fused kernel reads
    the flag, and what it divides the gradients by, through the attributes, undeclared, that PyTorch's GradScaler uses:
    the host does not wait, and clipping is no pass of its own. Muon has no such kernel: the host waits for the flag.

    Args:
        skip: scalar bool on the model's device; None: never.
        norm: global norm of the gradients (`gradient_norm`); None: they are left as they are.
        max_norm: largest norm that they are left with; 0 or less: they are left as they are.
    """
    norm = norm if max_norm > 0 else None
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = None if skip is None else skip.to(torch.float32)  # type: ignore[attr-defined]
        optimizer.grad_scale = None if norm is None else clipping_divisor(norm, max_norm)  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
        return
    if norm is not None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    if skip is None or not skip.item():
        optimizer.step()
