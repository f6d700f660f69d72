"""`gpt-oss-lite plan`: the largest recipe of the ladder that a number of GPUs trains in a given time.

Each recipe has its tokens, about 16 a parameter; memory is `memory.fastest_that_fits`, speed is `scaling.step_time`.
What a single run's options ask for is planned elsewhere (`plan.py`).
"""

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gpt_oss_lite.config import Recipe, load_recipe
from gpt_oss_lite.config.shipped import shipped_recipes
from gpt_oss_lite.options import AsJson, print_json
from gpt_oss_lite.training.cluster import Cluster, start_line
from gpt_oss_lite.training.layout import Layout, usable_ranks
from shared_data.console import count_of
from shared_data.errors import UserError

if TYPE_CHECKING:
    from gpt_oss_lite.training.memory import MemoryEstimate
    from gpt_oss_lite.training.setting import Setting

LADDER = ("pretrain_150m", "pretrain_a100_502m", "pretrain_1_5b", "pretrain_7b")
"""Shipped recipes from the smallest to the largest."""
ABOUT_AS_FAST = 1.05
"""A layout may take so many times the fastest one's hours if it needs fewer GPUs."""
MAX_RESTARTS = 3
PARALLELISM: tuple[Literal["ddp", "fsdp"], ...] = ("ddp", "fsdp")


@dataclass(frozen=True)
class Proposal:
    """A recipe on a number of GPUs, with what it needs."""

    recipe: str
    """Its name, which `--config` takes."""
    parameters: int
    active_parameters: int
    tokens: int
    windows: int
    """Of a step, over all GPUs."""
    gpus: int
    layout: str
    parallelism: Literal["ddp", "fsdp"]
    micro_batch_size: int
    accumulation: int
    """Micro-batches of a step on each GPU."""
    grad_checkpoint_every: int | None
    """Every n-th block is recomputed; None: none."""
    recipe_setting: str
    """How micro-batches, recomputing and chunk compare with the recipe's own, and what decides."""
    tokens_per_s: float
    """Of all GPUs."""
    mfu: float
    exposed_share: float
    """Share of a step in which GPUs only exchange gradients or weights."""
    hours: float
    memory: dict[str, int]
    """Bytes of each GPU by item."""
    launch: str

    @property
    def memory_gb(self) -> float:
        """Memory of each GPU, 10^9 bytes."""
        return sum(self.memory.values()) / 1e9


def plan(
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that are there.", show_default=False)],
    hours: Annotated[float, typer.Option(help="Hours that they are there for.", show_default=False)],
    gpu: Annotated[str, typer.Option(metavar="NAME", help="Their name, as CUDA reports it.")] = Cluster.gpu,
    gpu_gb: Annotated[
        float | None,
        typer.Option(help="Memory of each in GB (10^9 bytes). Default: that of --gpu.", show_default=False),
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of a node.")] = Cluster.gpus_per_node,
    network_gbit: Annotated[
        float, typer.Option(help="Network of a node in Gbit/s for each of its GPUs.")
    ] = Cluster.network_gbit,
    as_json: AsJson = False,
) -> None:
    """Propose the largest shipped recipe whose tokens some GPUs train in a time, and how to lay it out."""
    for name, value in (("--hours", hours), ("--gpu-gb", gpu_gb), ("--network-gbit", network_gbit)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"{name} is {value:g}: it must be finite and greater than 0")
    cluster = Cluster(gpus=gpus, gpu=gpu, gpu_gb=gpu_gb, gpus_per_node=gpus_per_node, network_gbit=network_gbit)
    proposal = propose(cluster, hours)
    assumption = _assumption()
    if as_json:
        print_json({**vars(proposal), "memory_gb": proposal.memory_gb, "assumption": assumption})
        return
    for line in describe_proposal(proposal, cluster):
        print(line)
    print(f"\n{assumption}")


def propose(cluster: Cluster, hours: float) -> Proposal:
    """The largest recipe that trains in time, in the layout in which it is fastest.

    Raises:
        UserError: none does; the line says what the smallest one would take.
    """
    too_slow: Proposal | None = None
    for name in reversed(LADDER):
        found = list(layouts(name, cluster))
        if in_time := [one for one in found if one.hours <= hours]:
            return simplest_of_the_fast(in_time)
        too_slow = min(found, key=lambda one: one.hours, default=too_slow)
    if too_slow is None:
        raise UserError(f"--gpu-gb is {cluster.memory_gb:g}: no recipe of {', '.join(LADDER)} fits into that")
    where = count_of(too_slow.gpus, "GPU") + (f" of the {cluster.gpus}" if too_slow.gpus < cluster.gpus else "")
    raise UserError(
        f"--hours is {hours:g}: it must be at least {math.ceil(100 * too_slow.hours) / 100:g} with --gpus "
        f"{cluster.gpus}, which {too_slow.recipe}, the smallest recipe that fits, takes on {where}"
    )


def simplest_of_the_fast(proposals: list[Proposal]) -> Proposal:
    """Of those about as fast as the fastest, the one with the fewest GPUs; replicas rather than shards."""
    least = min(one.hours for one in proposals)
    fast = [one for one in proposals if one.hours <= ABOUT_AS_FAST * least]
    return min(fast, key=lambda one: (one.gpus, PARALLELISM.index(one.parallelism)))


def layouts(name: str, cluster: Cluster) -> Iterator[Proposal]:
    """A rung in every layout that shares its step evenly between some of the GPUs and fits."""
    from gpt_oss_lite.training.memory import fastest_that_fits

    recipe = load_recipe(shipped_recipes()[name])
    for ranks in usable_ranks(recipe.training.windows_per_step, cluster.gpus, cluster.gpus_per_node):
        for parallelism in PARALLELISM if ranks > 1 else PARALLELISM[:1]:
            layout = Layout(ranks, parallelism)
            found = fastest_that_fits(recipe, int(cluster.memory_gb * 1e9), layout)
            if found is not None:
                yield _proposal(recipe, name, cluster, layout, *found)


def _proposal(
    recipe: Recipe, name: str, cluster: Cluster, layout: Layout, setting: "Setting", estimate: "MemoryEstimate"
) -> Proposal:
    from gpt_oss_lite.training.flops import mfu
    from gpt_oss_lite.training.memory import beside_the_recipe, meta_model
    from gpt_oss_lite.training.scaling import step_time

    model, time = meta_model(recipe.model), step_time(recipe, setting, layout, cluster)
    windows, seq_len = recipe.training.windows_per_step, recipe.model.max_seq_len
    tokens_per_s = windows * seq_len / time.total
    share = mfu(tokens_per_s / layout.ranks, recipe.model, seq_len, cluster.peak_flops)
    assert share is not None
    return Proposal(
        recipe=name,
        parameters=model.num_parameters(),
        active_parameters=model.num_active_parameters(),
        tokens=recipe.training.total_steps * windows * seq_len,
        windows=windows,
        gpus=layout.ranks,
        layout=layout.words(),
        parallelism=layout.parallelism,
        micro_batch_size=setting.micro_batch_size,
        accumulation=setting.gradient_accumulation_steps // layout.ranks,
        grad_checkpoint_every=setting.grad_checkpoint_every,
        recipe_setting=beside_the_recipe(recipe, setting, int(cluster.memory_gb * 1e9), layout),
        tokens_per_s=tokens_per_s,
        mfu=share,
        exposed_share=time.exposed / time.total,
        hours=recipe.training.total_steps * time.total / 3600,
        memory=estimate.items,
        launch=launch_line(name, setting, layout, cluster),
    )


def describe_proposal(proposal: Proposal, cluster: Cluster) -> Iterator[str]:
    """The proposal for a person, line by line."""
    from gpt_oss_lite.training.logger import format_duration

    idle = f" of {cluster.gpus}" if proposal.gpus < cluster.gpus else ""
    recomputed = proposal.grad_checkpoint_every
    share = "every block" if recomputed == 1 else f"one block in {recomputed}"
    blocks = "nothing recomputed" if recomputed is None else f"{share} recomputed"
    yield (
        f"recipe     {proposal.recipe}: {proposal.parameters:,} parameters, {proposal.active_parameters:,} active per "
        f"token, {proposal.tokens:,} tokens"
    )
    yield f"layout     {proposal.layout}{idle} ({cluster.gpu})"
    yield (
        f"step       {proposal.windows} windows: micro-batch {proposal.micro_batch_size} x accumulation "
        f"{proposal.accumulation} on each GPU, {blocks}"
    )
    for line in proposal.recipe_setting.splitlines():
        yield f"           {line}"
    yield (
        f"speed      {proposal.tokens_per_s:,.0f} tokens/s, {proposal.mfu:.1%} MFU; {proposal.exposed_share:.1%} of a "
        "step is exchange that nothing hides"
    )
    yield f"time       {format_duration(proposal.hours * 3600)}, without evaluations, saves and interruptions"
    yield f"memory     {proposal.memory_gb:.1f} of {cluster.memory_gb:g} GB on each GPU"
    for name, size in proposal.memory.items():
        yield f"           {size / 1e9:8.3f} GB  {name}"
    yield f"launch     {proposal.launch}"


def launch_line(name: str, setting: "Setting", layout: Layout, cluster: Cluster) -> str:
    """The command that starts such a run; with several nodes, on each of them."""
    per_node = min(layout.ranks, cluster.gpus_per_node)
    start = start_line(layout.ranks, per_node, f"--max-restarts {MAX_RESTARTS}")
    words = ["--config", name, "--out", f"runs/{name}", "--auto-resume"]
    parallelism = [f"training.parallelism={layout.parallelism}"] if layout.ranks > 1 else []
    for override in [*parallelism, *setting.overrides()]:
        words += ["--set", override]
    return f"{start} {shlex.join(words)}"


def _assumption() -> str:
    from gpt_oss_lite.training.scaling import LINK_USE, MEASURED_MFU, TEAM_EFFICIENCY

    return (
        f"The speed is computed, not measured: {MEASURED_MFU:.1%} MFU, the cost of recomputing and the host's time to "
        f"launch a layer are those of one H200, the {TEAM_EFFICIENCY:.0%} left where GPUs wait for each other those of "
        f"two; links at {LINK_USE:.0%} of their data sheets are assumed (docs/performance.md, docs/scaling.md)."
    )
