"""TensorBoard and Weights & Biases beside metrics.jsonl, where a recipe asks for them.

metrics.jsonl stays the run's record: a tracker that fails is left out, and the run goes on. A run that is gone on with
continues its curves, each step once. TensorBoard forgets the points past a checkpoint when told so (`purge_step`).
W&B's history can only grow: there a step that was sent stays as it was, also when the run goes back behind it.
"""

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from gpt_oss_lite.config import Recipe, TrainingConfig
from shared_data.console import say
from shared_data.errors import UserError, require_extra
from shared_data.files import write_atomic

EXTRA = "track"
INDEX_NAMES = ("layer", "expert")


class Tracker(Protocol):
    """Somewhere else that wants the figures of a run."""

    name: str

    def log(self, step: int, figures: dict[str, float]) -> None:
        """Add the figures of one step; a step may come in several parts."""

    def cut(self, first_step: int) -> None:
        """The run goes back: steps from this one on come again."""

    def finish(self) -> None:
        """Nothing more comes."""


def check_trackers(training: TrainingConfig) -> None:
    """See that what a recipe asks for can be had.

    Raises:
        UserError: the package is not installed, or W&B is to be online and nobody is logged in.
    """
    if training.tensorboard:
        require_extra("tensorboard", EXTRA)
    if training.wandb == "off":
        return
    wandb: Any = require_extra("wandb", EXTRA)
    if training.wandb == "online":
        try:
            wandb.login()
        except wandb.Error as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"training.wandb is online: {reason} (`wandb login`; or set training.wandb: offline)"
            ) from None


def open_trackers(folder: Path, recipe: Recipe) -> list[Tracker]:
    """The trackers that a recipe asks for, each with what it has in a run's folder already."""
    trackers: list[Tracker] = []
    if recipe.training.tensorboard:
        trackers.append(TensorBoard(folder))
    if recipe.training.wandb != "off":
        trackers.append(WeightsAndBiases(folder, recipe))
    return trackers


class TensorBoard:
    """Event files in RUN/tensorboard: `tensorboard --logdir RUN`."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None
        self._purge_step: int | None = None

    def log(self, step: int, figures: dict[str, float]) -> None:
        """Add the figures of one step."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def cut(self, first_step: int) -> None:
        """Have a new file say that what the older ones have from this step on does not count."""
        self.finish()
        self._purge_step = first_step

    def finish(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WeightsAndBiases:
    """One W&B run for the whole of ours: RUN/wandb keeps its id and the last step that was sent.

    Offline, each process writes a folder of its own under the same id; `wandb sync` sends them up. W&B writes every
    15 s: a killed process takes with it what it logged since then, there only.
    """

    name = "wandb"

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        import wandb

        self._record = folder / "wandb" / "gpt-oss-lite.json"
        known = json.loads(self._record.read_bytes()) if self._record.exists() else {}
        self._id: str = known.get("id") or secrets.token_hex(4)
        self._sent_before = self._last_step = known.get("last_step", -1)
        self._record.parent.mkdir(parents=True, exist_ok=True)
        online = recipe.training.wandb == "online"
        try:
            self._run = wandb.init(
                project=recipe.training.wandb_project,
                id=self._id,
                name=folder.name,
                dir=folder,
                config=recipe.model_dump(mode="json"),
                mode="online" if online else "offline",
                # Offline there is no service to ask; the id alone joins the parts.
                resume="allow" if online else None,
                settings=wandb.Settings(silent=not online, console="off"),
            )
        except wandb.Error as error:
            raise UserError(f"training.wandb is {recipe.training.wandb}: {' '.join(str(error).split())}") from None
        self._mark(self._last_step)

    def log(self, step: int, figures: dict[str, float]) -> None:
        """Add the figures of one step, unless that step has been sent before."""
        if step <= self._sent_before or step < self._last_step:
            return
        self._run.log(figures, step=step)
        if step != self._last_step:
            self._mark(step)

    def cut(self, first_step: int) -> None:
        """Nothing: what was sent stays."""

    def finish(self) -> None:
        """Send or write what is left, and close."""
        self._run.finish()

    def _mark(self, step: int) -> None:
        self._last_step = step
        write_atomic(self._record, json.dumps({"id": self._id, "last_step": step}) + "\n")


def guarded(tracker: Tracker, call: Callable[[Tracker], None]) -> bool:
    """Call a tracker; False when it failed, which is said once and never ends a run."""
    try:
        call(tracker)
    except Exception as error:  # whatever a full disk or a lost service makes these packages raise
        say(f"warning: {tracker.name} gave up, the run goes on without it: {type(error).__name__}: {error}")
        return False
    return True


def scalars(group: str, figures: dict[str, Any]) -> dict[str, float]:
    """Figures as flat names: `train/ce`, `train/router_entropy/layer_03`, `train/expert_load/layer_03/expert_0`.

    Figures that are null (a non-finite loss, an unknown device's MFU) have no point.
    """
    flat: dict[str, float] = {}
    for key, value in figures.items():
        if key not in ("step", "time"):
            _flatten(f"{group}/{key}", value, INDEX_NAMES, flat)
    return flat


def _flatten(name: str, value: Any, index_names: tuple[str, ...], flat: dict[str, float]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _flatten(f"{name}/{key}", item, index_names, flat)
    elif isinstance(value, list):
        digits = len(str(len(value) - 1))
        for index, item in enumerate(value):
            _flatten(f"{name}/{index_names[0]}_{index:0{digits}}", item, index_names[1:], flat)
    elif value is not None:
        flat[name] = value
