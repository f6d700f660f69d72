"""The figures of a step for the log, the NaN guard and the watch for spikes.

Shapes: A micro-batches of a step, L layers, E experts, F figures of a micro-batch, M = L * E.
"""

import resource
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gpt_oss_lite.model.attention import SINK_MAX, SINK_MIN
from gpt_oss_lite.model.transformer import GPTOSS, RouterStats
from gpt_oss_lite.training.distributed import Ranks, whole


@dataclass(frozen=True)
class StepFigures:
    """What a step gives to the log; tensors stay on the device until a row is written."""

    ce: Tensor
    """Cross-entropy, mean over the step's valid targets, fp32 scalar."""
    aux: Tensor
    """Load-balancing loss, mean over the step's micro-batches, fp32 scalar."""
    grad_norm: Tensor
    """Global gradient norm before clipping, fp32 scalar."""
    lr: float
    """Rate that the update used."""
    expert_load: Tensor
    """Share of a layer's token-slots by expert, (layers, experts) fp32, mean over the micro-batches."""
    router_entropy: Tensor
    """Mean entropy of the routers in nats, (layers,) fp32, mean over the micro-batches."""


class MicroBatchFigures(NamedTuple):
    """What a step's micro-batches gave, on whatever ranks they ran, in the order of the stream."""

    losses_A: Tensor
    ces_A: Tensor
    auxes_A: Tensor
    entropies_AL: Tensor
    expert_loads_ALE: Tensor


def of_all_micro_batches(ranks: Ranks, results: list[tuple[Tensor, Tensor, RouterStats]]) -> MicroBatchFigures:
    """Gather what `micro_batch` returned on every rank, in one operation."""
    rows = [
        torch.cat([loss[None], ce[None], stats.aux[None], stats.entropy, stats.expert_load.flatten()])
        for loss, ce, stats in results
    ]
    figures_FA = ranks.by_micro_batch(torch.stack(rows)).t().contiguous()
    n_layers, n_experts = results[0][2].expert_load.shape
    entropies_LA, loads_MA = figures_FA[3:].split([n_layers, n_layers * n_experts])
    loads_ALE = loads_MA.t().reshape(-1, n_layers, n_experts)
    return MicroBatchFigures(figures_FA[0], figures_FA[1], figures_FA[2], entropies_LA.t(), loads_ALE)


@torch.no_grad()
def sink_means(model: GPTOSS) -> list[float] | None:
    """Mean over a layer's heads of the sink logits, as attention clamps them, by layer; None without sinks."""
    sinks: list[Tensor] = [whole(sink_H) for name, sink_H in model.named_parameters() if name.endswith("sink_bias")]
    return torch.stack(sinks).clamp(SINK_MIN, SINK_MAX).mean(dim=1).tolist() if sinks else None


def peak_memory_gib(device: torch.device) -> float:
    """Peak of allocated device memory, or of the process's resident memory on the CPU, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
