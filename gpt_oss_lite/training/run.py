"""A run: what a command asked for, checked before anything is written, and the live objects of the loop."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from gpt_oss_lite.config import ModelConfig, Recipe
from gpt_oss_lite.config.recipe import load_recipe
from gpt_oss_lite.model.fused.block import why_not_fused_attention, why_not_fused_moe
from gpt_oss_lite.model.transformer import GPTOSS, describe_parameters
from gpt_oss_lite.training.checkpoint import CHECKPOINTS, CheckpointManager, checkpoint_folder
from gpt_oss_lite.training.compiling import Forward, compiled_or_plain
from gpt_oss_lite.training.data_order import DataOrder, MicroBatchSampler
from gpt_oss_lite.training.dataset import PretrainDataset, check_corpus
from gpt_oss_lite.training.flops import device_peak_flops
from gpt_oss_lite.training.knobs import compute_dtype_on, set_knobs
from gpt_oss_lite.training.logger import NOTHING_KEPT, Throughput, TrainingLogger
from gpt_oss_lite.training.memory import assert_fits_in_available_gpu, estimate_model_memory_gb, meta_model
from gpt_oss_lite.training.nan_guard import NanGuard
from gpt_oss_lite.training.optimizer import make_optimizer, make_scheduler
from gpt_oss_lite.training.run_folder import (
    ResumeRequest,
    check_unchanged,
    choose_run_folder,
    read_record,
    record_new_run,
    resume_step,
    versions,
)
from gpt_oss_lite.training.seeding import check_seed, fresh_seed, seed_everything
from gpt_oss_lite.training.snapshot import check_weights_fit
from gpt_oss_lite.training.stop import ignore_stop_signals
from gpt_oss_lite.training.trackers import check_trackers, open_trackers
from shared_data.console import say
from shared_data.errors import UserError

MicroBatch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class PretrainOptions:
    """What the command line says, one field an option."""

    config: Path
    out: Path | None = None
    seed: int | None = None
    max_steps: int | None = None
    max_hours: float | None = None
    overrides: Sequence[str] = ()
    resume_from: int | None = None
    resume_latest: bool = False
    auto_resume: bool = False
    init_from: Path | None = None
    accept_no_nan_guard: bool = False
    allow_changed: bool = False

    @property
    def resume(self) -> ResumeRequest:
        """The options that say whether and where to go on."""
        return ResumeRequest(self.resume_from, self.resume_latest, self.auto_resume)


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


@dataclass(frozen=True)
class Plan:
    """What will be run and where, checked; nothing is written yet."""

    options: PretrainOptions
    recipe: Recipe
    folder: Path
    resuming: bool
    dataset: PretrainDataset
    validation: PretrainDataset | None
    corpus: dict[str, Any]
    resume_step: int | None
    """Checkpoint to go on from, verified; None: from the start."""


@dataclass
class Run:
    """The live objects of a run."""

    recipe: Recipe
    folder: Path
    seed: int
    init_from: str | None
    device: torch.device
    stop_step: int
    dataset: PretrainDataset
    validation: PretrainDataset | None
    order: DataOrder
    model: GPTOSS
    forward: Forward
    optimizer: AdamW
    scheduler: LambdaLR
    start_schedule: dict[str, Any]
    checkpoints: CheckpointManager
    guard: NanGuard
    logger: TrainingLogger
    throughput: Throughput
    peak_flops: float | None
    state: RunState
    batches: Iterator[MicroBatch]

    @property
    def windows_per_step(self) -> int:
        """Windows that one step trains on."""
        return self.recipe.training.micro_batch_size * self.recipe.training.gradient_accumulation_steps

    @property
    def position(self) -> int:
        """Windows of the stream that are used up."""
        return self.state.step * self.windows_per_step + self.state.offset

    def open_stream(self) -> None:
        """Start loading from the run's position; what was loaded ahead is dropped."""
        self.batches = open_stream(self.dataset, self.order, self.position, self.recipe, self.device)

    def meta(self) -> dict[str, Any]:
        """What a checkpoint's meta holds besides its files."""
        return {
            "model": self.recipe.model.model_dump(mode="json"),
            "rope_scale": self.recipe.model.rope_scale,
            "state": asdict(self.state),
            "position": self.position,
            "tokens": self.state.step * self.windows_per_step * self.recipe.model.max_seq_len,
            "seed": self.seed,
            "versions": versions(),
        }


def plan_run(options: PretrainOptions) -> Plan:
    """Read and check everything that can be wrong with a command.

    Raises:
        UserError, OSError: one line for the person who typed it.
    """
    recipe = load_recipe(options.config, options.overrides)
    _check_options(options, recipe)
    check_trackers(recipe.training)
    folder, resuming = choose_run_folder(options.config, options.out, options.resume)
    step = resume_step(folder, options.resume) if resuming else None
    rows = recipe.model.embedding_rows
    dataset = PretrainDataset(recipe.data.train_data_path, recipe.model.max_seq_len, rows)
    check_corpus(dataset, recipe.model, recipe.data.data_mix)
    validation = open_validation(recipe, dataset)
    corpus = dataset.fingerprint()
    if resuming:
        check_unchanged(folder, recipe, options.seed, corpus, options.allow_changed)
    elif options.init_from is not None:
        _check_init_from(options.init_from, recipe)
    return Plan(options, recipe, folder, resuming, dataset, validation, corpus, step)


def _check_options(options: PretrainOptions, recipe: Recipe) -> None:
    resumes = [options.resume_from is not None, options.resume_latest, options.auto_resume]
    if sum(resumes) > 1:
        raise UserError("--resume-from, --resume and --auto-resume are given together: choose one")
    if options.init_from is not None and options.resume.wanted and not options.auto_resume:
        raise UserError("--init-from starts a new run from another's weights; it does not go with --resume")
    for name, value in (("--max-steps", options.max_steps), ("--max-hours", options.max_hours)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"{name} is {value}: it must be greater than 0")
    if options.seed is not None:
        check_seed(options.seed)
    if not recipe.training.nan_guard and not options.accept_no_nan_guard:
        raise UserError(
            "training.nan_guard is false: non-finite steps would reach the weights. If that is meant, say "
            "--i-accept-no-nan-guard too"
        )


def _check_init_from(init_from: Path, recipe: Recipe) -> None:
    source = CheckpointManager(checkpoint_folder(init_from))
    step = source.latest_step()
    if step is None:
        raise UserError(f"--init-from {init_from}: there is no complete checkpoint")
    check_weights_fit(meta_model(recipe.model), source.folder / f"model_step_{step}.safetensors")


def open_validation(recipe: Recipe, dataset: PretrainDataset) -> PretrainDataset | None:
    """The validation corpus; None without evaluation during training.

    Raises:
        UserError: training.eval_interval asks for one that is not there.
    """
    if not recipe.training.eval_interval:
        return None
    path = Path(recipe.data.validation_data_path or dataset.path / "validation")
    if recipe.data.validation_data_path is None and not path.is_dir():
        raise UserError(
            f"training.eval_interval is {recipe.training.eval_interval}, but {path} is not there; set "
            "data.validation_data_path, or training.eval_interval: 0"
        )
    validation = PretrainDataset(path, recipe.model.max_seq_len, recipe.model.embedding_rows)
    check_corpus(validation, recipe.model)
    return validation


def open_run(plan: Plan) -> Run:
    """Build a planned run, new or gone on with, and leave it ready for its next step."""
    options, recipe, training = plan.options, plan.recipe, plan.recipe.training
    if not plan.resuming:
        seed = fresh_seed() if options.seed is None else options.seed
        record_new_run(plan.folder, recipe, seed, plan.corpus, _init_source(options.init_from))
    record = read_record(plan.folder)
    seed = record["seed"]
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    knobs = set_knobs(training.deterministic)
    seed_everything(seed)
    model = GPTOSS(recipe.model).to(device)
    if training.grad_checkpoint:
        model.enable_gradient_checkpointing(training.grad_checkpoint_every)
    forward: Forward = model.hidden_states
    # The fused path's kernels are written out already, and a compiler could only split its graph around them.
    if training.compile and device.type == "cuda" and all(fallbacks(recipe.model, device)):
        forward = compiled_or_plain(forward, training.compile_mode)
    optimizer = make_optimizer(model, training)
    scheduler = make_scheduler(optimizer, training)
    order = DataOrder(len(plan.dataset), seed)
    run = Run(
        recipe=recipe,
        folder=plan.folder,
        seed=seed,
        init_from=record["init_from"],
        device=device,
        stop_step=options.max_steps or training.total_steps,
        dataset=plan.dataset,
        validation=plan.validation,
        order=order,
        model=model,
        forward=forward,
        optimizer=optimizer,
        scheduler=scheduler,
        start_schedule=scheduler.state_dict(),
        checkpoints=CheckpointManager(plan.folder / CHECKPOINTS, training.keep_last_n, 10 * training.save_interval),
        guard=NanGuard(training.nan_guard_max_consecutive, training.micro_batch_size),
        logger=TrainingLogger(
            plan.folder,
            suffix="" if training.nan_guard else " | NaN guard OFF",
            trackers=open_trackers(plan.folder, recipe),
        ),
        throughput=Throughput(),
        peak_flops=device_peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None,
        state=RunState(),
        batches=iter(()),
    )
    _announce(run, knobs)
    _go_to_start_or_checkpoint(run, plan)
    return run


def _init_source(init_from: Path | None) -> str | None:
    return None if init_from is None else str(init_from.resolve())


def _announce(run: Run, knobs: dict[str, Any]) -> None:
    recipe, training = run.recipe, run.recipe.training
    say(f"[run] {run.folder}, seed {run.seed}, device {versions()['device']}")
    say(describe_parameters(run.model))
    for half, reason in zip(("attention", "experts"), fallbacks(recipe.model, run.device), strict=True):
        say(f"[model] {half}: " + ("fused" if reason is None else f"not fused, since {reason}"))
    say("[knobs] " + ", ".join(f"{name}={value}" for name, value in knobs.items()))
    tokens = run.windows_per_step * recipe.model.max_seq_len
    size = f"{run.dataset.total_tokens:,} tokens, {len(run.dataset):,} windows"
    say(f"[data] {run.dataset.path}: {size}; {tokens:,} tokens a step")
    estimate = estimate_model_memory_gb(
        run.model,
        seq_len=recipe.model.max_seq_len,
        batch_size=training.micro_batch_size,
        grad_checkpoint=training.grad_checkpoint,
        grad_checkpoint_every=training.grad_checkpoint_every,
        loss_chunk_size=training.loss_chunk_size,
        device_type=run.device.type,
    )
    say(f"[memory] a step is estimated at {estimate.total_gb:.2f} GB")
    assert_fits_in_available_gpu(estimate)
    run.logger.event(
        "start",
        run.state.step,
        stop_step=run.stop_step,
        knobs=knobs,
        versions=versions(),
        estimate_gb=estimate.total_gb,
    )


def fallbacks(config: ModelConfig, device: torch.device) -> tuple[str | None, str | None]:
    """Why attention and experts do not take the fused path; None where they do."""
    where = (config, device.type, compute_dtype_on(device, config.dtype))
    return why_not_fused_attention(*where), why_not_fused_moe(*where)


def _go_to_start_or_checkpoint(run: Run, plan: Plan) -> None:
    run.checkpoints.remove_leftovers()
    if plan.resume_step is not None:
        restore_checkpoint(run, plan.resume_step)
    elif run.init_from is not None:
        load_other_weights(run, run.init_from)
    if plan.resuming:
        # A run that stopped between two log intervals logged its last step; the unbroken run has no such row.
        interval = run.recipe.training.log_interval
        kept_until = run.state.step if plan.resume_step is not None else NOTHING_KEPT
        run.logger.cut(kept_until, keep=lambda logged: logged == 1 or logged % interval == 0)
        run.logger.event("resume", run.state.step, position=run.position)
        say(f"[resume] from step {run.state.step}, window {run.position:,} of the stream")
    run.open_stream()


def restore_checkpoint(run: Run, step: int) -> None:
    """Put weights, moments, schedule, random numbers and state back to those of a checkpoint that has been verified."""
    meta = run.checkpoints.load(run.model, step, run.optimizer, run.scheduler, with_rng=True, check_hashes=False)
    run.state = RunState(**meta["state"])
    run.guard.reset(run.state.streak)


def restore_start(run: Run) -> None:
    """Put everything back to before the first step: the weights are made again from the seed, or read again."""
    seed_everything(run.seed)
    run.model.load_state_dict(GPTOSS(run.recipe.model).state_dict())
    if run.init_from is not None:
        load_other_weights(run, run.init_from)
    run.optimizer.state.clear()
    run.scheduler.load_state_dict(run.start_schedule.copy())
    for group, lr in zip(run.optimizer.param_groups, run.scheduler.get_last_lr(), strict=True):
        group["lr"] = lr
    run.state = RunState()
    run.guard.reset(0)


def load_other_weights(run: Run, init_from: str) -> None:
    """Start from the newest good weights of another run; nothing else of it is taken."""
    source = CheckpointManager(checkpoint_folder(init_from))
    step = source.newest_good()
    if step is None:
        raise UserError(f"--init-from {init_from}: there is no good checkpoint")
    source.load(run.model, step)
    say(f"[init] weights of step {step} of {init_from}")


def open_stream(
    dataset: PretrainDataset, order: DataOrder, position: int, recipe: Recipe, device: torch.device
) -> Iterator[MicroBatch]:
    """Micro-batches of (input, target), each (B, T) int64 on the CPU, from a position of the stream on, for ever."""
    training = recipe.training
    loader: DataLoader[MicroBatch] = DataLoader(
        dataset,
        batch_sampler=MicroBatchSampler(order, position, training.micro_batch_size),
        num_workers=training.num_workers,
        pin_memory=training.pin_memory and device.type == "cuda",
        worker_init_fn=ignore_stop_signals,
        # The loader draws a seed for its workers from this generator, not from the one whose state is saved.
        generator=torch.Generator(),
    )
    return iter(loader)
