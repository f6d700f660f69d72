"""The commands that a reader of the description types from the repository's root, each in a process of its own.

What would take hours here runs with `--set` or `--total-tokens` sizes that keep the structure; the rest is as typed.
"""

import importlib.util
import json
import shutil
from pathlib import Path

import command_line
import pytest
import tiny_run
import torch

from shared_data.console import run_app
from shared_data.errors import UserError

ROOT = Path(__file__).parents[1]
FULL, SMOKE = "configs/pretrain_a100_502m.yaml", "configs/pretrain_gpu_smoke.yaml"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return command_line.write_text_corpus(tmp_path_factory.mktemp("data") / "pretrain_chinchilla")


def load(script: str):
    """A script as a module, for what needs no process of its own."""
    spec = importlib.util.spec_from_file_location(script, ROOT / "scripts" / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def succeed(*words, **options):
    result = command_line.run(*words, **options)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result


def test_prepare_data_and_its_shorter_ways(tmp_path):
    """The stage options work on what the stages before have left; the corpus is the same each time."""
    text = "\n".join(
        json.dumps({"text": f"Document {number}. " + "Some words about it. " * 20}) for number in range(80)
    )
    (tmp_path / "web.jsonl").write_text(text)
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text(f"name: tiny\nsources: [{{id: web, weight: 1.0, files: [{tmp_path}/web.jsonl]}}]\n")
    command = ["python", "data/prepare_data.py", "--stage", "pretrain", "--mixture", mixture, "--total-tokens", "5000"]
    manifest = tmp_path / "data/pretrain_chinchilla/manifest.json"
    for ways in (
        ["--source", "web"],
        ["--skip-download"],
        ["--skip-download", "--skip-clean"],
        ["--skip-download", "--skip-clean", "--skip-tokenize"],
    ):
        manifest.unlink(missing_ok=True)
        succeed(*command, *ways, LLM_DATA_ROOT=str(tmp_path / "data"))
        assert json.loads(manifest.read_text())["total_tokens"] >= 5000


def test_pretrain_and_resume_the_full_recipe(corpus, tmp_path):
    small = command_line.settings(train_data_path=str(corpus), data_mix="null")
    command = ["python", "training/pretrain.py", "--config", FULL, "--seed", "42", *small, "--out", tmp_path / "run"]
    stopped = succeed(*command, "--max-steps", "2")
    assert "[model] total params:" in stopped.stderr
    assert "done: 2 steps" in stopped.stderr
    resumed = succeed(*command, "--resume-from", "2")
    assert "from step 2" in resumed.stderr
    assert "done: 4 steps" in resumed.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


def test_the_smoke_recipe_as_it_is(corpus, tmp_path):
    """More steps than its schedule has: --max-steps is the stopping step, and the floor is held."""
    result = succeed("python", "training/pretrain.py", "--config", SMOKE, "--max-steps", "10", "--seed", "0",
                     "--set", f"data.train_data_path={corpus}", "--out", tmp_path / "run")  # fmt: skip
    assert "done: 10 steps" in result.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["tokens"] == 10 * 128
    assert rows[-1]["lr"] == pytest.approx(0.05 * 4e-4)


def test_the_dataset_line(tmp_path):
    data = command_line.write_text_corpus(tmp_path / "pretrain_chinchilla", n_texts=800)
    line = "from training.pretrain import PretrainDataset; d=PretrainDataset('data/pretrain_chinchilla', 4096); "
    result = succeed("python", "-c", line + "print(len(d), d[0][0].shape)", LLM_DATA_ROOT=str(data.parent))
    manifest = json.loads((data / "manifest.json").read_text())
    assert result.stdout == f"{(manifest['total_tokens'] - 1) // 4096} torch.Size([4096])\n"


def test_microbench_without_a_gpu_says_so_and_counts(monkeypatch, capsys):
    command = ["python", "scripts/microbench_a100.py", "--config", FULL, "--batch-size", "8", "--seq-len", "4096"]
    result = succeed(*command, CUDA_VISIBLE_DEVICES="")
    assert result.stderr.splitlines()[0].startswith("no CUDA device: ")
    assert "502,033,248 parameters" in result.stdout
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_app(load("microbench_a100").app, [*command[2:], "--threshold-gb", "25.0", "--json"]) == 0
    as_json = json.loads(capsys.readouterr().out)
    assert as_json["logits_chunk_bytes"] == 8192 * 128256 * 2
    assert as_json["whole_logits_bytes"] == 32768 * 128256 * 2
    assert as_json["estimate_gb"] == pytest.approx(sum(as_json["estimate_bytes"].values()) / 1e9)
    assert as_json["within_threshold"] == (as_json["estimate_gb"] <= 25.0)
    assert "peak_gb" not in as_json


def test_memory_benchmark_without_a_gpu_prints_the_estimates():
    result = succeed("python", "scripts/bench_memory.py", "--json", CUDA_VISIBLE_DEVICES="")
    rows = {row["setting"]: row for row in json.loads(result.stdout)["results"]}
    assert len(rows) == 8
    described = rows["pretrain_a100_502m, micro-batch 8, every 3 recomputed"]
    assert described["estimate_gb"] < 25.0
    assert "peak_gb" not in described


def test_memory_benchmark_of_layouts_estimates_one_of_several_ranks():
    result = succeed("python", "scripts/bench_memory.py", "--layouts", "--json", CUDA_VISIBLE_DEVICES="")
    rows = {row["setting"]: row for row in json.loads(result.stdout)["results"]}
    settings = ["training.parallelism=fsdp", "training.micro_batch_size=8", "training.gradient_accumulation_steps=16",
                "training.grad_checkpoint=false"]  # fmt: skip
    words = [word for setting in settings for word in ("--set", setting)]
    told = succeed("gpt-oss-lite", "estimate", "--config", FULL, "--ranks", "8", *words, "--json")
    shared = rows["pretrain_a100_502m, fsdp of 8, micro-batch 8, none recomputed"]
    assert shared["estimate_gb"] == pytest.approx(sum(json.loads(told.stdout)["bytes"].values()) / 1e9)


def test_e2e_smoke_without_a_gpu_says_so_and_checks_the_same():
    result = succeed("python", "scripts/e2e_gpu_smoke.py", CUDA_VISIBLE_DEVICES="")
    assert result.stderr.splitlines()[0].startswith("no CUDA device: ")
    assert "backend=reference+reference  passed=True" in result.stdout
    assert result.stdout.splitlines()[-1].endswith(", 0 failed")


@pytest.mark.parametrize(
    "words",
    [["bench_peers.py"], ["compare_paths.py", "--config", FULL, "--data", "data"], ["bench_scaling.py"],
     ["bench_scaling.py", "--config", FULL, "--set", "training.micro_batch_size=1"]],
)  # fmt: skip
def test_what_is_only_for_a_gpu_says_so_in_one_line(words):
    """bench_scaling runs small recipes on the CPU: the described one is 1,603,584,000 FLOP a token."""
    result = command_line.run("python", f"scripts/{words[0]}", *words[1:], CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 2
    assert result.stderr.startswith("error: no CUDA device")
    assert result.stderr.count("\n") == 1
    if words == ["bench_scaling.py"]:
        assert "pretrain_h200_502m.yaml is 210 TFLOP" in result.stderr  # 131,072 tokens a step
    assert result.stdout == ""


def test_e2e_smoke_fails_when_a_check_does(monkeypatch, capsys):
    """A rate at which nothing moves: the loss does not fall, and the exit code says so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_app(load("e2e_gpu_smoke").app, ["--json", "--set", "training.lr=1e-30"]) == 1
    assert not any(check["passed"] for check in json.loads(capsys.readouterr().out)["results"])


@pytest.fixture
def tiny_recipe(tmp_path):
    return tiny_run.write_recipe(tmp_path / "recipe.yaml", tiny_run.make_corpus(tmp_path / "corpus"))


def test_scaling_is_measured_on_ranks_that_torchrun_starts(tiny_recipe):
    """On the CPU: each alone, two together twice, a profile. No two processes are a thousand times one."""
    words = ["--config", tiny_recipe, "--steps", "1", "--each", "--at-least", "1000", "--json"]
    result = command_line.run("python", "scripts/bench_scaling.py", *words, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 1, result.stderr
    assert result.stderr.startswith("no CUDA device: ")
    measured = json.loads(result.stdout)
    rows = measured["rows"]
    assert [(row["ranks"], row["micro_batch_size"], row["accumulation"]) for row in rows] == [
        (1, 2, 2), (1, 2, 2), (2, 2, 4), (2, 2, 2)]  # fmt: skip
    assert [row["tokens_per_step"] for row in rows] == [64, 64, 128, 64]
    assert [row["gpu"] for row in rows[:2]] == [0, 1]
    alone = (rows[0]["tokens_per_s"] + rows[1]["tokens_per_s"]) / 2
    assert [rows[0]["ratio"], *(row["ratio"] * alone for row in rows[1:])] == pytest.approx(
        [1, *(row["tokens_per_s"] for row in rows[1:])]
    )
    assert all(len(row["readings"]) == 3 and row["tokens_per_s"] > 0 for row in rows)
    assert 0 < measured["exchange"]["exposed_s"] <= measured["exchange"]["exchange_s"] <= measured["exchange"]["step_s"]


def test_scaling_says_in_one_line_what_failed(tiny_recipe):
    command = ["python", "scripts/bench_scaling.py", "--config", tiny_recipe]
    uneven = command_line.run(*command, "--ranks", "3", CUDA_VISIBLE_DEVICES="")
    assert uneven.returncode == 2
    assert "--ranks is 3: it must divide the 4 windows of the recipe's step" in uneven.stderr.splitlines()[-1]
    failing = command_line.run(*command, "--set", "training.mirror=nosuch://x", CUDA_VISIBLE_DEVICES="")
    assert failing.returncode == 1
    assert failing.stderr.splitlines()[-1].startswith("the run failed: error: ")
    assert "nosuch" in failing.stderr.splitlines()[-1]


def test_scaling_says_how_a_run_ended_that_says_no_error():
    reason_of = load("bench_scaling").reason_of
    log = "[run] r\n[memory] a step is estimated at 85 GB\n\n"
    assert reason_of(1, f"{log}error: no room\nerror: later\n") == "error: no room"
    assert reason_of(-9, log).startswith("killed by SIGKILL (the kernel does so where memory runs out), after: ")
    assert reason_of(3, "") == "exit code 3, after: nothing"


def test_exchange_is_exposed_where_nothing_else_runs():
    """Two steps of 100 us: products to 60, exchange from 40 to 90, of which 20 beside a product."""
    events = [{"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{n}", "ts": 0, "dur": 5, "tid": 1}
              for n in (3, 4)]  # fmt: skip
    for start in (1000, 1100):
        for name, at, duration in (("gemm", 0, 60), ("ncclDevKernel_AllReduce", 40, 30), ("ncclDevKernel_AllReduce",
                                   60, 30), ("adamw", 95, 5)):  # fmt: skip
            events.append({"ph": "X", "cat": "kernel", "name": name, "ts": start + at, "dur": duration, "tid": 7})
    events.append({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 900, "dur": 500, "tid": 1})
    found = load("bench_scaling").exchange_of(events)
    assert found == pytest.approx({"step_s": 100e-6, "exchange_s": 50e-6, "exposed_s": 30e-6})


@pytest.mark.parametrize(
    "words",
    [
        ["tests/test_training.py", "tests/test_validation.py", "-v"],
        ["tests/test_training.py", "-v", "-k", "PretrainDataset"],
        ["tests/test_data_pipeline.py", "-v"],
    ],
)
def test_the_test_files_that_the_description_names_hold_tests(words):
    """They run as a part of this suite; here it counts that the command finds some."""
    result = succeed("python", "-m", "pytest", *words, "--collect-only")
    assert "tests collected" in result.stdout


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="not a Debian")
def test_a_package_that_cannot_be_fetched_is_one_line_after_what_the_tool_says(tmp_path):
    with pytest.raises(UserError, match=r"^apt-get download ended with exit code \d+ in "):
        load("debian_packages").fetch_packages(tmp_path, ["no-such-package-anywhere"])


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "scripts").glob("*.py")))
def test_a_wrong_option_of_a_script_is_one_line(script):
    if "run_app" not in (ROOT / "scripts" / script).read_text():
        return  # a helper module, not a command
    result = command_line.run("python", f"scripts/{script}", "--no-such-option")
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


# The words of a command that cannot work -> the start of what it says.
WRONG_WORDS = {
    "bench_datatrove.py": "it takes INPUT.jsonl OUTPUT_FOLDER TOKENIZER.json",
    "bench_datatrove.py none.jsonl out none.json": "none.jsonl: there is no such file",
    "bench_datatrove.py none.jsonl out none.json latin": "latin: it must be spacy or white_space",
    "bench_datatrove.py README.md out README.md": "datatrove is not installed here",
    "bench_pipeline.py": "--corpus is missing",
    "bench_pipeline.py --corpus none.jsonl": "--corpus none.jsonl: there is no such file",
    "bench_pipeline.py --corpus README.md --scratch none": "--scratch none: there is no such folder",
    "bench_pipeline.py --corpus README.md --datatrove none": "--datatrove none: there is no such program",
    "bench_pipeline.py --corpus README.md": "--corpus README.md: a line is no JSON object with a text",
    "bench_pipeline.py --corpus README.md --repeats 0": "Invalid value for '--repeats'",
    "bench_saving.py --folder none": "--folder none: there is no such folder",
    "bench_saving.py --parameters inf": "Invalid value for '--parameters'",
    "bench_saving.py --saves 0": "Invalid value for '--saves'",
    "compare_paths.py --config none": "Missing option '--data'",
    "demo.py --set training.lr=-1": "--set training.lr=-1: training.lr is -1: it must be greater than 0",
    "learning_questions.py --checkpoint none --questions none --out none": "none: No such file or directory",
    "learning_questions.py --checkpoint none --questions README.md --out none": "--questions README.md is not JSON",
    "torture.py --folder none --kills 1 --fuzz 0 --no-faults": "--folder none: there is no such folder",
}


@pytest.mark.parametrize("words", WRONG_WORDS)
def test_words_that_cannot_work_are_one_line(words):
    result = command_line.run("python", *f"scripts/{words}".split(), CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {WRONG_WORDS[words]}")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_corpus_of_too_few_documents_is_refused_before_anything_is_measured(tmp_path):
    corpus = tmp_path / "few.jsonl"
    for n_documents in (0, 31):
        corpus.write_text('{"id": "a", "text": "b"}\n' * n_documents)
        with pytest.raises(UserError, match=rf"few\.jsonl holds {n_documents} documents: .* 32"):
            load("bench_pipeline").check_corpus(corpus)
    corpus.write_text('{"id": "a", "text": "b"}\n' * 32)
    load("bench_pipeline").check_corpus(corpus)


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "scripts").glob("*.py")))
def test_a_python_without_the_packages_says_what_to_do(script):
    if script == "bench_datatrove.py" or '__name__ == "__main__"' not in (ROOT / "scripts" / script).read_text():
        return  # for an environment of its own; a helper module, not a command
    result = command_line.run("python", "-S", f"scripts/{script}", "--help", PYTHONPATH="")  # -S: no site-packages
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "`make venv`" in result.stderr
