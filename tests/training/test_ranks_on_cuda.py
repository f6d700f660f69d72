"""Several ranks on a GPU: NCCL and the fused path, for real. They share one GPU, as nodes of a job would not
(scripts/ranks_on_one_gpu.py)."""

import os
import re
import signal
import time

import psutil
import pytest
import ranks_on_one_gpu
import tiny_run
from safetensors.torch import load_file
from test_distributed import saved_state
from test_liveness import processes_by_rank, wait_for_checkpoint

pytestmark = pytest.mark.gpu

TIMEOUT_S = 20
STEPS = 8
# TF32 and bf16 keep 10 and 7 bits; sums in another order fall to the other side of one now and then.
BOUNDS = {"fp32": 5e-4, "bf16": 5e-3}
LAYOUTS = {
    "ddp": [],
    "fsdp": ["training.parallelism=fsdp"],
    "experts": ["training.expert_parallel_size=2"],
}
# The first word after torchrun: a rank that takes itself for one of a host of its own, where no other can see it.
ELSEWHERE = """
import os, runpy, socket, sys
socket.gethostname = lambda: os.environ["NCCL_HOSTID"]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    tiny_run.make_corpus(folder / "corpus")
    return folder


def write_recipe(folder, dtype="bf16", **training):
    """The tiny recipe, 4 micro-batches a step; the fused path in bf16."""
    model = {"dtype": dtype, "moe_dispatch": "auto" if dtype == "bf16" else "reference"}
    path = folder / f"{dtype}.yaml"
    settings = {"gradient_accumulation_steps": 4, "grad_clip": 0.5, "save_interval": 2, **training}
    return tiny_run.write_recipe(path, folder / "corpus", model=model, **settings)


def start(n_ranks, recipe, run, *words, script=None, max_restarts=0):
    """The nodes of a run, which speak into a file beside it."""
    paths = os.pathsep.join(filter(None, [str(tiny_run.ROOT), os.environ.get("PYTHONPATH")]))
    program = [str(tiny_run.ROOT / "training/pretrain.py"), "--config", str(recipe), "--out", str(run), "--seed", "3"]
    command = [*([str(script)] if script else []), *program, "--auto-resume", *words]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with open(said_by(run), "a") as said:
        return ranks_on_one_gpu.start(n_ranks, command, max_restarts, stderr=said, env=environment)


def said_by(run):
    return run.with_suffix(".txt")


def wait_for_end(nodes, run):
    """What the nodes of a run have said when all have ended well."""
    codes = [node.wait(timeout=300) for node in nodes]
    said = said_by(run).read_text()
    assert codes == [0] * len(nodes), said
    return said


def train(n_ranks, recipe, run, *settings, max_steps=STEPS):
    """A run to its end."""
    words = ["--max-steps", str(max_steps), *(word for setting in settings for word in ("--set", setting))]
    if n_ranks == 1:
        process = tiny_run.start_run(
            config=recipe, out=run, seed=3, overrides=list(settings), max_steps=max_steps, auto_resume=True
        )
        code, stderr = tiny_run.finish(process)
        assert code == 0, stderr
        return
    wait_for_end(start(n_ranks, recipe, run, *words), run)


def assert_close_rows(run, other, bound):
    rows, others = tiny_run.rows(run), tiny_run.rows(other)
    assert [row["step"] for row in rows] == [row["step"] for row in others] == list(range(1, STEPS + 1))
    for key in ("ce", "aux", "grad_norm"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in others], rel=bound), key
    for key in ("tokens", "position", "lr"):
        assert [row[key] for row in rows] == [row[key] for row in others]


@pytest.fixture(scope="module")
def alone(folder):
    """The run of one process, by dtype."""
    runs = {}

    def run_of(dtype):
        if dtype not in runs:
            runs[dtype] = folder / f"alone-{dtype}"
            train(1, write_recipe(folder, dtype), runs[dtype])
        return runs[dtype]

    return run_of


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_the_steps_of_two_ranks_are_those_of_one(folder, alone, tmp_path, dtype, layout):
    train(2, write_recipe(folder, dtype), tmp_path / "two", *LAYOUTS[layout])
    assert_close_rows(tmp_path / "two", alone(dtype), BOUNDS[dtype])


def test_a_run_goes_from_1_rank_to_2_and_back(folder, alone, tmp_path):
    recipe = write_recipe(folder)
    run = tmp_path / "run"
    train(1, recipe, run, max_steps=2)
    for layout, steps in (("fsdp", 4), ("experts", 6)):
        train(2, recipe, run, *LAYOUTS[layout], max_steps=steps)
    train(1, recipe, run)
    assert_close_rows(run, alone("bf16"), BOUNDS["bf16"])
    assert [event["step"] for event in tiny_run.events(run, "resume")] == [2, 4, 6]
    shapes = {name: tensor.shape for name, tensor in load_file(run / "checkpoints/model_step_8.safetensors").items()}
    for step in (4, 6):
        assert {name: state[0].shape for name, state in saved_state(run / "checkpoints", step).items()} == shapes


@pytest.mark.parametrize("elsewhere", [False, True], ids=["one host", "two hosts"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_rank_is_named_within_the_time_out_and_the_job_goes_on(folder, tmp_path, how, elsewhere, missing):
    recipe = write_recipe(folder, total_steps=30, save_interval=5, distributed_timeout_s=TIMEOUT_S)
    run, script = tmp_path / "run", None
    if elsewhere:
        script = tmp_path / "elsewhere.py"
        script.write_text(ELSEWHERE)
    nodes = start(2, recipe, run, script=script, max_restarts=1)
    wait_for_checkpoint(run, 5, *nodes)
    processes = processes_by_rank(*nodes)
    processes[missing].send_signal(how)
    sent = time.monotonic()
    _, alive = psutil.wait_procs([processes[1 - missing]], timeout=TIMEOUT_S)
    seconds = time.monotonic() - sent
    print(f"{how.name} to rank {missing}: the other one had ended {seconds:.1f} s after it (time-out {TIMEOUT_S} s)")
    assert not alive
    said = wait_for_end(nodes, run)
    named = rf"error: rank {missing} \(pid {processes[missing].pid} on \S+\) (was killed|gave no sign of life)"
    assert re.search(named, said), said
    (resumed,) = tiny_run.events(run, "resume")
    assert resumed["step"] >= 5
    assert [row["step"] for row in tiny_run.rows(run)] == list(range(1, 31))
