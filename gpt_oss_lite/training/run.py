"""A run: the live objects of the loop, new or gone on with."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gpt_oss_lite.config import ModelConfig, Recipe, TrainingConfig
from gpt_oss_lite.model.fused.block import why_not_fused_attention, why_not_fused_moe
from gpt_oss_lite.model.transformer import GPTOSS, describe_parameters
from gpt_oss_lite.training.checkpoint import CHECKPOINTS, CheckpointManager, checkpoint_folder
from gpt_oss_lite.training.compiling import compiled_or_plain
from gpt_oss_lite.training.data_order import DataOrder
from gpt_oss_lite.training.dataset import PretrainDataset
from gpt_oss_lite.training.distributed import Ranks
from gpt_oss_lite.training.flops import device_peak_flops
from gpt_oss_lite.training.knobs import compute_dtype_on, set_knobs
from gpt_oss_lite.training.layout import Layout, layout_of
from gpt_oss_lite.training.leftovers import remove_leftovers
from gpt_oss_lite.training.logger import NOTHING_KEPT, Throughput, TrainingLogger
from gpt_oss_lite.training.memory import assert_fits_in_available_gpu, estimate_recipe, meta_model
from gpt_oss_lite.training.mirror import Mirror
from gpt_oss_lite.training.nan_guard import NanGuard
from gpt_oss_lite.training.optimizer import make_optimizer, make_scheduler
from gpt_oss_lite.training.parallel import Parallel, make_shared_model
from gpt_oss_lite.training.plan import Plan, PretrainOptions, plan_run
from gpt_oss_lite.training.profiling import StepProfiler
from gpt_oss_lite.training.run_folder import (
    read_record,
    record_new_run,
    run_files,
    versions,
)
from gpt_oss_lite.training.run_lock import this_process
from gpt_oss_lite.training.saving import Saver, Waited
from gpt_oss_lite.training.seeding import fresh_seed, seed_everything
from gpt_oss_lite.training.snapshot import set_weights
from gpt_oss_lite.training.spikes import SpikeWatch
from gpt_oss_lite.training.stream import MicroBatch, open_stream
from gpt_oss_lite.training.trackers import open_trackers
from shared_data.console import say
from shared_data.errors import UserError

__all__ = ["Plan", "PretrainOptions", "Run", "RunState", "open_run", "plan_run"]


@dataclass
class RunState:
    """Where a run stands; a checkpoint's meta holds it."""

    step: int = 0
    """Finished steps."""
    offset: int = 0
    """Windows that rollbacks passed over."""
    rollbacks: int = 0
    """Times that the run went back."""
    streak: int = 0
    """Non-finite micro-batches in a row up to here."""
    slow_until: int = 0
    """Steps before this one use the lower rate that follows a rollback."""


@dataclass
class Run:
    """The live objects of a run."""

    recipe: Recipe
    ranks: Ranks
    folder: Path
    seed: int
    init_from: str | None
    files: dict[str, str]
    """Texts of config.yaml and run.json."""
    device: torch.device
    stop_step: int
    dataset: PretrainDataset
    validation: PretrainDataset | None
    order: DataOrder
    model: GPTOSS
    parallel: Parallel
    optimizer: Optimizer
    scheduler: LambdaLR
    start_schedule: dict[str, Any]
    checkpoints: CheckpointManager
    saver: Saver
    guard: NanGuard
    spikes: SpikeWatch
    logger: TrainingLogger
    peak_flops: float | None
    """Of all ranks' devices together."""
    profiler: StepProfiler | None = None
    throughput: Throughput = field(default_factory=Throughput)
    state: RunState = field(default_factory=RunState)
    batches: Iterator[MicroBatch] = field(default_factory=lambda: iter(()))
    waits: dict[int, Waited] = field(default_factory=dict)
    """How long training stood still for each checkpoint that is being written."""

    @property
    def windows_per_step(self) -> int:
        """Windows that one step trains on."""
        return self.recipe.training.windows_per_step

    @property
    def position(self) -> int:
        """Windows of the stream that are used up."""
        return self.state.step * self.windows_per_step + self.state.offset

    def open_stream(self) -> None:
        """Start loading from the run's position; what was loaded ahead is dropped."""
        self.batches = open_stream(self.dataset, self.order, self.position, self.recipe, self.device, self.ranks)

    def meta(self) -> dict[str, Any]:
        """What a checkpoint's meta holds besides its files."""
        return {
            "model": self.recipe.model.model_dump(mode="json"),
            "rope_scale": self.recipe.model.rope_scale,
            "state": asdict(self.state),
            "spikes": self.spikes.state(),
            "position": self.position,
            "tokens": self.state.step * self.windows_per_step * self.recipe.model.max_seq_len,
            "seed": self.seed,
            "run_files": self.files,
            "versions": versions(),
        }


def open_run(plan: Plan) -> Run:
    """Build a planned run, new or gone on with, and leave it ready for its next step."""
    recipe, training, ranks, profiled = plan.recipe, plan.recipe.training, plan.ranks, plan.options.profile
    record, files = ranks.from_main(lambda: _recorded(plan))
    seed = record["seed"]
    knobs = set_knobs(training.deterministic)
    seed_everything(seed)
    model, parallel = _make_model(recipe, ranks)
    optimizer = make_optimizer(model, training)
    scheduler = make_scheduler(optimizer, training)
    checkpoints = CheckpointManager(plan.folder / CHECKPOINTS, training.keep_last_n, training.resolved_keep_every)
    run = Run(
        recipe=recipe,
        ranks=ranks,
        folder=plan.folder,
        seed=seed,
        init_from=record["init_from"],
        files=files,
        device=ranks.device,
        stop_step=plan.stop_step,
        dataset=plan.dataset,
        validation=plan.validation,
        order=plan.dataset.order(seed),
        model=model,
        parallel=parallel,
        optimizer=optimizer,
        scheduler=scheduler,
        start_schedule=scheduler.state_dict(),
        checkpoints=checkpoints,
        saver=Saver(checkpoints, None if training.mirror is None else Mirror(training.mirror, plan.folder)),
        guard=NanGuard(training.nan_guard_max_consecutive, training.micro_batch_size),
        spikes=SpikeWatch(training.spike_zscore, training.spike_window, ranks.device),
        logger=TrainingLogger(
            plan.folder,
            suffix="" if training.nan_guard else " | NaN guard OFF",
            trackers=open_trackers(plan.folder, recipe) if ranks.is_main else (),
            writes=ranks.is_main,
        ),
        peak_flops=_peak_flops(ranks),
        profiler=StepProfiler(plan.folder / "profile", profiled) if profiled is not None and ranks.is_main else None,
    )
    facts = _announce(run, knobs)
    _go_to_start_or_checkpoint(run, plan)
    where = {"position": run.position} if plan.resuming else {}
    run.logger.event("resume" if plan.resuming else "start", run.state.step, **where, **facts)
    return run


def _make_model(recipe: Recipe, ranks: Ranks) -> tuple[GPTOSS, Parallel]:
    """A model with fresh weights, and how the ranks train it together."""
    training = recipe.training
    # The fused path's kernels are written out already, and a compiler could only split its graph around them.
    reasons = fallbacks(recipe.model, layout_of(training, ranks.size), ranks.device)
    compiling = training.compile and ranks.device.type == "cuda" and all(reasons)
    compiled = partial(compiled_or_plain, mode=training.compile_mode) if compiling else lambda forward: forward
    return make_shared_model(recipe, ranks, compiled)


def _recorded(plan: Plan) -> tuple[dict[str, Any], dict[str, str]]:
    """run.json, written before where the run is new, and the texts of the run's files."""
    if not plan.resuming:
        seed = fresh_seed() if plan.options.seed is None else plan.options.seed
        record_new_run(plan.folder, plan.recipe, seed, plan.corpus, _init_source(plan.options.init_from))
    return read_record(plan.folder), run_files(plan.folder)


def _peak_flops(ranks: Ranks) -> float | None:
    peak = device_peak_flops(torch.cuda.get_device_name(ranks.device)) if ranks.device.type == "cuda" else None
    return None if peak is None else peak * ranks.size


def _init_source(init_from: Path | None) -> str | None:
    return None if init_from is None else str(init_from.resolve())


def _announce(run: Run, knobs: dict[str, Any]) -> dict[str, Any]:
    """Say what is about to run; what the start's event keeps of it."""
    recipe, training = run.recipe, run.recipe.training
    say(f"[run] {run.folder}, seed {run.seed}, device {versions()['device']}")
    counted = meta_model(recipe.model)  # whole, also where this rank holds only a part
    say(describe_parameters(counted))
    layout = layout_of(training, run.ranks.size)
    for line in describe_paths(training, run.device, fallbacks(recipe.model, layout, run.device)):
        say(line)
    if run.device.type == "cuda":  # elsewhere the switches are without effect
        say("[knobs] " + ", ".join(f"{name}={value}" for name, value in knobs.items()))
    tokens = run.windows_per_step * recipe.model.max_seq_len
    size = f"{run.dataset.total_tokens:,} tokens, {len(run.dataset):,} windows"
    say(f"[data] {run.dataset.path}: {size}; {tokens:,} tokens a step")
    if run.ranks.size > 1:
        share = training.gradient_accumulation_steps // run.ranks.size
        say(f"[ranks] {run.ranks.size}, {training.parallelism}, micro-batches a step on each: {share}")
    estimate = estimate_recipe(recipe, device_type=run.device.type, layout=layout)
    say(f"[memory] a step is estimated at {estimate.total_gb:.2f} GB")
    assert_fits_in_available_gpu(estimate)
    facts = {"stop_step": run.stop_step, "knobs": knobs, "versions": versions(), "estimate_gb": estimate.total_gb}
    return {**facts, "process": this_process()}


def describe_paths(
    training: TrainingConfig, device: torch.device, reasons: tuple[str | None, str | None]
) -> Iterator[str]:
    """Which halves of a block are fused on a GPU, and why training.compile is without effect where it is.

    Args:
        reasons: of `fallbacks`.
    """
    halves = dict(zip(("attention", "experts"), reasons, strict=True))
    if device.type == "cuda":  # elsewhere nothing is fused
        for half, reason in halves.items():
            yield f"[model] {half}: " + ("fused" if reason is None else f"not fused, since {reason}")
    fused = " and ".join(half for half, reason in halves.items() if reason is None)
    if training.compile and (fused or device.type != "cuda"):
        why = f"{fused} on fused kernels, and only a model without any is compiled" if fused else "there is no GPU"
        yield f"[model] training.compile is true, without effect: {why}"


def fallbacks(config: ModelConfig, layout: Layout, device: torch.device) -> tuple[str | None, str | None]:
    """Why attention and experts do not take the fused path; None where they do."""
    where = (config, device.type, compute_dtype_on(device, config.dtype))
    apart = f"groups of {layout.expert_ranks} ranks share them" if layout.expert_ranks > 1 else None
    return why_not_fused_attention(*where), apart or why_not_fused_moe(*where)


def _go_to_start_or_checkpoint(run: Run, plan: Plan) -> None:
    run.ranks.from_main(lambda: remove_leftovers(run.checkpoints), share=False)
    if plan.resume_step is not None:
        restore_checkpoint(run, plan.resume_step)
    elif run.init_from is not None:
        load_other_weights(run, run.init_from)
    if plan.resuming:
        # A run that stopped between two log intervals logged its last step; the unbroken run has no such row.
        interval = run.recipe.training.log_interval
        kept_until = run.state.step if plan.resume_step is not None else NOTHING_KEPT
        run.logger.cut(kept_until, keep=lambda logged: logged == 1 or logged % interval == 0)
        say(f"[resume] from step {run.state.step}, window {run.position:,} of the stream")
        later = [str(step) for step in run.checkpoints.marked_steps() if step > run.state.step]
        if plan.options.resume_from is not None and later:
            say(
                f"warning: {run.checkpoints.folder} keeps what came after ({', '.join(later)}): until this run is past "
                "it, --resume latest takes that; `gpt-oss-lite checkpoints delete` removes it"
            )
    run.open_stream()


def restore_checkpoint(run: Run, step: int) -> None:
    """Put weights, moments, schedule, random numbers and state back to those of a checkpoint that has been verified."""
    meta = run.checkpoints.load(run.model, step, run.optimizer, run.scheduler, with_rng=True, check_hashes=False)
    run.state = RunState(**meta["state"])
    run.guard.reset(run.state.streak)
    run.spikes.load(meta.get("spikes"))


def restore_start(run: Run) -> None:
    """Put everything back to before the first step: the weights are made again from the seed, or read again."""
    seed_everything(run.seed)
    set_weights(run.model, run.parallel.fresh_part().state_dict())
    if run.init_from is not None:
        load_other_weights(run, run.init_from)
    run.optimizer.state.clear()
    run.scheduler.load_state_dict(run.start_schedule.copy())
    for group, lr in zip(run.optimizer.param_groups, run.scheduler.get_last_lr(), strict=True):
        group["lr"] = lr
    run.state = RunState()
    run.guard.reset(0)
    run.spikes.load(None)


def load_other_weights(run: Run, init_from: str) -> None:
    """Start from the newest good weights of another run; nothing else of it is taken."""
    source = CheckpointManager(checkpoint_folder(init_from))
    step = run.ranks.from_main(source.newest_good)
    if step is None:
        raise UserError(f"--init-from {init_from}: there is no good checkpoint")
    source.load(run.model, step)
    say(f"[init] weights of step {step} of {init_from}")
