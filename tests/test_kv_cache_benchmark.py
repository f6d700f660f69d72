"""scripts/kv_cache_benchmark.py as typed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
QUICK = ["--decode-context", "160", "--decode-tokens", "4"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/kv_cache_benchmark.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_json_holds_the_published_bytes_and_ratios() -> None:
    done = run("--json", *QUICK)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    rows = {row["context"]: row for row in result["cache"]}
    assert rows[4096]["plain_bytes"] == 0.5625 * 2**30
    assert rows[4096]["ratio"] == pytest.approx(1.94, abs=0.005)
    assert rows[131072]["ratio"] == pytest.approx(1.998, abs=0.0005)
    assert rows[4096]["allocated"]
    assert result["decode"]["plain_tokens_per_s"] > 0
    assert result["decode"]["alternating_tokens_per_s"] > 0


def test_typed_plainly_with_a_small_recipe() -> None:
    recipe = [
        "--config",
        "configs/pretrain_gpu_smoke.yaml",
        "--set",
        "model.window_size=16",
        "--set",
        "model.n_layers=2",
    ]
    done = run(*recipe, "--batch-size", "1", "--context", "64", *QUICK)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert "2 layers" in lines[0]
    assert "window 16" in lines[0]
    assert lines[2].split()[-1] == f"{2 * 64 / (64 + 16):.3f}x"
    assert "tokens/s" in lines[3]
    if not torch.cuda.is_available():
        assert len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith("no CUDA device")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--decode-tokens", "200", "--decode-context", "100"], "--decode-tokens is 200"),
        (["--set", "model.n_layers=2"], "name one with --config"),
        (["--batch-size", "0"], "batch-size"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
