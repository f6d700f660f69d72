"""The training and data blocks of a recipe."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from gpt_oss_lite.config.base import ConfigBlock
from gpt_oss_lite.config.model import ModelConfig
from gpt_oss_lite.config.other_names import OTHER_NAMES

WEIGHT_STEPS = 10_000
"""Weights of corpora are multiples of one in so many."""


class TrainingConfig(ConfigBlock):
    """Optimizer, schedule, batch, precision knobs, logging and saving."""

    # Optimizer
    lr: float = Field(4e-4, gt=0)
    """Peak learning rate."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw; or muon for the matrices but routers and head, at AdamW's update size, and AdamW for the rest."""
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    """Muon's decay rate of the momentum."""
    # A list is what YAML has; a tuple is what cannot change.
    betas: Annotated[tuple[float, float], Field(strict=False)] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment, each in [0, 1)."""
    eps: float = Field(1e-6, gt=0)
    """AdamW's epsilon; 1e-8 is lost beside second moments of bf16 gradients."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled decay of the matrices; embedding, norms, biases and sinks have none."""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0 or less: no clipping."""

    # Schedule
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    """After the warm-up: cosine to the floor, constant, or stable then a linear decay (warm-up-stable-decay)."""
    warmup_steps: int = Field(3000, ge=0)
    """Steps of linear warm-up from 0."""
    total_steps: int = Field(61000, ge=1)
    """Steps of the schedule, and of the run unless --max-steps says otherwise."""
    decay_steps: int | None = Field(None, ge=1)
    """Length of the final decay in steps, for wsd. Null: a tenth of total_steps."""
    min_lr_ratio: float = Field(0.05, ge=0, le=1)
    """Floor of the schedule as a share of lr."""

    # Batch
    micro_batch_size: int = Field(8, ge=1)
    """Windows of one forward and backward pass."""
    gradient_accumulation_steps: int = Field(4, ge=1)
    """Micro-batches of a step."""

    # Loss
    aux_loss_alpha: float = Field(0.01, ge=0)
    """Weight of the Switch load-balancing loss."""
    router_z_loss: float = Field(0.0, ge=0)
    """Weight of the router z-loss (ST-MoE, eq. 5); 0: off."""
    loss_chunk_size: int = Field(8192, ge=1)
    """Tokens whose logits are alive at one time."""
    fp8_head: bool = False
    """Two of the head's three products in 8-bit floats: faster on Ada and Hopper, a noisier gradient."""
    aux_loss_scope: Literal["micro_batch", "ranks"] = "micro_batch"
    """Tokens whose expert shares the load-balancing loss uses: one micro-batch's, or those of all ranks together."""

    # Several GPUs
    parallelism: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: a replica on every rank (ddp), or weights, gradients and moments in shards (fsdp)."""
    expert_parallel_size: int = Field(1, ge=1)
    """Ranks that share each layer's routed experts, to which tokens travel; 1: every rank has all. With ddp only."""
    gradient_bucket_mb: int = Field(25, ge=1)
    """MB (2^20) of gradients that ddp exchanges at a time, beside the backward pass."""
    distributed_timeout_s: float = Field(60.0, ge=1)
    """Seconds within which a rank that was killed or hangs ends the job, with an error that names it."""

    # Speed and memory
    compile: bool = False
    """Compile the model with torch.compile, on CUDA where no part of it takes the fused path."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """torch.compile's mode."""
    grad_checkpoint: bool = False
    """Recompute some blocks in the backward pass instead of keeping their activations."""
    grad_checkpoint_every: int = Field(3, ge=1)
    """With grad_checkpoint, recompute the blocks i with i % n == 0."""
    deterministic: bool = False
    """Deterministic algorithms only, and no search for fast ones."""
    num_workers: int = Field(4, ge=0)
    """Processes that load windows; 0: the training process itself."""
    pin_memory: bool = True
    """Page-locked batches, for asynchronous copies to a GPU."""

    # Safety
    nan_guard: bool = True
    """Watch for non-finite losses. Without it the run needs --i-accept-no-nan-guard."""
    nan_guard_max_consecutive: int = Field(5, ge=1)
    """Non-finite micro-batch losses in a row that send the run back to its newest checkpoint."""
    nan_guard_max_rollbacks: int = Field(3, ge=0)
    """Rollbacks after which the run gives up with exit code 4."""
    nan_guard_lr_factor: float = Field(1.0, gt=0, le=1)
    """The rate is multiplied by this after a rollback, for nan_guard_lr_steps steps; 1: as scheduled."""
    nan_guard_lr_steps: int = Field(200, ge=0)
    """Steps after a rollback's checkpoint that nan_guard_lr_factor holds for."""
    spike_zscore: float = Field(8.0, ge=0)
    """Standard deviations above its running mean at which a step's loss or gradient norm is an event; 0: off."""
    spike_window: int = Field(200, ge=2)
    """Steps that the running mean and deviation look back over; the first so many steps are never spikes."""
    skip_spikes: bool = False
    """Also skip the update of a step that is a spike, as the NaN guard skips a non-finite one."""

    # Logging and saving
    log_interval: int = Field(50, ge=1)
    """Steps between log lines."""
    save_interval: int = Field(2000, ge=1)
    """Steps between checkpoints; the last step is always saved."""
    keep_last_n: int = Field(3, ge=1)
    """Newest checkpoints kept; those of keep_every stay besides."""
    keep_every: int | None = Field(None, ge=0)
    """Checkpoints at multiples of this step are kept for ever; 0: none. Null: 10 x save_interval."""
    mirror: str | None = Field(None, min_length=1)
    """Second home of the run: an fsspec URL (s3://bucket/runs, file:///mnt/other) that checkpoints are copied to."""
    eval_interval: int = Field(0, ge=0)
    """Steps between evaluations on the validation shards; there is one at the start and the end too; 0: none."""
    eval_windows: int = Field(64, ge=1)
    """Validation windows of an evaluation during training; fewer when there are fewer."""
    tensorboard: bool = False
    """Write the log for TensorBoard too, in the run's folder (extra: track)."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Write the log for Weights & Biases too: into the run's folder, or to the service (extra: track)."""
    wandb_project: str = Field("gpt-oss-lite", min_length=1)
    """Project of the run in Weights & Biases."""

    @property
    def windows_per_step(self) -> int:
        """Windows that one step trains on, over all ranks."""
        return self.micro_batch_size * self.gradient_accumulation_steps

    @property
    def resolved_keep_every(self) -> int:
        """Step whose multiples' checkpoints stay for ever; 0: none."""
        return 10 * self.save_interval if self.keep_every is None else self.keep_every

    @property
    def resolved_decay_steps(self) -> int:
        """Length of the final decay of wsd in steps."""
        return self.decay_steps or max(self.total_steps // 10, 1)

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.optimizer == "muon" and self.parallelism == "fsdp":
            raise ValueError("optimizer is muon: it takes whole matrices, so parallelism must be ddp, not fsdp")
        if self.skip_spikes and not (self.spike_zscore and self.nan_guard):
            raise ValueError("skip_spikes is true: it needs spike_zscore above 0 and nan_guard: true")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas is {list(self.betas)}: both must be at least 0 and less than 1")
        if self.warmup_steps >= self.total_steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps}: it must be less than total_steps ({self.total_steps})"
            )
        if self.schedule != "wsd" and self.decay_steps is not None:
            raise ValueError(f"decay_steps is {self.decay_steps}: only schedule: wsd has it, not {self.schedule}")
        if self.expert_parallel_size > 1 and self.parallelism != "ddp":
            raise ValueError(
                f"expert_parallel_size is {self.expert_parallel_size}: it goes with parallelism: ddp, not "
                f"{self.parallelism}"
            )
        if self.schedule == "wsd" and self.warmup_steps + self.resolved_decay_steps > self.total_steps:
            raise ValueError(
                f"decay_steps is {self.resolved_decay_steps}: with warmup_steps ({self.warmup_steps}) it must fit into "
                f"total_steps ({self.total_steps})"
            )
        return self


class CorpusPart(ConfigBlock):
    """One of several corpora that a run draws from."""

    path: str = Field(min_length=1)
    """Folder with manifest.json and shards, or one file of tokens."""
    weight: float = Field(gt=0, le=1)
    """Share of the windows, in steps of 0.0001; the weights add up to 1."""

    @property
    def turns(self) -> int:
        """The weight in steps."""
        return round(self.weight * WEIGHT_STEPS)

    @model_validator(mode="after")
    def _is_whole_steps(self) -> Self:
        if abs(self.weight * WEIGHT_STEPS - self.turns) > 1e-6 or self.turns == 0:
            raise ValueError(f"weight is {self.weight}: it must be at least 0.0001 and have at most four decimals")
        return self


class DataConfig(ConfigBlock):
    """What the run reads."""

    train_data_path: Annotated[
        Annotated[str, Field(min_length=1), Tag("(path)")]
        | Annotated[list[CorpusPart], Field(min_length=2), Tag("(list)")],
        Discriminator(lambda value: "(list)" if isinstance(value, list) else "(path)"),
    ]
    """Folder with manifest.json and shards, or one file of tokens. Relative to the working folder. Or several, as a
    list of `{path: FOLDER, weight: 0.7}`: windows are drawn from each by its weight."""
    validation_data_path: str | None = Field(None, min_length=1)
    """The same for validation. Null: the folder validation/ in train_data_path, where that is one corpus."""
    data_mix: str | None = None
    """Name of the mixture that the corpus, or each of several, must have been made with. Null: not checked."""

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if isinstance(self.train_data_path, str):
            return self
        total = sum(part.turns for part in self.train_data_path)
        if total != WEIGHT_STEPS:
            raise ValueError(f"train_data_path has weights that add up to {total / WEIGHT_STEPS:g}: it must be 1")
        paths = [part.path for part in self.train_data_path]
        if twice := [path for path in paths if paths.count(path) > 1]:
            raise ValueError(f"train_data_path names {twice[0]} twice: name it once, with the sum of the weights")
        return self


class Recipe(ConfigBlock):
    """A whole recipe: one YAML file."""

    OTHER_NAMES: ClassVar[Mapping[str, str]] = OTHER_NAMES

    model: ModelConfig
    training: TrainingConfig
    data: DataConfig

    @model_validator(mode="after")
    def _check_fp8(self) -> Self:
        wrong: dict[str, list[str]] = {}
        if self.training.fp8_head:
            rows = "vocab_size" if self.model.padded_vocab_size is None else "padded_vocab_size"
            wrong["training.fp8_head is true"] = self._against_eight_bits("d_model", rows)
        if self.model.moe_dispatch == "grouped_fp8":
            reasons = self._against_eight_bits("d_model", "expert_hidden_size")
            if self.model.expert_bias:
                reasons.append("it goes with model.expert_bias false")
            if (residual := self.model.residual_dtype) not in (None, "bf16"):
                reasons.append(f"it goes with model.residual_dtype bf16, not {residual}")
            if (size := self.training.expert_parallel_size) > 1:
                reasons.append(f"it goes with training.expert_parallel_size 1, not {size}")
            wrong["model.moe_dispatch is grouped_fp8"] = reasons
        if lines := [f"{chosen}: {', '.join(reasons)}" for chosen, reasons in wrong.items() if reasons]:
            raise ValueError("; ".join(lines))
        return self

    def _against_eight_bits(self, *sizes: str) -> list[str]:
        """What keeps products of 8-bit floats from being made."""
        reasons = []
        if self.model.dtype != "bf16":
            reasons.append(f"it goes with model.dtype bf16, not {self.model.dtype}")
        for key in sizes:
            if (size := getattr(self.model, key)) % 16:
                reasons.append(f"model.{key} is {size}, it must be a multiple of 16")
        return reasons

    @model_validator(mode="after")
    def _check_precision(self) -> Self:
        for key in ("dtype", "residual_dtype"):
            if getattr(self.model, key) == "fp16":
                raise ValueError(f"model.{key} is fp16: training takes bf16 or fp32 (fp16 is for inference)")
        return self

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        size, n_experts = self.training.expert_parallel_size, self.model.n_experts
        if n_experts % size:
            raise ValueError(
                f"training.expert_parallel_size is {size}: it must be a divisor of model.n_experts ({n_experts})"
            )
        return self
