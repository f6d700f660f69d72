"""docs/scaling.md: its tables are the code's figures, and its launch lines are what torchrun and pretrain take."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser
from typer.main import get_command

from gpt_oss_lite import cli
from gpt_oss_lite.config import load_recipe
from gpt_oss_lite.training.cluster import Cluster
from gpt_oss_lite.training.ladder import LADDER, layouts, simplest_of_the_fast
from gpt_oss_lite.training.layout import Layout, check_split
from gpt_oss_lite.training.memory import estimate_recipe, meta_model
from gpt_oss_lite.training.scaling import step_time
from gpt_oss_lite.training.setting import Setting

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/scaling.md").read_text()


def table(head: str) -> list[list[str]]:
    """The cells of the table whose head has these words, without its head."""
    tables = [part.splitlines() for part in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE)]
    (lines,) = [lines for lines in tables if head in lines[0]]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[2:]]


def speed(gpus: int, windows: int) -> list[str]:
    """Exchange, exposed and step in ms, tokens/s and the ratio to one H200, as the page has them."""
    recipe = load_recipe(ROOT / "configs/pretrain_h200_502m.yaml")
    cluster = Cluster(gpus=gpus, gpu="NVIDIA H200", gpu_gb=141)
    time = step_time(recipe, Setting(windows, gpus, None, 16384), Layout(gpus), cluster)
    alone = step_time(recipe, Setting(32, 1, None, 16384), Layout(), cluster)
    tokens_per_s = gpus * windows * 4096 / time.total
    ratio = tokens_per_s / (131_072 / alone.total)
    milliseconds = [f"{1e3 * time.exchange:.1f}", f"{1e3 * time.exposed:.1f}", f"{1e3 * time.total:.0f}"]
    return [*milliseconds, f"{round(tokens_per_s, -3):,.0f}", f"{ratio:.1f}"]


def test_the_table_of_one_step_for_each_gpu():
    rows = table("tokens a step | exchange")
    assert [row[0] for row in rows] == ["1", "2", "8", "64", "512"]
    for row in rows:
        row[5] = row[5].removesuffix(" (measured: 286,000)")
        gpus = int(row[0])
        assert row[1:] == [f"{131_072 * gpus:,}", *speed(gpus, 32)]


def test_the_table_of_one_step_for_all_gpus():
    rows = table("windows of each")
    assert [(int(gpus) * int(windows)) for gpus, windows, *_ in rows] == [32] * 4
    for gpus, windows, *figures in rows:
        assert figures == speed(int(gpus), int(windows))


def test_the_table_of_the_ladder():
    rows = table("width x layers")
    assert [Path(row[0].strip("`")).stem for row in rows] == list(LADDER)
    for name, width, experts, total, active, tokens, step, steps, rate in rows:
        recipe = load_recipe(ROOT / name.strip("`"))
        model, training = meta_model(recipe.model), recipe.training
        a_step = 4096 * training.micro_batch_size * training.gradient_accumulation_steps
        assert (width, experts) == (f"{recipe.model.d_model} x {recipe.model.n_layers}", str(recipe.model.n_experts))
        assert (total, active) == (f"{model.num_parameters():,}", f"{model.num_active_parameters():,}")
        assert tokens == f"{a_step * training.total_steps / 1e9:.2f} B"
        assert (step, steps) == (f"{a_step:,}", f"{training.total_steps:,}")
        assert float(rate) == training.lr


def test_the_table_of_hours():
    for name, *cells in table("512 GPUs"):
        for gpus, cell in zip((1, 8, 64, 512), cells, strict=True):
            found = list(layouts(Path(name.strip("`")).stem, Cluster(gpus=gpus)))
            if not found:
                assert cell == "does not fit"
                continue
            proposed = simplest_of_the_fast(found)
            assert cell == f"{proposed.hours:.1f}" + (f" on {proposed.gpus}" if proposed.gpus != gpus else "")


def test_the_table_of_memory():
    recipe = load_recipe(ROOT / "configs/pretrain_7b.yaml")
    for row, layout in zip(table("16-bit copies"), [Layout(), Layout(8, "fsdp"), Layout(64, "fsdp")], strict=True):
        estimate = estimate_recipe(recipe, layout=layout)
        gb = {name: size / 1e9 for name, size in estimate.items.items()}
        state = gb["weights (fp32)"] + gb["gradients (fp32)"] + gb["AdamW moments (2 x fp32)"]
        gathered = gb.get("gathered weights: embedding and two blocks (fp32)")
        figures = [state, gb["weights in bf16 for the products"], gathered, gb["saved activations (28 blocks)"] / 4,
                   estimate.total_gb]  # fmt: skip
        assert row[1:] == ["" if figure is None else f"{figure:.1f}" for figure in figures]


def launches() -> dict[str, list[str]]:
    """The words after `torchrun` of each line that starts a run."""
    shell = [line for line in PAGE.splitlines() if re.match(r"(srun .*)?torchrun ", line)]
    found = {line.split()[0]: shlex.split(line.partition("torchrun ")[2]) for line in shell}
    (manifest,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    service, job = yaml.safe_load(manifest)["items"]
    pods = job["spec"]["template"]["spec"]
    assert service["metadata"]["name"] == pods["subdomain"]
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
    assert {mount["name"] for mount in pods["containers"][0]["volumeMounts"]} == {
        volume["name"] for volume in pods["volumes"]}  # fmt: skip
    program, *words = pods["containers"][0]["command"]
    assert program == "torchrun"
    nodes = [word for word in words if word.startswith("--nnodes=")]
    assert nodes == [f"--nnodes={job['spec']['completions']}"]
    assert job["spec"]["parallelism"] == job["spec"]["completions"]
    return {**found, "kubernetes": words}


def test_there_are_lines_for_a_node_for_slurm_and_for_kubernetes():
    assert list(launches()) == ["torchrun", "srun", "kubernetes"]


@pytest.mark.parametrize("where", ["torchrun", "srun", "kubernetes"])
def test_a_launch_line_is_what_torchrun_and_pretrain_take(where):
    options = get_args_parser().parse_args(launches()[where])
    assert options.training_script == "training/pretrain.py"
    command = get_command(cli.app).commands["pretrain"]
    words = command.make_context("pretrain", list(options.training_script_args)).params
    assert words["auto_resume"]
    assert words["out"]
    recipe = load_recipe(ROOT / words["config"], words["overrides"] or ())
    check_split(recipe.training, int(options.nnodes.partition(":")[0]) * int(options.nproc_per_node))
    if not options.standalone:
        assert options.rdzv_backend == "c10d"
        assert options.rdzv_endpoint.endswith(":29500")
        assert options.rdzv_id
