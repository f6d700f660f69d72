"""Speed and memory of cleaning, tokenizing and packing on real text, beside tiktoken, tokenizers and datatrove.

    python scripts/bench_pipeline.py --make-corpus /tmp/bench          # once: fetches Debian's documentation, 180 MB
    python scripts/bench_pipeline.py --corpus bench/web.jsonl [--megabytes 50 200] [--datatrove PYTHON] [--json]

Every figure is per core of one process, over the bytes of text that go in; ratios are of figures of one run. For the
comparison with datatrove make an environment of its own:

    python3 -m venv dt && dt/bin/pip install 'datatrove[processing,io]==0.10.1' spacy
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import needs_packages  # noqa: F401
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from shared_data.config.quality import WebRules  # noqa: E402
from shared_data.html import text_of_html  # noqa: E402
from shared_data.measures import LineRules, measure, measure_plainly  # noqa: E402
from shared_data.rules import RuleSetCheck  # noqa: E402
from shared_data.tokenizer import load_tokenizer  # noqa: E402

PACKAGES = (
    "rust-doc", "petsc3.18-doc", "python3.11-doc", "python-scipy-doc", "python-sympy-doc", "python-django-doc",
    "python-pandas-doc", "python-sklearn-doc",
)  # fmt: skip
MEGABYTE = 1_000_000


def make_corpus(folder: Path) -> Path:
    """Fetch and unpack the packages (nothing is installed), and extract their pages in random order."""
    (folder / "packages").mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder / "packages", check=True)
    for package in (folder / "packages").glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, folder / "files"], check=True)
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


def run_measured(command: list[str], environment: dict[str, str]) -> tuple[float, float, float]:
    """Wall-clock seconds, processor seconds and largest resident MB of a command and its children."""
    started = time.perf_counter()
    with open(os.devnull) as nothing, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, env=environment, stdin=nothing, stdout=subprocess.DEVNULL, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            errors.seek(0)
            raise SystemExit(errors.read().decode())
    return time.perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def bench_stages(corpus: Path, n_bytes: int, folder: Path, workers: int) -> dict[str, Any]:
    """Each stage as a command of its own, its start included; the first only makes its input."""
    source = {"id": "web", "weight": 1.0, "files": [str(corpus)], "rules": "web"}
    (folder / "mixture.yaml").write_text(yaml.safe_dump({"name": "bench", "on_shortage": "stop", "sources": [source]}))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found: dict[str, Any] = {}
    for stage in ("download_raw", "clean", "tokenize", "pack_shards"):
        command = [sys.executable, "-m", f"shared_data.scripts.{stage}", "--mixture", str(folder / "mixture.yaml"),
                   "--data-root", str(folder / "data"), "--workers", str(workers)]  # fmt: skip
        wall, cpu, rss = run_measured(command, environment)
        found[stage] = {"seconds": wall, "cpu_seconds": cpu, "rss_mb": rss, "mb_per_s": n_bytes / MEGABYTE / wall}
    ours = [found[stage] for stage in ("clean", "tokenize", "pack_shards")]
    for key in ("seconds", "cpu_seconds"):
        found[key] = sum(own[key] for own in ours)
    found["mb_per_s"] = n_bytes / MEGABYTE / found["seconds"]
    found["mb_per_cpu_s"] = n_bytes / MEGABYTE / found["cpu_seconds"]
    found["rss_mb"] = max(own["rss_mb"] for own in ours)
    report = json.loads((folder / "data" / "state" / "reports" / "clean.json").read_text())["sources"]["web"]
    found["documents"] = {key: report[key] for key in ("read", "kept", "dropped")}
    return found


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


def bench(corpus: Path, sizes: list[float], datatrove: str | None, datatrove_megabytes: float) -> dict[str, Any]:
    """All measurements."""
    found: dict[str, Any] = {"encoders": bench_encoders(corpus), "rules": bench_rules(corpus), "pipeline": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for megabytes in sizes:
            for workers in (1, 2) if megabytes == sizes[-1] else (1,):
                own = folder / f"{megabytes:g}-{workers}"
                own.mkdir()
                n_bytes = cut_corpus(corpus, megabytes, own / "in.jsonl")
                found["pipeline"][f"{megabytes:g} MB, {workers} worker(s)"] = bench_stages(
                    own / "in.jsonl", n_bytes, own, workers
                )
        if datatrove:
            n_bytes = cut_corpus(corpus, datatrove_megabytes, folder / "few.jsonl")
            ours = folder / "few"
            ours.mkdir()
            found["pipeline"]["as datatrove"] = bench_stages(folder / "few.jsonl", n_bytes, ours, 1)
            for words in ("spacy", "white_space"):
                found[f"datatrove, {words}"] = bench_datatrove(datatrove, folder / "few.jsonl", n_bytes, folder, words)
    return found


def show(found: dict[str, Any]) -> None:
    """The measurements as lines of text."""
    for name, value in found["encoders"].items():
        print(f"encoding, {name}: {value:.1f} MB/s")
    for name, value in found["rules"].items():
        print(f"{name}: {value:.1f} MB/s")
    for name, own in found["pipeline"].items():
        stages = ", ".join(f"{stage} {own[stage]['seconds']:.1f}" for stage in ("clean", "tokenize", "pack_shards"))
        print(
            f"pipeline, {name}: {own['mb_per_s']:.1f} MB/s ({own['mb_per_cpu_s']:.1f} per second of processor time), "
            f"{own['rss_mb']:.0f} MB resident; seconds: {stages}; kept {own['documents']['kept']} of "
            f"{own['documents']['read']} documents"
        )
    ours = found["pipeline"].get("as datatrove")
    for name, own in found.items():
        if name.startswith("datatrove"):
            ratio = ours["mb_per_cpu_s"] / own["mb_per_cpu_s"]
            print(
                f"{name}: {own['mb_per_s']:.2f} MB/s, {own['rss_mb']:.0f} MB resident; we are {ratio:.1f} times as fast"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--make-corpus", type=Path, metavar="FOLDER", help="fetch and extract the corpus, and stop")
    parser.add_argument("--corpus", type=Path, help="JSON lines with id and text")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[50, 200], help="sizes of the pipeline's input")
    parser.add_argument("--datatrove", metavar="PYTHON", help="interpreter of an environment with datatrove")
    parser.add_argument("--datatrove-megabytes", type=float, default=10, help="size of the input for the comparison")
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON")
    options = parser.parse_args()
    if options.make_corpus:
        print(make_corpus(options.make_corpus))
    elif options.corpus:
        found = bench(options.corpus, options.megabytes, options.datatrove, options.datatrove_megabytes)
        print(json.dumps(found, indent=2)) if options.json else show(found)
    else:
        parser.error("give --corpus, or --make-corpus once")


if __name__ == "__main__":
    main()
