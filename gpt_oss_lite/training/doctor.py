"""`gpt-oss-lite doctor`: what could lose a long run, looked at before it starts.

Each check gives one finding in plain words: good, to be noticed, or one that would lose the run. A check that fails
does not keep the others from being made.
"""

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from gpt_oss_lite.config import Recipe, load_recipe
from gpt_oss_lite.config.unread import unread_keys
from gpt_oss_lite.options import AsJson, Config, Overrides, print_json
from gpt_oss_lite.training.ram import available_ram_bytes, ram_bytes
from shared_data.console import count_of, describe
from shared_data.errors import UserError
from shared_data.files import fsync_folder

GOOD, NOTICE, FATAL = "good", "notice", "fatal"
MARKS = {GOOD: "ok  ", NOTICE: "note", FATAL: "FAIL"}

# The hardware use that a first guess assumes, of the device's bf16 peak.
ASSUMED_MFU = 0.35
# Epochs beyond which repeated text is worth much less than new text (Muennighoff et al., 2023, Scaling Data-Constrained
# Language Models).
MANY_EPOCHS = 4
DAY_S = 86_400.0
FIRST_SANE_TIME = 1_767_225_600.0  # 2026-01-01: this program is younger


@dataclass(frozen=True)
class Finding:
    """What one check says."""

    check: str
    state: str
    """good, notice or fatal."""
    text: str


def doctor(
    config: Config,
    out: Annotated[Path, typer.Option(metavar="RUN", help="Run folder to be.")] = Path("runs"),
    max_steps: Annotated[int | None, typer.Option(min=1, help="Step to stop at. Default: total_steps.")] = None,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes of the run, one a GPU.")] = 1,
    as_json: AsJson = False,
) -> int:
    """Look at machine, disk, memory, corpus, recipe and clock before a long run. Exit code 1 if it would be lost."""
    from gpt_oss_lite.training.run_folder import is_a_runs_own

    recipe = load_recipe(config, overrides or [])
    unread = unread_keys(recipe, ranks, overrides or [], is_a_runs_own(config))
    findings = []
    for finding in examine(recipe, out, max_steps, ranks, unread):
        findings.append(finding)
        if not as_json:
            print(f"{MARKS[finding.state]} {finding.check}: {finding.text}", flush=True)
    fatal = list(dict.fromkeys(finding.check for finding in findings if finding.state == FATAL))
    if as_json:
        print_json({"ready": not fatal, "findings": [asdict(finding) for finding in findings]})
    else:
        print(f"the run would be lost: see {', '.join(fatal)}" if fatal else "ready")
    return 1 if fatal else 0


def examine(
    recipe: Recipe, out: Path, max_steps: int | None, ranks: int = 1, unread: Sequence[str] = ()
) -> Iterator[Finding]:
    """All findings, in the order of the checks; of one of several GPUs where there are more ranks. `unread` has what
    `unread_keys` says."""
    yield from _guarded("machine", machine)
    yield from _guarded("driver", driver)
    yield from _guarded("clock", lambda: clock(out))
    stop_step = max_steps or recipe.training.total_steps
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "config": lambda: settings(recipe, stop_step, ranks, unread),
        "corpus": lambda: corpus(recipe, stop_step),
        "disk": lambda: disk(recipe, out, stop_step),
        "memory": lambda: memory(recipe, ranks),
        "mirror": lambda: second_home(recipe, out),
        "estimate": lambda: duration(recipe, stop_step, ranks),
    }
    for name, check in checks.items():
        yield from _guarded(name, check)


def _guarded(name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except (UserError, OSError) as error:
        yield Finding(name, FATAL, describe(error))


def machine() -> Iterator[Finding]:
    """Processor, memory, versions, limits."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"{cores} cores, {ram_bytes() / 1e9:.0f} GB, {platform.system()} {platform.release()}, "
    yield Finding("machine", GOOD, text + f"Python {platform.python_version()}, PyTorch {torch.__version__}")


def driver() -> Iterator[Finding]:
    """The GPU as PyTorch sees it, against what the driver says."""
    import torch

    reported = _nvidia_smi()
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        free, total = torch.cuda.mem_get_info()
        text = f"{name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free, CUDA {torch.version.cuda}"
        yield Finding("driver", GOOD, text + (f", driver {reported[0]}" if reported else ""))
        if free < 0.9 * total:
            yield Finding("driver", NOTICE, "another process holds memory of this GPU")
        if reported and reported[1] not in ("0", "[N/A]"):
            yield Finding("driver", FATAL, f"{reported[1]} uncorrected memory errors since the last reset of the GPU")
    elif reported:
        yield Finding(
            "driver",
            FATAL,
            f"there is a GPU (driver {reported[0]}), but PyTorch (CUDA {torch.version.cuda}) cannot use it: install a "
            "build of PyTorch that the driver supports",
        )
    else:
        yield Finding("driver", NOTICE, "no GPU: training runs on the processor")


def _nvidia_smi() -> tuple[str, str] | None:
    """Driver version and uncorrected memory errors of the first GPU; None where there is no driver."""
    if not shutil.which("nvidia-smi"):
        return None
    fields = "driver_version,ecc.errors.uncorrected.volatile.total"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired as error:
        raise UserError("nvidia-smi does not answer: the driver hangs") from error
    lines = result.stdout.splitlines()
    if result.returncode != 0 or not lines:
        return None
    version, _, errors = lines[0].partition(", ")
    return version, errors.strip()


def clock(out: Path) -> Iterator[Finding]:
    """Whether the time is one that logs and file systems can be trusted with."""
    now = time.time()
    text = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now))
    if now < FIRST_SANE_TIME:
        yield Finding("clock", FATAL, f"it says {text}, which is past: set it, or certificates and logs will be wrong")
        return
    newest = max((path.stat().st_mtime for path in (out, out.parent, Path(__file__)) if path.exists()), default=0.0)
    if newest > now + DAY_S:
        yield Finding("clock", NOTICE, f"it says {text}, but files here are from a later day")
    else:
        yield Finding("clock", GOOD, text)


def settings(recipe: Recipe, stop_step: int, ranks: int, unread: Sequence[str]) -> Iterator[Finding]:
    """Keys that are allowed and yet would lose a run, or much of it."""
    import torch

    from gpt_oss_lite.training.fp8 import check_fp8
    from gpt_oss_lite.training.layout import check_split

    training = recipe.training
    check_split(training, ranks)
    yield Finding("config", GOOD, f"{count_of(stop_step, 'step')}, a checkpoint every {training.save_interval:,}")
    if not training.nan_guard:
        yield Finding("config", FATAL, "training.nan_guard is false: one non-finite step would spoil the weights")
    if training.save_interval > stop_step:
        yield Finding(
            "config",
            FATAL,
            f"training.save_interval is {training.save_interval}: the only checkpoint would be the last step's "
            f"({stop_step}), and a crash before it would lose everything",
        )
    if training.keep_last_n == 1:
        yield Finding("config", NOTICE, "training.keep_last_n is 1: a damaged newest checkpoint has none before it")
    if stop_step > training.total_steps:
        yield Finding("config", NOTICE, f"steps after {training.total_steps:,} are at the schedule's floor")
    if (workers := training.num_workers) > (cores := len(os.sched_getaffinity(0))):
        text = f"training.num_workers is {workers}: more loader workers than the machine has cores ({cores})"
        yield Finding("config", NOTICE, text)
    for line in unread:
        yield Finding("config", NOTICE, line)
    check_fp8(recipe, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def corpus(recipe: Recipe, stop_step: int) -> Iterator[Finding]:
    """The corpus as the run will open it, and whether it is long enough."""
    from gpt_oss_lite.training.dataset import check_corpus
    from gpt_oss_lite.training.mixed import open_corpus
    from gpt_oss_lite.training.plan import open_validation

    training = recipe.training
    dataset = open_corpus(recipe.data.train_data_path, recipe.model.max_seq_len, recipe.model.embedding_rows)
    check_corpus(dataset, recipe.model, recipe.data.data_mix)
    open_validation(recipe, dataset)
    wanted = stop_step * training.windows_per_step
    for part, epochs in zip(dataset.parts, dataset.order(0).passes(wanted), strict=True):
        size = f"{part.total_tokens:,} tokens, {len(part):,} windows"
        text = f"{part.path}: {size}; the run reads {epochs:.2f} epochs"
        yield Finding("corpus", NOTICE if epochs > MANY_EPOCHS else GOOD, text)
        if part.manifest is None:
            yield Finding(
                "corpus", NOTICE, "one file without a manifest: damage to it is noticed only where ids are too large"
            )


def disk(recipe: Recipe, out: Path, stop_step: int) -> Iterator[Finding]:
    """Room for the checkpoints, and whether the file system does what they rely on."""
    from gpt_oss_lite.training.checkpoint import CHECKPOINTS, CheckpointManager
    from gpt_oss_lite.training.disk import check_room_for_run, checkpoint_bytes, free_bytes, most_checkpoints
    from gpt_oss_lite.training.memory import meta_model

    size = checkpoint_bytes(meta_model(recipe.model), recipe.training.optimizer)
    folder = out / CHECKPOINTS
    there = len(CheckpointManager(folder).list_checkpoints())
    warning = check_room_for_run(folder, size, recipe.training, stop_step, there)
    most = most_checkpoints(recipe.training, stop_step)
    text = f"{out}: {free_bytes(out) / 1e9:.3g} GB free; up to {count_of(most, 'checkpoint')} of {size / 1e9:.3g} GB"
    yield Finding("disk", FATAL if warning else GOOD, warning or text)
    place = out.absolute()
    while not place.exists():
        place = place.parent
    seconds = try_atomic_write(place)
    slow = seconds > 2
    yield Finding(
        "disk", NOTICE if slow else GOOD, f"write, fsync and rename work at {place} ({seconds * 1000:.0f} ms for 4 MB)"
    )


def try_atomic_write(folder: Path) -> float:
    """Write, fsync, rename and delete a file; the seconds that it took.

    Raises:
        OSError: the file system refuses one of them.
    """
    started = time.perf_counter()
    probe = folder / f".gpt-oss-lite-probe-{os.getpid()}"
    renamed = probe.with_suffix(".renamed")
    try:
        with open(probe, "wb") as file:
            file.write(os.urandom(4 * 2**20))
            file.flush()
            os.fsync(file.fileno())
        os.replace(probe, renamed)
        fsync_folder(folder)
    finally:
        probe.unlink(missing_ok=True)
        renamed.unlink(missing_ok=True)
    return time.perf_counter() - started


def memory(recipe: Recipe, ranks: int) -> Iterator[Finding]:
    """A step's estimate against the device, and the copy that a save takes against the machine."""
    import torch

    from gpt_oss_lite.training.disk import checkpoint_bytes
    from gpt_oss_lite.training.layout import layout_of
    from gpt_oss_lite.training.memory import estimate_recipe, meta_model

    on_gpu, layout = torch.cuda.is_available(), layout_of(recipe.training, ranks)
    need = estimate_recipe(recipe, device_type="cuda" if on_gpu else "cpu", layout=layout).total_bytes
    have = torch.cuda.mem_get_info()[0] if on_gpu else available_ram_bytes()
    place = "the GPU has" if on_gpu else "the machine has"
    text = f"a step is estimated at {need / 1e9:.1f} GB, {place} {have / 1e9:.1f} GB free"
    yield Finding("memory", FATAL if need > have else GOOD, text)
    copy = checkpoint_bytes(meta_model(recipe.model), recipe.training.optimizer)
    left = available_ram_bytes() - (0 if on_gpu else need)
    if copy > left and not layout.sharded:  # otherwise each rank writes what it has
        yield Finding(
            "memory", FATAL, f"a save copies {copy / 1e9:.1f} GB, but only {max(left, 0) / 1e9:.1f} GB are left for it"
        )
    workers = recipe.training.num_workers
    shared = Path("/dev/shm")
    if workers and shared.is_dir():
        batch = 2 * 8 * recipe.training.micro_batch_size * recipe.model.max_seq_len
        queued, free = 2 * workers * batch, shutil.disk_usage(shared).free
        if queued > free:
            yield Finding(
                "memory",
                FATAL,
                f"{workers} loader workers queue {queued / 1e6:.0f} MB in /dev/shm, where {free / 1e6:.0f} MB are "
                "free: give the container more (--shm-size), or set training.num_workers: 0",
            )


def second_home(recipe: Recipe, out: Path) -> Iterator[Finding]:
    """Whether training.mirror can be reached."""
    from gpt_oss_lite.training.mirror import Mirror

    url = recipe.training.mirror
    if url is None:
        return
    try:
        steps = Mirror(url, out).steps()
    except (UserError, OSError):
        raise
    except Exception as error:  # each store has errors of its own
        raise UserError(f"training.mirror is {url}: {type(error).__name__}: {error}") from None
    yield Finding("mirror", GOOD, f"{url} can be read; {count_of(len(steps), 'checkpoint')} of {out.name} there")


def duration(recipe: Recipe, stop_step: int, ranks: int) -> Iterator[Finding]:
    """How long the run takes at an assumed use of the device, and how much of it a crash costs."""
    import torch

    from gpt_oss_lite.training.flops import device_peak_flops, flops_per_token
    from gpt_oss_lite.training.logger import format_duration

    training, seq_len = recipe.training, recipe.model.max_seq_len
    flops = training.windows_per_step * seq_len * flops_per_token(recipe.model, seq_len)
    peak = device_peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    if peak is None:
        yield Finding("estimate", GOOD, f"{flops / 1e12:,.3g} TFLOP a step; n/a on a device whose peak is not known")
        return
    step_s = flops / (ASSUMED_MFU * peak * ranks)
    lost = min(training.save_interval, stop_step) * step_s
    text = f"about {format_duration(stop_step * step_s)} at {ASSUMED_MFU:.0%} MFU; a crash costs up to "
    yield Finding("estimate", NOTICE if lost > DAY_S / 4 else GOOD, text + format_duration(lost))
