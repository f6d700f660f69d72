"""TensorBoard and Weights & Biases, for real: what a run, killed and gone on with, leaves for them to read."""

import json
import subprocess
import sys

import pytest
import tiny_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from gpt_oss_lite.training.logger import TrainingLogger
from gpt_oss_lite.training.pretrain import PretrainOptions, pretrain
from gpt_oss_lite.training.trackers import TensorBoard, guarded, scalars

N_STEPS = 12
BLOCK = 1 << 15


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with both trackers that stopped after step 8, and went on from its checkpoint of step 5."""
    folder = tmp_path_factory.mktemp("trackers")
    recipe = tiny_run.write_recipe(
        folder / "r.yaml", tiny_run.make_corpus(folder / "corpus"), total_steps=N_STEPS, eval_interval=4,
        tensorboard=True, wandb="offline", wandb_project="tiny",
    )  # fmt: skip
    assert pretrain(PretrainOptions(config=recipe, out=folder / "run", seed=1, max_steps=8)) == 0
    assert pretrain(PretrainOptions(config=recipe, out=folder / "run", resume_from=5)) == 0
    return folder / "run"


def test_tensorboard_has_each_logged_step_once_though_the_run_went_back(run):
    board = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    for tag in ("train/ce", "train/lr", "train/router_entropy/layer_1", "train/expert_load/layer_0/expert_3"):
        assert [point.step for point in board.Scalars(tag)] == list(range(1, N_STEPS + 1)), tag
    assert [point.step for point in board.Scalars("eval/loss")] == [0, 4, 8, 12]
    logged = [row["ce"] for row in tiny_run.rows(run)]
    assert [point.value for point in board.Scalars("train/ce")] == pytest.approx(logged, rel=1e-6)


def records(path):
    """The records of a .wandb file: a 7-byte header, then LevelDB's log format (its doc/log_format.md)."""
    content, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        if kind == 0 or at % BLOCK > BLOCK - 7:  # the rest of a block is padding
            at = (at // BLOCK + 1) * BLOCK
            continue
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4) and at <= len(content):  # whole, or the last part
            yield parts
            parts = b""


def wandb_rows(run):
    """The history of every part of the run that W&B wrote offline, in the order of writing."""
    rows = []
    for path in sorted((run / "wandb").glob("offline-run-*/run-*.wandb")):
        for content in records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                rows.append({key: json.loads(value) for key, value in items.items()})
    return rows


def test_wandb_keeps_one_id_and_sends_no_step_twice(run):
    identity = json.loads((run / "wandb/gpt-oss-lite.json").read_text())["id"]
    parts = sorted(path.name for path in (run / "wandb").glob("offline-run-*"))
    assert len(parts) == 2
    assert all(name.endswith(identity) for name in parts)
    history = wandb_rows(run)
    steps = [row["_step"] for row in history if "train/ce" in row]
    assert steps == list(range(1, N_STEPS + 1))
    assert [row["_step"] for row in history if "eval/loss" in row] == [0, 4, 8, 12]
    last = history[-1]
    assert last["train/ce"] == tiny_run.rows(run)[-1]["ce"]
    assert last["eval/loss"] == tiny_run.events(run, "eval")[-1]["loss"]


def test_a_run_that_was_killed_and_starts_over_has_one_evaluation_at_step_0(tmp_path):
    recipe = tiny_run.write_recipe(
        tmp_path / "r.yaml", tiny_run.make_corpus(tmp_path / "corpus"), total_steps=8, save_interval=8, eval_interval=8,
        tensorboard=True,
    )  # fmt: skip
    process = tiny_run.start_run(config=recipe, out=tmp_path / "run", seed=1)
    tiny_run.kill_after_step(process, tmp_path / "run", 2)
    tiny_run.finish(process)
    assert tiny_run.finish(tiny_run.start_run(config=recipe, out=tmp_path / "run", resume_latest=True))[0] == 0
    assert len(list((tmp_path / "run/tensorboard").iterdir())) == 2
    board = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    assert [point.step for point in board.Scalars("eval/loss")] == [0, 8]
    assert [point.step for point in board.Scalars("train/ce")] == list(range(1, 9))


def test_figures_get_flat_names_and_nulls_no_point():
    row = {"step": 3, "time": 5.0, "ce": None, "lr": 0.5, "expert_load": [[0.25] * 2] * 12, "sink_mean": None}
    flat = scalars("train", row)
    assert flat["train/expert_load/layer_03/expert_1"] == 0.25
    assert len(flat) == 25
    assert scalars("eval", {"by_source": {"code": {"loss": 2.0}}}) == {"eval/by_source/code/loss": 2.0}


def test_a_failing_tracker_is_named_and_left_out(tmp_path, capsys):
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    logger = TrainingLogger(tmp_path, trackers=[TensorBoard(tmp_path)])
    for step in (1, 2):
        logger.event("eval", step, loss=1.0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("warning: tensorboard gave up, the run goes on without it: ")
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 2


def test_an_interrupt_is_no_failure_of_a_tracker():
    def interrupt(tracker):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded(TensorBoard.__new__(TensorBoard), interrupt)


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_anything_is_written(tmp_path, package):
    program = (
        f"import sys; sys.modules['{package}'] = None\n"
        "from gpt_oss_lite.config import TrainingConfig\nfrom gpt_oss_lite.training.trackers import check_trackers\n"
        "try: check_trackers(TrainingConfig(tensorboard=True, wandb='offline'))\n"
        "except ValueError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=tiny_run.ROOT, capture_output=True, text=True)
    assert f"the package {package} is not installed" in result.stdout
    assert "pip install 'gpt-oss-lite[track]'" in result.stdout


def test_wandb_online_without_a_login_is_refused_before_anything_is_written(tmp_path):
    recipe = tiny_run.write_recipe(tmp_path / "r.yaml", tiny_run.make_corpus(tmp_path / "corpus"), wandb="online")
    environment = {
        "HOME": str(tmp_path / "home"),
        "NETRC": str(tmp_path / "netrc"),
        "PYTHONPATH": str(tiny_run.ROOT),
        # Nobody answers there, and nobody is asked: without a key there is nothing to send.
        "WANDB_BASE_URL": "http://127.0.0.1:9",
    }
    result = subprocess.run(
        [sys.executable, "-m", "gpt_oss_lite", "pretrain", "--config", recipe, "--out", tmp_path / "run"],
        env=environment, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    assert "training.wandb is online: " in result.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()
