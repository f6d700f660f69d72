"""What a command asks for, checked before anything of a run is written."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt_oss_lite.config import Recipe
from gpt_oss_lite.config.recipe import load_recipe
from gpt_oss_lite.config.unread import unread_keys
from gpt_oss_lite.training.checkpoint import CHECKPOINTS, CheckpointManager, checkpoint_folder
from gpt_oss_lite.training.dataset import PretrainDataset, check_corpus
from gpt_oss_lite.training.disk import check_room_for_run, checkpoint_bytes
from gpt_oss_lite.training.distributed import Ranks
from gpt_oss_lite.training.fp8 import check_fp8
from gpt_oss_lite.training.layout import check_split, layout_of
from gpt_oss_lite.training.memory import estimate_recipe, meta_model
from gpt_oss_lite.training.mirror import Mirror, bring_back
from gpt_oss_lite.training.mixed import open_corpus
from gpt_oss_lite.training.ram import ram_bytes
from gpt_oss_lite.training.run_folder import (
    RECORD_NAME,
    ResumeRequest,
    check_corpus_unchanged,
    check_recipe_unchanged,
    choose_run_folder,
    is_a_runs_own,
    keys_of,
    mend_run_files,
    resume_step,
)
from gpt_oss_lite.training.run_lock import is_marked
from gpt_oss_lite.training.seeding import check_seed
from gpt_oss_lite.training.trackers import check_trackers
from gpt_oss_lite.training.weights import check_weights_fit
from shared_data.console import say
from shared_data.errors import UserError


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
    profile: int | None = None
    accept_no_nan_guard: bool = False
    allow_changed: bool = False

    @property
    def resume(self) -> ResumeRequest:
        """The options that say whether and where to go on."""
        return ResumeRequest(self.resume_from, self.resume_latest, self.auto_resume)


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
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def stop_step(self) -> int:
        """The step to stop at."""
        return self.options.max_steps or self.recipe.training.total_steps

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint to go on from is of that step, or a later one."""
        return self.resume_step is not None and self.resume_step >= self.stop_step


def plan_run(options: PretrainOptions, ranks: Ranks | None = None) -> Plan:
    """Read and check everything that can be wrong with a command.

    Raises:
        UserError, OSError: one line for the person who typed it.
    """
    ranks = ranks or Ranks()
    recipe = load_recipe(options.config, options.overrides)
    check_fp8(recipe, ranks.device)
    check_split(recipe.training, ranks.size)
    _check_options(options, recipe)
    check_trackers(recipe.training)
    folder, resuming = choose_run_folder(options.config, options.out, options.resume)
    resuming = _ask_second_home(options, recipe.training.mirror, folder, resuming)
    if options.resume.wanted and not options.resume.auto and not resuming:
        raise UserError(f"{folder} holds no run to go on with; leave out --resume to start one")
    if resuming:
        mend_run_files(folder)
        # Before the corpus: where its path is another, that is the reason.
        check_recipe_unchanged(folder, recipe, options.seed, options.allow_changed)
    step = resume_step(folder, options.resume) if resuming else None
    rows = recipe.model.embedding_rows
    dataset = open_corpus(recipe.data.train_data_path, recipe.model.max_seq_len, rows)
    check_corpus(dataset, recipe.model, recipe.data.data_mix)
    validation = open_validation(recipe, dataset)
    corpus = dataset.fingerprint()
    if resuming:
        check_corpus_unchanged(folder, corpus, options.allow_changed)
    elif options.init_from is not None:
        _check_init_from(options.init_from, recipe)
    for line in unread_keys(recipe, ranks.size, options.overrides, is_a_runs_own(options.config)):
        say(f"warning: {line}")
    check_room(folder, recipe, options.max_steps)
    check_ram(recipe, ranks)
    return Plan(options, recipe, folder, resuming, dataset, validation, corpus, step, ranks)


def check_ram(recipe: Recipe, ranks: Ranks) -> None:
    """Refuse a step on the CPU that is estimated at more than the whole machine has.

    A GPU that runs out of memory says so, and the run ends in good order; Linux kills a process, and not always the
    one that took the memory.

    Raises:
        UserError: it is.
    """
    if ranks.device.type != "cpu":
        return
    need = estimate_recipe(recipe, device_type="cpu", layout=layout_of(recipe.training, ranks.size)).total_bytes
    need, each = need * ranks.size_here, " by the ranks of this machine" if ranks.size_here > 1 else ""
    if need > (have := ram_bytes()):
        raise UserError(
            f"a step of this recipe is estimated at {need / 1e9:.1f} GB on the CPU, in fp32{each}, and the machine has "
            f"{have / 1e9:.1f} GB; it needs a GPU, or a smaller model or training.micro_batch_size"
        )


def words_of_plan(plan: Plan, mark: str) -> dict[str, Any]:
    """What the other ranks need to know of the first one's plan, as JSON can hold it.

    Args:
        mark: of the run's folder, which the first rank holds (`run_lock.locked`).
    """
    return {
        "folder": str(plan.folder.absolute()), "mark": mark, "resuming": plan.resuming, "corpus": plan.corpus,
        "validation": plan.validation and plan.validation.fingerprint(), "resume_step": plan.resume_step,
        "told": _told(plan.options, plan.recipe),
    }  # fmt: skip


def _told(options: PretrainOptions, recipe: Recipe) -> dict[str, Any]:
    """What every rank reads for itself and must read alike; where a corpus lies may differ, not what it holds."""
    keys = {key: value for key, value in keys_of(recipe).items() if not key.startswith("data.")}
    return keys | {"--max-steps": options.max_steps, "--max-hours": options.max_hours}


def follow_plan(options: PretrainOptions, ranks: Ranks, words: dict[str, Any]) -> Plan:
    """The plan that the first rank has made and checked, on another rank: its own view of the same corpus.

    Raises:
        UserError, OSError: this rank was told otherwise, or cannot read what the first one can.
    """
    recipe, folder = load_recipe(options.config, options.overrides), Path(words["folder"])
    mine, others = _told(options, recipe), words["told"]
    if differing := [f"{key} is {mine[key]} here, {others[key]} there" for key in mine if mine[key] != others[key]]:
        raise UserError(f"was told other than rank 0: {'; '.join(differing)}")
    if not is_marked(folder, words["mark"]):
        raise UserError(f"{folder} is not the folder here that it is on rank 0: a run must lie where all ranks see it")
    dataset = open_corpus(recipe.data.train_data_path, recipe.model.max_seq_len, recipe.model.embedding_rows)
    _check_same_corpus(dataset, words["corpus"])
    path = validation_path(recipe, dataset)
    validation = None if path is None else PretrainDataset(path, dataset.max_seq_len, dataset.vocab_rows)
    if validation is not None:
        _check_same_corpus(validation, words["validation"])
    return Plan(
        options, recipe, folder, words["resuming"], dataset, validation, words["corpus"], words["resume_step"], ranks
    )


def _check_same_corpus(dataset: PretrainDataset, fingerprint: dict[str, Any]) -> None:
    if (mine := dataset.fingerprint()) != fingerprint:
        raise UserError(f"{dataset.path} is another corpus here ({mine}) than on rank 0 ({fingerprint})")


def _ask_second_home(options: PretrainOptions, url: str | None, folder: Path, resuming: bool) -> bool:
    """Fetch what a run to be gone on with lacks here; refuse to start a new run over another's second home.

    Returns:
        Whether there is a run to go on with.
    """
    if url is None:
        return resuming
    mirror = Mirror(url, folder)
    if options.resume.wanted:
        bring_back(mirror, folder, options.resume_from)
        return resuming or (folder / RECORD_NAME).is_file()
    if mirror.holds_run():
        raise UserError(
            f"training.mirror is {url}: a run named {folder.name} is there already; go on with it (--resume latest), "
            "or start another (--out elsewhere)"
        )
    return resuming


def check_room(folder: Path, recipe: Recipe, max_steps: int | None) -> None:
    """Foresee a full disk: a warning, or, when not even one checkpoint has room, an error.

    Raises:
        UserError: see `disk.check_room_for_run`.
    """
    training, checkpoints = recipe.training, folder / CHECKPOINTS
    warning = check_room_for_run(
        checkpoints,
        checkpoint_bytes(meta_model(recipe.model), training.optimizer),
        training,
        max_steps or training.total_steps,
        there=len(CheckpointManager(checkpoints).list_checkpoints()),
    )
    if warning:
        say(f"warning: {warning}")


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
    check_weights_fit(meta_model(recipe.model), source, step)


def validation_path(recipe: Recipe, dataset: PretrainDataset) -> Path | None:
    """Where the validation corpus lies; None without evaluation during training."""
    if not recipe.training.eval_interval:
        return None
    return Path(recipe.data.validation_data_path or dataset.path / "validation")


def open_validation(recipe: Recipe, dataset: PretrainDataset) -> PretrainDataset | None:
    """The validation corpus; None without evaluation during training.

    Raises:
        UserError: training.eval_interval asks for one that is not there.
    """
    path = validation_path(recipe, dataset)
    if path is None:
        return None
    if recipe.data.validation_data_path is None and not path.is_dir():
        raise UserError(
            f"training.eval_interval is {recipe.training.eval_interval}, but {path} is not there; set "
            "data.validation_data_path, or training.eval_interval: 0"
        )
    validation = PretrainDataset(path, recipe.model.max_seq_len, recipe.model.embedding_rows)
    check_corpus(validation, recipe.model)
    return validation
