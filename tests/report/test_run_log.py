"""Reading a run as it lies there: torn, growing, replaced, gone back, older than this version."""

import json
import os

import pytest
import tiny_run

from gpt_oss_lite.report.run_log import JsonLines, read_run, unique_names
from shared_data.errors import UserError


def write_lines(path, rows, end="\n"):
    path.write_text("\n".join(json.dumps(row) for row in rows) + end)


def test_only_whole_lines_count_and_damaged_ones_are_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "ce\n\x00\x00\n[3]\n{"step": "4"}\n{"step": 5}\n{"step": 6}')
    lines = JsonLines(path)
    assert [row["step"] for row in lines.read()] == [1, 5]
    assert lines.damaged == 4
    with open(path, "a") as file:
        file.write('\n{"step": 7}\n')
    assert [row["step"] for row in lines.read()] == [1, 5, 6, 7]


def test_a_file_that_a_rollback_replaced_is_read_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [{"step": step} for step in range(1, 9)])
    lines = JsonLines(path)
    lines.read()
    write_lines(tmp_path / "new", [{"step": step} for step in (1, 2, 3)])
    os.replace(tmp_path / "new", path)
    assert [row["step"] for row in lines.read()] == [1, 2, 3]
    assert JsonLines(tmp_path / "missing").read() == []


def test_figures_of_a_real_run(run_folders):
    calm, rough = map(read_run, run_folders)
    assert calm.status == "done at step 60"
    assert calm.stop_step == 60
    assert calm.column("ce").tolist() == [row["ce"] for row in tiny_run.rows(run_folders[0])]
    assert calm.tokens[-1] == 60 * calm.tokens_per_step
    assert calm.expert_load.shape == (60, 2, 4)
    assert calm.expert_load.sum(axis=2) == pytest.approx(1.0)
    assert calm.by_layer("sink_mean").shape == (60, 2)
    assert calm.recipe["training"]["total_steps"] == 60
    assert rough.record["seed"] == 2
    assert [event["event"] for event in rough.events if event["event"] == "rollback"] == ["rollback"]


def test_what_an_older_log_lacks_is_nan(tmp_path):
    rows = [{"step": 1, "tokens": 10, "ce": None}, {"step": 2, "tokens": 20, "expert_load": [[0.5, 0.5]], "ce": 2.0},
            {"step": 3, "tokens": 30, "expert_load": [[1.0], [0.5, 0.5]]}, {"step": 4, "tokens": None}]  # fmt: skip
    write_lines(tmp_path / "metrics.jsonl", rows)
    log = read_run(tmp_path)
    assert str(log.column("ce").tolist()) == "[nan, 2.0, nan]"
    assert str(log.expert_load.tolist()) == "[[[nan, nan]], [[0.5, 0.5]], [[nan, nan]]]"
    assert log.by_layer("sink_mean").size == 0
    assert (log.recipe, log.record, log.status) == ({}, {}, "at step 3")


def test_evaluations_are_those_on_the_path_to_the_end(tmp_path):
    events = [("eval", 0), ("eval", 10), ("eval", 20), ("rollback", 15), ("eval", 20), ("eval", 30), ("resume", 10)]
    write_lines(tmp_path / "events.jsonl", [{"event": k, "step": s, "n": n} for n, (k, s) in enumerate(events)])
    assert [event["n"] for event in read_run(tmp_path).evaluations] == [0, 1]
    write_lines(tmp_path / "events.jsonl", [{"event": k, "step": s, "n": n} for n, (k, s) in enumerate(events[:6])])
    assert [event["n"] for event in read_run(tmp_path).evaluations] == [0, 1, 4, 5]


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([{"event": "start", "stop_step": 90}], "at step 7 of 90"),
        ([{"event": "start"}, {"event": "stop", "reason": "SIGTERM"}], "stopped at step 7 (SIGTERM)"),
        ([{"event": "start"}, {"event": "stop", "reason": "SIGTERM"}, {"event": "start"}], "at step 7"),
        ([{"event": "start"}, {"event": "stop"}, {"event": "resume", "stop_step": 80}], "at step 7 of 80"),
        ([{"event": "start"}, {"event": "give_up"}], "given up by the NaN guard at step 7"),
    ],
)
def test_status_is_that_of_the_newest_process(tmp_path, events, status):
    write_lines(tmp_path / "metrics.jsonl", [{"step": 7, "tokens": 70}])
    write_lines(tmp_path / "events.jsonl", [{"step": 7, **event} for event in events])
    assert read_run(tmp_path).status == status


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(UserError, match=r"holds no run: neither metrics\.jsonl nor events\.jsonl"):
        read_run(tmp_path)
    with pytest.raises(UserError, match="nowhere is not a folder"):
        read_run(tmp_path / "nowhere")


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    logs = []
    for place in ("a/run", "b/run", "c"):
        (tmp_path / place).mkdir(parents=True)
        write_lines(tmp_path / place / "metrics.jsonl", [{"step": 1, "tokens": 1}])
        logs.append(read_run(tmp_path / place))
    assert unique_names(logs) == ["a/run", "b/run", "c"]
