"""How fast several GPUs train a recipe, from one GPU's measured speed and the bytes that they exchange.

Measured on H200s (docs/performance.md, docs/scaling.md) and taken for every card: the share of the peak in products,
what recomputing costs, the host's time to launch a layer, and what two GPUs lose to each other. Computed: the bytes of
a step's gradients and, under FSDP, weights, over the rates of vendors' data sheets. Assumed: LINK_USE, OVERLAP, and
that more GPUs lose no more to each other than two. Not in it: latency, which grows with the number of nodes; and a
slower node.
"""

from dataclasses import dataclass

from gpt_oss_lite.config import ModelConfig, Recipe
from gpt_oss_lite.training.cluster import Cluster
from gpt_oss_lite.training.flops import flops_per_token
from gpt_oss_lite.training.layout import Layout
from gpt_oss_lite.training.memory import FP32, meta_model
from gpt_oss_lite.training.setting import Setting

# configs/pretrain_h200_502m.yaml on an H200: 286,000 tokens/s.
MEASURED_MFU = 0.464
# configs/pretrain_a100_502m.yaml on it, which recomputes every third block: 252,500 tokens/s, 1.13 times the time.
RECOMPUTING_COST = 0.4
# configs/pretrain_24gb_502m.yaml on it, which waits for the host: 16,384 tokens at 146,200 a second, in 12 layers, on a
# slow host. A faster one gave 242,500.
HOST_S_PER_LAYER = 16384 / 146_200 / 12

LINK_USE = 0.7
"""Share of a link's rate that a collective operation gets: assumed."""
OVERLAP = 0.8
"""Share of the pass beside which the exchange runs that can hide it: assumed."""
TEAM_EFFICIENCY = 0.96
"""What is left where GPUs wait for the slowest and a card's kernels share it with the exchange: as two H200s had."""
BACKWARD_SHARE = 2 / 3
"""Of a micro-batch's time: the backward pass has two products for each of the forward pass's."""


@dataclass(frozen=True)
class StepTime:
    """Where a step's time goes, in seconds."""

    micro_batches: float
    """What one GPU's micro-batches take."""
    exposed: float
    """Exchange that no pass hides."""
    exchange: float
    """All exchange."""
    waiting: float
    """For the slowest GPU."""

    @property
    def total(self) -> float:
        """Of the step."""
        return self.micro_batches + self.exposed + self.waiting


def micro_batch_seconds(config: ModelConfig, setting: Setting, peak_flops: float) -> float:
    """Forward and backward pass of a micro-batch on one GPU: its products, or the host's launches where those take
    longer."""
    tokens = setting.micro_batch_size * config.max_seq_len
    every = setting.grad_checkpoint_every
    recomputing = 1 + RECOMPUTING_COST / every if every else 1.0
    launches = 1 + (1 - BACKWARD_SHARE) / every if every else 1.0  # the forward pass's, again
    products = tokens * flops_per_token(config, config.max_seq_len) * recomputing / (MEASURED_MFU * peak_flops)
    return max(products, HOST_S_PER_LAYER * config.n_layers * launches)


def gradient_bytes(config: ModelConfig) -> int:
    """Bytes of the gradients in fp32: what replicas average once a step."""
    return FP32 * meta_model(config).num_parameters()


def step_time(recipe: Recipe, setting: Setting, layout: Layout, cluster: Cluster) -> StepTime:
    """Time of a step, by the model that this module's head describes.

    A ring's all-reduce moves 2 (N - 1) / N of the bytes through each GPU's link, a gather or a scatter half of that
    (nccl-tests, doc/PERFORMANCE.md). Replicas exchange once a step, beside the last backward pass, and the tied
    embedding's gradient is ready only when that is over. FSDP gathers weights for each pass and scatters gradients in
    every micro-batch.
    """
    micro = micro_batch_seconds(recipe.model, setting, cluster.peak_flops)
    passes = setting.gradient_accumulation_steps // layout.ranks
    if layout.ranks == 1:
        return StepTime(passes * micro, 0.0, 0.0, 0.0)
    rate = LINK_USE * cluster.link_rate(layout.ranks)
    once = (layout.ranks - 1) / layout.ranks / rate
    last = FP32 * recipe.model.embedding_rows * recipe.model.d_model * once
    if layout.fully_sharded:
        each = 3 * gradient_bytes(recipe.model) * once
        exchange, exposed = passes * each, passes * max(each - OVERLAP * micro, last)
    else:
        exchange = 2 * gradient_bytes(recipe.model) * once
        exposed = max(exchange - OVERLAP * BACKWARD_SHARE * micro, 2 * last)
    waiting = (passes * micro + exposed) * (1 / TEAM_EFFICIENCY - 1)
    return StepTime(passes * micro, exposed, exchange, waiting)
