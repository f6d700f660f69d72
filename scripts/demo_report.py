"""What `make demo` measures and draws."""

import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import psutil

from gpt_oss_lite.pictures import save_picture
from gpt_oss_lite.training.logger import read_rows
from shared_data.errors import UserError

SAMPLE_INTERVAL_S = 0.2


@dataclass(frozen=True)
class Figures:
    """Held-out bits per byte of a run's first and last evaluation."""

    first_bpb: float
    last_bpb: float


def evaluations(run: Path) -> list[dict]:
    """The evaluation events of a run, by step; one that a resumed run repeated counts once."""
    by_step = {row["step"]: row for row in read_rows(run / "events.jsonl") if row["event"] == "eval"}
    return [by_step[step] for step in sorted(by_step)]


def read_figures(run: Path) -> Figures:
    """The run's figures.

    Raises:
        UserError: the run has no evaluation with bits per byte.
    """
    bits = [row["bits_per_byte"] for row in evaluations(run)]
    if not bits or None in bits:
        raise UserError(f"{run}/events.jsonl has no evaluation with bits per byte: set training.eval_interval")
    return Figures(bits[0], bits[-1])


def plot_losses(run: Path, target: Path) -> None:
    """Draw training and held-out loss over the steps, in the format of the target's suffix."""
    rows, held_out = read_rows(run / "metrics.jsonl"), evaluations(run)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([row["step"] for row in rows], [row["ce"] for row in rows], label="training")
    axes.plot([row["step"] for row in held_out], [row["loss"] for row in held_out], "o-", label="held out")
    axes.set(title=f"{run}: cross-entropy", xlabel="step", ylabel="nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    save_picture(figure, target)
    plt.close(figure)


class PeakMemory:
    """A context that watches the resident memory of this process and all below it.

    The sum counts pages that processes share once for each: it is never too small.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        own = psutil.Process()
        while True:
            total = 0
            for process in [own, *own.children(recursive=True)]:
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:  # it ended in the meantime
                    continue
            self.peak_bytes = max(self.peak_bytes, total)
            if self._stop.wait(SAMPLE_INTERVAL_S):
                return
