"""`gpt-oss-lite plan`: the largest recipe in time, as a command that a run accepts."""

import json
import re
import shlex
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from gpt_oss_lite import cli
from gpt_oss_lite.config import load_recipe
from gpt_oss_lite.training.cluster import Cluster
from gpt_oss_lite.training.ladder import LADDER, PARALLELISM, layouts, propose
from gpt_oss_lite.training.layout import Layout, check_split
from gpt_oss_lite.training.memory import estimate_recipe
from shared_data.console import run_app

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"


def plan(*words: object) -> int:
    return run_app(cli.app, ["plan", *map(str, words)], prog_name="gpt-oss-lite")


@pytest.mark.parametrize(
    ("gpus", "hours", "recipe"),
    [
        (64, 72, "pretrain_7b"),  # 113 B tokens x 10.07 GFLOP on 64 x 459 TFLOP/s are 10.8 h
        (1, 72, "pretrain_1_5b"),  # 24.1 B x 4.17 GFLOP on one are 61 h
        (1, 24, "pretrain_a100_502m"),  # 8.0 B x 1.60 GFLOP are 7.8 h
        (1, 7, "pretrain_150m"),
        (8, 72, "pretrain_1_5b"),  # the 7B one takes 8 times as long as on 64
        (8, 120, "pretrain_7b"),
    ],
)
def test_the_largest_recipe_in_time(gpus, hours, recipe):
    found = propose(Cluster(gpus=gpus), hours)
    assert found.recipe == recipe
    assert found.hours <= hours
    assert found.gpus <= gpus


@pytest.mark.parametrize("name", LADDER)
def test_each_rung_fits_on_some_gpus_and_the_launch_line_says_what_was_estimated(name):
    """The overrides make a recipe whose estimate is the proposal's and whose micro-batches the ranks can share."""
    recipe = load_recipe(CONFIGS / f"{name}.yaml")
    proposals = list(layouts(name, Cluster(gpus=16)))
    assert {found.gpus for found in proposals} >= {8, 16}
    for found in proposals:
        words = shlex.split(found.launch)
        overrides = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
        launched = load_recipe(words[words.index("--config") + 1], overrides)
        layout = Layout(found.gpus, launched.training.parallelism if found.gpus > 1 else "ddp")
        assert estimate_recipe(launched, layout=layout).items == found.memory
        assert found.memory_gb <= 0.95 * 80
        check_split(launched.training, found.gpus)
        windows = recipe.training.micro_batch_size * recipe.training.gradient_accumulation_steps
        assert found.gpus * found.micro_batch_size * found.accumulation == windows


@pytest.mark.parametrize("name", ["pretrain_150m", "pretrain_1_5b"])
def test_the_head_of_a_rung_says_its_estimate(name):
    path = CONFIGS / f"{name}.yaml"
    (said,) = re.findall(r"^# .*Estimate: ([\d.]+) GB", path.read_text(), re.MULTILINE)
    assert said == f"{estimate_recipe(load_recipe(path)).total_gb:.1f}"


def test_only_shards_hold_the_7b_model_on_80_gb():
    found = list(layouts("pretrain_7b", Cluster(gpus=64)))
    assert {one.parallelism for one in found} == {"fsdp"}
    assert min(one.gpus for one in found) == 2  # 57 of 76 GB are their halves of the state
    assert {one.parallelism for one in layouts(LADDER[1], Cluster(gpus=8))} == set(PARALLELISM)


def test_gpus_that_would_wait_for_their_hosts_are_not_taken():
    """The 150M step is one micro-batch of 16 windows, and a smaller one launches as many kernels."""
    found = propose(Cluster(gpus=512), 1.2)
    assert (found.recipe, found.gpus) == ("pretrain_150m", 1)


def test_the_command_prints_recipe_layout_step_speed_time_memory_and_launch(capsys):
    assert plan("--gpus", 64, "--hours", 72) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line for line in out.splitlines() if line and not line.startswith(" ")}
    assert list(lines) == ["recipe", "layout", "step", "speed", "time", "memory", "launch", "The"]
    assert "7,134,107,584 parameters" in lines["recipe"]
    assert "FSDP" in lines["layout"]
    assert "64 GPUs" in lines["layout"]
    launch = get_args_parser().parse_args(shlex.split(lines["launch"])[2:])  # torchrun's own
    assert (launch.nnodes, launch.nproc_per_node, launch.rdzv_endpoint) == ("8", "8", "$FIRST_NODE:29500")
    assert (launch.module, launch.training_script, launch.training_script_args[:3]) == (
        True, "gpt_oss_lite", ["pretrain", "--config", "pretrain_7b"])  # fmt: skip
    assert "not measured" in lines["The"]
    assert "one H200" in lines["The"]


def test_a_card_is_planned_for_with_its_own_memory(capsys):
    assert plan("--gpus", 1, "--hours", 100, "--gpu", "NVIDIA GeForce RTX 4090") == 0
    assert "of 24 GB on each GPU" in capsys.readouterr().out
    assert plan("--gpus", 1, "--hours", 100, "--gpu", "NVIDIA GeForce RTX 4090", "--gpu-gb", 48, "--json") == 0
    assert 24 < json.loads(capsys.readouterr().out)["memory_gb"] <= 48


def test_as_json(capsys):
    assert plan("--gpus", 1, "--hours", 9, "--gpu", "NVIDIA H200", "--gpu-gb", 141, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["recipe"] == "pretrain_a100_502m"
    assert result["tokens"] == 7_995_392_000
    assert result["tokens_per_s"] == pytest.approx(286_000, rel=0.002)  # as measured
    assert result["hours"] == pytest.approx(7_995_392_000 / 286_000 / 3600, rel=0.002)
    assert sum(result["memory"].values()) == pytest.approx(1e9 * result["memory_gb"])
    assert result["launch"].startswith(
        "gpt-oss-lite pretrain --config pretrain_a100_502m --out runs/pretrain_a100_502m "
    )
    assert "parallelism=" not in result["launch"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", 0, "--hours", 1], "'--gpus': '0' should be greater than or equal to 1"),
        (["--gpus", 8], "Missing option '--hours'"),
        (["--gpus", 8, "--hours", 0], "--hours is 0: it must be finite and greater than 0"),
        (["--gpus", 8, "--hours", "nan"], "--hours is nan: it must be finite"),
        (["--gpus", 8, "--hours", "inf"], "--hours is inf: it must be finite"),
        (["--gpus", 8, "--hours", 9, "--gpu-gb", -1], "--gpu-gb is -1: it must be finite"),
        (["--gpus", 8, "--hours", 9, "--network-gbit", 0], "--network-gbit is 0: it must be finite"),
        (["--gpus", 8, "--hours", 9, "--gpus-per-node", 0], "'--gpus-per-node': '0' should be greater"),
        (["--gpus", 8, "--hours", 9, "--gpu", "H20"], "--gpu is H20: its peak is not known"),
        (["--gpus", 8, "--hours", 9, "--gpu", "A100 PCIe"], "--gpu is A100 PCIe: its memory is not known; it must be"),
        (["--gpus", 8, "--hours", 9, "--gpu-gb", 1], "--gpu-gb is 1: no recipe of pretrain_150m, "),
        (
            ["--gpus", 1, "--hours", 0.5],
            "least 1.13 with --gpus 1, which pretrain_150m, the smallest recipe that fits, takes on 1 GPU\n",
        ),
    ],
)
def test_what_cannot_be_is_one_line(words, message, capsys):
    assert plan(*words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert message in output.err
