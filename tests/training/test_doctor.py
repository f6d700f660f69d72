"""`doctor` names what would lose a run and leaves with 1; `checkpoints` lists, verifies, deletes and compares."""

import json
import shutil

import pytest
import tiny_run

from gpt_oss_lite import cli
from gpt_oss_lite.config import load_recipe
from gpt_oss_lite.training import disk, doctor
from gpt_oss_lite.training.checkpoint import CheckpointManager
from gpt_oss_lite.training.memory import meta_model
from gpt_oss_lite.training.run_lock import locked
from shared_data.console import run_app


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor")
    corpus = tiny_run.make_corpus(folder / "corpus")
    tiny_run.write_recipe(folder / "tiny.yaml", corpus, total_steps=6, save_interval=2)
    words = ["pretrain", "--config", str(folder / "tiny.yaml"), "--out", str(folder / "run"), "--seed", "1"]
    assert run_app(cli.app, words) == 0
    return folder


def examine(prepared, capsys, *words):
    """Exit code and findings by state."""
    command = ["doctor", "--config", str(prepared / "tiny.yaml"), "--out", str(prepared / "new"), "--json", *words]
    capsys.readouterr()
    code = run_app(cli.app, command)
    result = json.loads(capsys.readouterr().out)
    assert result["ready"] == (code == 0)
    return code, {(f["check"], f["state"]): f["text"] for f in result["findings"]}


def test_a_run_that_is_well_prepared(prepared, capsys):
    code, findings = examine(prepared, capsys)
    assert code == 0
    checks = {check for check, _ in findings}
    assert checks >= {"machine", "driver", "clock", "config", "corpus", "disk", "memory", "estimate"}
    assert not [text for (_, state), text in findings.items() if state == "fatal"]
    assert not (prepared / "new").exists()
    assert not [path for path in prepared.iterdir() if "probe" in path.name]


@pytest.mark.parametrize(
    ("words", "check", "said"),
    [
        (["--set", "data.train_data_path=none"], "corpus", "none"),
        (["--set", "model.vocab_size=40", "--set", "model.padded_vocab_size=null"], "corpus", "40 rows"),
        (["--set", "training.save_interval=100"], "config", "save_interval is 100"),
        (["--set", "training.nan_guard=false"], "config", "nan_guard is false"),
        (["--set", "training.fp8_head=true"], "config", "the device is cpu; training.fp8_head is true: it needs"),
        (["--ranks", "3"], "config", "3 ranks cannot share a step's micro-batches evenly"),
        (["--set", "model.d_model=1048576", "--set", "model.n_layers=4"], "memory", "GB"),
        (["--set", "training.mirror=nonsense://x"], "mirror", "nonsense"),
        (["--set", "training.eval_interval=2", "--set", "data.validation_data_path=none"], "corpus", "none"),
    ],
)
def test_what_would_lose_the_run_is_fatal(prepared, capsys, words, check, said):
    code, findings = examine(prepared, capsys, *words)
    assert code == 1
    assert said in findings[check, "fatal"]


def test_a_check_that_fails_twice_is_named_once(prepared, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "available_ram_bytes", lambda: 1)  # neither a step nor the copy for a save fits
    words = ["doctor", "--config", str(prepared / "tiny.yaml"), "--out", str(prepared / "new")]
    assert run_app(cli.app, words) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("FAIL memory: ") for line in lines) == 2
    assert lines[-1] == "the run would be lost: see memory"


def test_a_key_without_effect_is_noticed(prepared, capsys):
    code, findings = examine(prepared, capsys, "--set", "training.muon_momentum=0.9")
    assert code == 0
    assert findings["config", "notice"].startswith("training.muon_momentum is 0.9, without effect: ")


def test_nobody_is_told_of_a_key_of_the_file_that_the_command_line_switches_off(prepared, capsys):
    words = ["--config", "quickstart", "--set", "training.eval_interval=0"]
    assert "without effect" not in " ".join(examine(prepared, capsys, *words)[1].values())
    words = [*words, "--set", "training.eval_windows=9"]
    assert "training.eval_windows is 9, without effect: " in " ".join(examine(prepared, capsys, *words)[1].values())


def test_a_run_that_goes_on_is_not_told_of_what_it_has_written_itself(prepared, capsys):
    config, run = str(prepared / "tiny.yaml"), prepared / "evaluated"
    validation = ["--set", f"data.validation_data_path={prepared / 'corpus'}", "--set", "training.eval_interval=0"]
    words = ["pretrain", "--config", config, "--out", str(run), "--max-steps", "1", *validation]
    assert run_app(cli.app, words) == 0
    assert "warning: data.validation_data_path is " in capsys.readouterr().err
    assert run_app(cli.app, ["pretrain", "--config", str(run / "config.yaml"), "--resume", "latest"]) == 0
    assert "without effect" not in capsys.readouterr().err


def test_a_run_says_once_at_its_start_which_keys_have_no_effect(prepared, capsys):
    words = ["pretrain", "--config", str(prepared / "tiny.yaml"), "--out", str(prepared / "muon"), "--max-steps", "1"]
    assert run_app(cli.app, [*words, "--set", "training.muon_momentum=0.9"]) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")] == [
        "warning: training.muon_momentum is 0.9, without effect: training.optimizer is adamw, it would have to be muon"
    ]


def test_more_loader_workers_than_cores_are_noticed(prepared, capsys):
    _, findings = examine(prepared, capsys, "--set", "training.num_workers=100000")
    assert "training.num_workers is 100000: more loader workers than" in findings["config", "notice"]


@pytest.mark.parametrize("words", [["--set", "training.lrr=1"], ["--config", "none.yaml"]])
def test_a_recipe_that_cannot_be_read_is_bad_input_as_for_every_command(prepared, capsys, words):
    assert run_app(cli.app, ["doctor", "--config", str(prepared / "tiny.yaml"), *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: --set training.lrr=1: " if "--set" in words else "error: --config none.yaml: ")
    assert len(said.err.splitlines()) == 1


def test_a_disk_without_room_is_fatal(prepared, capsys, monkeypatch):
    size = disk.checkpoint_bytes(meta_model(load_recipe(prepared / "tiny.yaml").model), "adamw")
    monkeypatch.setattr(disk, "free_bytes", lambda _: 2 * size)
    code, findings = examine(prepared, capsys)
    assert code == 1
    assert "will not be able to save its later ones" in findings["disk", "fatal"]


def test_a_clock_in_the_past_is_fatal(prepared, capsys, monkeypatch):
    monkeypatch.setattr(doctor.time, "time", lambda: 1e9)
    code, findings = examine(prepared, capsys)
    assert code == 1
    assert "2001" in findings["clock", "fatal"]


def test_a_driver_that_pytorch_cannot_use_is_fatal(prepared, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_nvidia_smi", lambda: ("470.1", "0"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, findings = examine(prepared, capsys)
    assert code == 1
    assert "driver 470.1" in findings["driver", "fatal"]


def test_little_shared_memory_for_the_loaders_is_fatal(prepared, capsys, monkeypatch):
    real = shutil.disk_usage
    monkeypatch.setattr(
        doctor.shutil, "disk_usage", lambda path: type(real("/"))(1, 1, 0) if "shm" in str(path) else real(path)
    )
    code, findings = examine(prepared, capsys, "--set", "training.num_workers=2")
    assert code == 1
    assert "--shm-size" in findings["memory", "fatal"]


def test_a_plain_report_is_for_a_person(prepared, capsys):
    assert run_app(cli.app, ["doctor", "--config", str(prepared / "tiny.yaml"), "--out", str(prepared / "new")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "ready"
    assert all(line[:4] in ("ok  ", "note") for line in lines[:-1])


@pytest.fixture
def run(prepared, tmp_path):
    return shutil.copytree(prepared / "run", tmp_path / "run")


def checkpoints(capsys, *words):
    """Exit code and output of `checkpoints ...`."""
    capsys.readouterr()
    code = run_app(cli.app, ["checkpoints", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_list(run, capsys):
    code, out, _ = checkpoints(capsys, "list", run, "--json")
    assert code == 0
    rows = json.loads(out)
    assert [(row["step"], row["tokens"], row["position"]) for row in rows] == [(2, 128, 8), (4, 256, 16), (6, 384, 24)]
    names = [path for path in (run / "checkpoints").glob("*_step_2.*") if path.suffix != ".json"]
    assert rows[0]["bytes"] == sum(path.stat().st_size for path in names)
    assert "step" in checkpoints(capsys, "list", run / "checkpoints")[1]


def test_verify_names_each_damaged_file(run, capsys):
    assert checkpoints(capsys, "verify", run)[0] == 0
    path = run / "checkpoints" / "optim_step_4.pt"
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)
    (run / "checkpoints" / "rng_step_6.pt").unlink()
    code, out, _ = checkpoints(capsys, "verify", run)
    assert code == 1
    lines = out.splitlines()
    assert lines[0] == "step 2: good"
    assert "optim_step_4.pt is damaged" in lines[1]
    assert "rng_step_6.pt is missing" in lines[2]
    assert checkpoints(capsys, "verify", run, "--step", 2)[0] == 0


def test_delete_leaves_a_good_one_and_no_running_run_alone(run, capsys):
    assert checkpoints(capsys, "delete", run, "--step", 2)[0] == 0
    manager = CheckpointManager(run / "checkpoints")
    assert manager.list_checkpoints() == [4, 6]
    code, _, err = checkpoints(capsys, "delete", run, "--step", 4, "--step", 6)
    assert code == 2
    assert "no good checkpoint would be left" in err
    path = run / "checkpoints" / "rng_step_6.pt"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    code, _, err = checkpoints(capsys, "delete", run, "--step", 4)  # 6 is complete, and damaged
    assert code == 2
    assert checkpoints(capsys, "delete", run, "--step", 9)[0] == 2
    assert manager.list_checkpoints() == [4, 6]


def test_delete_is_refused_while_the_run_trains(prepared, run, capsys):
    from multiprocessing import get_context

    # POSIX locks are a process's own: another process must ask.
    with locked(run), get_context("spawn").Pool(1) as pool:
        code = pool.apply(run_app, (cli.app, ["checkpoints", "delete", str(run), "--step", "2"]))
    assert code == 2
    assert CheckpointManager(run / "checkpoints").list_checkpoints() == [2, 4, 6]


def test_diff(prepared, run, capsys):
    code, out, _ = checkpoints(capsys, "diff", run, 2, 2, "--other", prepared / "run")
    assert (code, out) == (0, "the same\n")
    code, out, _ = checkpoints(capsys, "diff", run, 4, 6, "--json")
    assert code == 1
    result = json.loads(out)
    assert result["meta"]["position"] == [16, 24]
    assert result["tensors"]["norm.weight"].startswith("largest change ")
    assert checkpoints(capsys, "diff", run, 4, 5)[0] == 2
