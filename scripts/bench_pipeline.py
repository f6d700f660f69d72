"""Speed and memory of cleaning, tokenizing, packing and loading on real text, beside tiktoken, tokenizers, datatrove.

    python scripts/bench_pipeline.py --make-corpus bench          # once: fetches Debian's documentation, 230 MB
    python scripts/bench_pipeline.py --corpus bench/web.jsonl [--megabytes N ...] [--datatrove PYTHON] [--json]

Figures are over the bytes of text that go in, medians of --repeats runs that take turns; ratios are of figures of one
run of this command. `per core` divides by seconds of processor time. The start of the stages' processes is measured on
a crumb of text and taken off where that is said. For the comparison with datatrove make an environment of its own:

    python3 -m venv dt && dt/bin/pip install 'datatrove[processing,io]==0.10.1' spacy
"""

import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import needs_packages  # noqa: F401
import typer
import yaml
from debian_packages import fetch_packages

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gpt_oss_lite.options import AsJson, print_json  # noqa: E402
from shared_data.config.quality import WebRules  # noqa: E402
from shared_data.console import run_app  # noqa: E402
from shared_data.errors import UserError  # noqa: E402
from shared_data.html import text_of_html  # noqa: E402
from shared_data.measures import LineRules, measure, measure_plainly  # noqa: E402
from shared_data.rules import RuleSetCheck  # noqa: E402
from shared_data.tokenizer import load_tokenizer  # noqa: E402

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
PACKAGES = (
    "rust-doc", "petsc3.18-doc", "python3.11-doc", "python-scipy-doc", "python-sympy-doc", "python-django-doc",
    "python-pandas-doc", "python-sklearn-doc", "linux-doc-6.1", "cppreference-doc-en-html",
)  # fmt: skip
MEGABYTE = 1_000_000
CRUMB_MEGABYTES = 0.1
CRUMB_CONFIG = {"pipeline": {"task_bytes": 5_000}, "shard_size_tokens": 1_000, "pack": {"long_context": {"share": 0}}}
CHAIN = ("clean", "tokenize", "pack_shards")
WINDOW = 4096
DOCUMENTS = 32  # at the least: the slowest encoder gets a quarter of an eighth of them


def make_corpus(folder: Path) -> Path:
    """Fetch and unpack the packages (nothing is installed), and extract their pages in random order."""
    fetch_packages(folder, PACKAGES)
    pages = [path for path in sorted((folder / "files").rglob("*.html")) if not path.is_symlink()]
    random.Random(1).shuffle(pages)
    corpus = folder / "web.jsonl"
    with open(corpus, "w") as file:
        for page in pages:
            if page.stat().st_size < 3 * MEGABYTE and (text := text_of_html(page.read_text(errors="replace"))):
                name = str(page.relative_to(folder / "files"))
                file.write(json.dumps({"id": name, "text": text}, ensure_ascii=False) + "\n")
    return corpus


def cut_corpus(corpus: Path, megabytes: float, target: Path) -> int:
    """Write the first megabytes of a corpus; returns the bytes of text."""
    n_bytes = 0
    with open(corpus, "rb") as lines, open(target, "wb") as file:
        for line in lines:
            file.write(line)
            n_bytes += len(json.loads(line)["text"].encode())
            if n_bytes >= megabytes * MEGABYTE:
                break
    return n_bytes


def texts_of(corpus: Path, megabytes: float) -> Iterator[str]:
    """The texts of the first megabytes."""
    left = megabytes * MEGABYTE
    with open(corpus, "rb") as lines:
        for line in lines:
            text = json.loads(line)["text"]
            left -= len(text.encode())
            yield text
            if left < 0:
                return


def check_corpus(corpus: Path) -> None:
    """See that a corpus has what the measurements need.

    Raises:
        UserError: it has not.
    """
    try:
        found = sum(1 for _ in islice(texts_of(corpus, math.inf), DOCUMENTS))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"--corpus {corpus}: a line is no JSON object with a text") from None
    if found < DOCUMENTS:
        raise UserError(f"--corpus {corpus} holds {found} documents: it must have at least {DOCUMENTS}")


def rate(action: Callable[[str], object], texts: list[str]) -> float:
    """MB/s of processor time, the best of three after a first text that loads what is needed."""
    action(texts[0])
    seconds = []
    for _ in range(3):
        started = time.process_time()
        for text in texts:
            action(text)
        seconds.append(time.process_time() - started)
    return sum(len(text.encode()) for text in texts) / MEGABYTE / min(seconds)


def bench_encoders(corpus: Path) -> dict[str, float]:
    """MB/s of each encoder alone, one core."""
    texts = list(texts_of(corpus, 20))
    fast, reference = load_tokenizer(encoder="auto"), load_tokenizer()
    few = texts[: len(texts) // 8]
    return {
        fast.encoder.name: rate(fast.encode_array, texts),
        reference.encoder.name: rate(reference.encode_array, few),
        "tokenizers": rate(huggingface_tokenizer().encode, few[: len(few) // 4]),
    }


def huggingface_tokenizer(target: Path | None = None) -> Any:
    """LLaMA-3's tokenizer as a tokenizer.json, made by transformers."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    from shared_data.tokenizer import _NAMED_CONTROL_TOKENS, _SPLIT_PATTERN, llama3_rank_file

    converter = TikTokenConverter(
        str(llama3_rank_file()), pattern=_SPLIT_PATTERN, extra_special_tokens=list(_NAMED_CONTROL_TOKENS)
    )
    tokenizer = converter.converted()
    if target:
        tokenizer.save(str(target))
    return tokenizer


def bench_rules(corpus: Path) -> dict[str, float]:
    """MB/s of the web rules alone: the compiled pass with the rules, and the plain functions."""
    texts = list(texts_of(corpus, 20))
    lines = LineRules(1000, 3, False, True)
    return {
        "web rules": rate(RuleSetCheck(WebRules()), texts),
        "counting": rate(lambda text: measure(text, lines, 30), texts),
        "counting, plain functions": rate(lambda text: measure_plainly(text, lines, 30), texts[: len(texts) // 40]),
    }


# A process begins with the peak memory of the one that started it: a small one stands in between.
LAUNCHER = """
import json, os, subprocess, sys, time
started = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(json.dumps([time.perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024]))
sys.exit(os.waitstatus_to_exitcode(status) != 0)
"""


def run_measured(command: list[str], environment: dict[str, str]) -> tuple[float, float, float]:
    """Wall-clock seconds, processor seconds and largest resident MB of a command and its children."""
    launcher = [sys.executable, "-S", "-c", LAUNCHER, *command]
    ran = subprocess.run(launcher, env=environment, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(ran.stderr)
    wall, cpu, rss = json.loads(ran.stdout)
    return wall, cpu, rss


def bench_stages(corpus: Path, n_bytes: int, folder: Path, workers: int) -> dict[str, Any]:
    """Each stage as a command of its own, its start included; the first only makes its input."""
    source = {"id": "web", "weight": 1.0, "files": [str(corpus)], "rules": "web"}
    (folder / "mixture.yaml").write_text(yaml.safe_dump({"name": "bench", "on_shortage": "stop", "sources": [source]}))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found: dict[str, Any] = {"megabytes": n_bytes / MEGABYTE}
    for stage in ("download_raw", *CHAIN):
        command = [sys.executable, "-m", f"shared_data.scripts.{stage}", "--mixture", str(folder / "mixture.yaml"),
                   "--data-config", str(folder / "data_config.yaml"), "--data-root", str(folder / "data"),
                   "--workers", str(workers)]  # fmt: skip
        wall, cpu, rss = run_measured(command, environment)
        found[stage] = {"seconds": wall, "cpu_seconds": cpu, "rss_mb": rss}
    for key in ("seconds", "cpu_seconds"):
        found[key] = sum(found[stage][key] for stage in CHAIN)
    found["rss_mb"] = max(found[stage]["rss_mb"] for stage in CHAIN)
    report = json.loads((folder / "data" / "state" / "reports" / "clean.json").read_text())["sources"]["web"]
    found["documents"] = {key: report[key] for key in ("read", "kept", "dropped")}
    return found


def median_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Some runs of one measurement as one: medians of times, the largest of memory."""
    found = {**runs[0], "rss_mb": max(run["rss_mb"] for run in runs)}
    for key in ("seconds", "cpu_seconds"):
        found[key] = statistics.median(run[key] for run in runs)
    for stage in CHAIN:
        found[stage] = {key: statistics.median(run[stage][key] for run in runs) for key in runs[0][stage]}
    return found


def bench_chain(corpus: Path, sizes: list[float], repeats: int, folder: Path) -> dict[str, Any]:
    """The stages on the sizes by one worker, and on the largest by two; their start, taken off, is that on a crumb."""
    sized = {f"{megabytes:g} MB, 1 worker": (megabytes, 1) for megabytes in sizes}
    cases = {"start 1": (CRUMB_MEGABYTES, 1), "start 2": (CRUMB_MEGABYTES, 2), **sized}
    cases[f"{sizes[-1]:g} MB, 2 workers"] = (sizes[-1], 2)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    for repeat in range(repeats):
        for number, (name, (megabytes, workers)) in enumerate(cases.items()):
            own = folder / f"{number}-{repeat}"
            own.mkdir()
            n_bytes = cut_corpus(corpus, megabytes, own / "in.jsonl")
            # A crumb is cut too, so that two workers start for it.
            config = CRUMB_CONFIG if megabytes == CRUMB_MEGABYTES else {}
            (own / "data_config.yaml").write_text(yaml.safe_dump({"seed": 42, **config}))
            runs[name].append(bench_stages(own / "in.jsonl", n_bytes, own, workers))
            if repeat < repeats - 1 or megabytes != sizes[-1]:
                shutil.rmtree(own)
    found = {name: median_of(repeated) for name, repeated in runs.items()}
    starts = {workers: found.pop(f"start {workers}") for workers in (1, 2)}
    for name, figures in found.items():
        start = starts[cases[name][1]]
        figures["start"] = {key: start[key] for key in ("seconds", "cpu_seconds")}
        for stage in CHAIN:
            figures[stage]["start_cpu_seconds"] = start[stage]["cpu_seconds"]
        figures["mb_per_s"] = figures["megabytes"] / (figures["seconds"] - start["seconds"])
        figures["mb_per_cpu_s"] = figures["megabytes"] / (figures["cpu_seconds"] - start["cpu_seconds"])
        figures["mb_per_cpu_s_with_start"] = figures["megabytes"] / figures["cpu_seconds"]
    return found


def bench_loader(folder: Path) -> dict[str, float]:
    """Tokens per second of one process that reads windows of a packed corpus in a run's random order."""
    import torch
    from torch.utils.data import DataLoader

    from gpt_oss_lite.training.data_order import MicroBatchSampler
    from gpt_oss_lite.training.dataset import PretrainDataset

    torch.set_num_threads(1)
    dataset = PretrainDataset(folder, WINDOW, 128_256)
    loader = iter(DataLoader(dataset, batch_sampler=MicroBatchSampler(dataset.order(1), 0, 8), num_workers=0))
    next(loader)
    steps = 2 * len(dataset) // 8
    started, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        next(loader)
    tokens = steps * 8 * WINDOW
    return {
        "corpus_tokens": dataset.total_tokens,
        "tokens_per_s": tokens / (time.perf_counter() - started),
        "tokens_per_cpu_s": tokens / (time.process_time() - cpu),
    }


def bench_datatrove(python: str, corpus: Path, n_bytes: int, folder: Path, words: str) -> dict[str, Any]:
    """datatrove with the same rules and tokenizer on the same file."""
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.exists():
        huggingface_tokenizer(tokenizer)
    command = [
        python,
        str(ROOT / "scripts" / "bench_datatrove.py"),
        str(corpus),
        str(folder / f"dt-{words}"),
        str(tokenizer),
        words,
    ]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(ran.stderr[-3000:])
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    found["mb_per_s"] = n_bytes / MEGABYTE / found["seconds"]
    found["mb_per_cpu_s"] = n_bytes / MEGABYTE / found["cpu_seconds"]
    return found


class Options(NamedTuple):
    """See `main`."""

    megabytes: list[float]
    datatrove: str | None
    datatrove_megabytes: float
    repeats: int
    scratch: Path | None


def bench(corpus: Path, options: Options) -> dict[str, Any]:
    """All measurements."""
    found: dict[str, Any] = {"encoders": bench_encoders(corpus), "rules": bench_rules(corpus)}
    with tempfile.TemporaryDirectory(dir=options.scratch) as name:
        folder = Path(name)
        found["chain"] = bench_chain(corpus, options.megabytes, options.repeats, folder)
        [packed, *_] = sorted(folder.glob("*/data/pretrain_chinchilla"))
        found["loader"] = bench_loader(packed)
        if options.datatrove:
            few = folder / "few.jsonl"
            n_bytes = cut_corpus(corpus, options.datatrove_megabytes, few)
            (folder / "few").mkdir()
            found["as datatrove"] = bench_chain(few, [options.datatrove_megabytes], options.repeats, folder / "few")
            found["datatrove"] = {
                words: bench_datatrove(options.datatrove, few, n_bytes, folder, words)
                for words in ("spacy", "white_space")
            }
    return found


def show(found: dict[str, Any]) -> None:
    """The measurements as tables of Markdown."""
    print("| alone, one core | MB/s |\n|---|---|")
    for kind in ("encoders", "rules"):
        for name, value in found[kind].items():
            print(f"| {name} | {value:.1f} |")
    columns = ("clean, tokenize, pack", "MB of text", "MB/s per core", "with the start of 3 processes",
               "seconds by the clock", "peak RSS", "of the core's time: clean, tokenize, pack")  # fmt: skip
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, own in found["chain"].items():
        parts = [own[stage]["cpu_seconds"] - own[stage]["start_cpu_seconds"] for stage in CHAIN]
        shares = ", ".join(f"{part / sum(parts):.0%}" for part in parts)
        clock = own["seconds"] - own["start"]["seconds"]
        print(f"| {name} | {own['megabytes']:.1f} | {own['mb_per_cpu_s']:.1f} | {own['mb_per_cpu_s_with_start']:.1f} "
              f"| {clock:.1f} | {own['rss_mb']:.0f} MB | {shares} |")  # fmt: skip
    *_, one, two = found["chain"].values()
    with_start = one["seconds"] / two["seconds"]
    print(f"\n1 -> 2 workers: {two['mb_per_s'] / one['mb_per_s']:.2f}x by the clock ({with_start:.2f}x with the start)")
    first, *_ = found["chain"].values()
    growth = one["rss_mb"] / first["rss_mb"]
    print(f"peak RSS, {first['megabytes']:.0f} MB -> {one['megabytes']:.0f} MB: {growth:.3f}x")
    documents = one["documents"]
    print(f"documents: kept {documents['kept']:,} of {documents['read']:,}; dropped: {documents['dropped']}")
    loader = found["loader"]
    clock, core = loader["tokens_per_s"] / 1e6, loader["tokens_per_cpu_s"] / 1e6
    size = f"{loader['corpus_tokens']:,} tokens"
    print(f"loader, random order, one process: {clock:.0f} M tokens/s by the clock, {core:.0f} per core ({size})")
    if "datatrove" in found:
        ours, _ = found["as datatrove"].values()
        print(f"\n| {ours['megabytes']:.0f} MB, rules and tokens | MB/s per core | peak RSS | we are faster by |")
        print("|---|---|---|---|")
        for name, own in found["datatrove"].items():
            ratio = ours["mb_per_cpu_s"] / own["mb_per_cpu_s"]
            print(f"| datatrove 0.10.1, {name} | {own['mb_per_cpu_s']:.2f} | {own['rss_mb']:.0f} MB | {ratio:.1f}x |")
        print(f"| ours, with duplicates and packing | {ours['mb_per_cpu_s']:.1f} | {ours['rss_mb']:.0f} MB | |")


@app.command()
def main(
    fetch_into: Annotated[
        Path | None, typer.Option("--make-corpus", metavar="FOLDER", help="Fetch and extract the corpus, and stop.")
    ] = None,
    corpus: Annotated[Path | None, typer.Option(metavar="FILE", help="JSON lines with id and text.")] = None,
    megabytes: Annotated[
        list[float] | None, typer.Option(min=0.1, help="Size of the input; may be repeated. Default: 50 and 200.")
    ] = None,
    datatrove: Annotated[
        str | None, typer.Option(metavar="PYTHON", help="Interpreter of an environment with datatrove.")
    ] = None,
    datatrove_megabytes: Annotated[float, typer.Option(min=0.1, help="Size of the input for the comparison.")] = 30,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of the stages, of which the medians count.")] = 3,
    scratch: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where files lie meanwhile, some 2 GB. Default: the system's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure speed and memory of the pipeline on real text."""
    if fetch_into is not None:
        print(make_corpus(fetch_into))
        return
    if corpus is None:
        raise UserError("--corpus is missing: name a file of JSON lines (--make-corpus FOLDER makes one, once)")
    if not corpus.is_file():
        raise UserError(f"--corpus {corpus}: there is no such file; --make-corpus FOLDER makes one")
    if scratch is not None and not scratch.is_dir():
        raise UserError(f"--scratch {scratch}: there is no such folder")
    if datatrove is not None and shutil.which(datatrove) is None:
        raise UserError(f"--datatrove {datatrove}: there is no such program")
    check_corpus(corpus)
    found = bench(corpus, Options(megabytes or [50, 200], datatrove, datatrove_megabytes, repeats, scratch))
    print_json(found) if as_json else show(found)


if __name__ == "__main__":
    sys.exit(run_app(app, prog_name="bench_pipeline.py"))
