"""Rates over a synthetic clock, and logs that survive being torn."""

import json
import math

import pytest

from gpt_oss_lite.training.logger import Throughput, TrainingLogger, console_line, format_duration, read_rows


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_rates_are_over_the_time_since_the_last_row_without_pauses():
    clock = Clock()
    meter = Throughput(clock)
    for _ in range(4):
        with meter.waiting():
            clock.now += 0.5
        clock.now += 2.0
        meter.count(100)
    assert meter.read() == (40.0, 0.4, 0.5)
    with meter.paused():
        clock.now += 3600.0
    clock.now += 5.0
    meter.count(100)
    assert meter.read() == (20.0, 0.2, 0.0)


def row(step, **changes):
    figures = {"ce": 2.0, "aux": 1.0, "grad_norm": 0.5, "lr": 4e-4, "tokens_per_s": 243_500.0, "mfu": 0.395}
    return {"step": step, **figures, **changes}


def test_console_line_is_for_a_person():
    parts = console_line(row(50), 61000, 32_400).split(" | ")
    assert parts == [
        "step     50/61000", "ce 2.0000", "aux 1.0000", "norm 0.50", "lr 4.00e-04", "244k tok/s", "MFU 39.5%",
        "9 h 00 min left",
    ]  # fmt: skip
    assert "MFU n/a" in console_line(row(50, mfu=None), 61000, None)
    assert "ce nan" in console_line(row(50, ce=math.nan), 61000, None)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (99, "99 s"), (3000, "50 min"), (11100, "3 h 05 min"), (187200, "2 d 04 h")]
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


def test_rows_are_json_and_non_finite_values_null(tmp_path):
    logger = TrainingLogger(tmp_path)
    logger.log(row(1, ce=math.nan, expert_load=[[math.inf, 0.5]]), 10, 1.0)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    content = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert content["ce"] is None
    assert content["expert_load"] == [[None, 0.5]]


def test_cutting_drops_later_rows_torn_lines_and_refused_steps(tmp_path):
    logger = TrainingLogger(tmp_path)
    for step in range(1, 8):
        logger.log(row(step), 10, 1.0)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "ce"')
    logger.cut(6, keep=lambda step: step != 2)
    assert [entry["step"] for entry in read_rows(tmp_path / "metrics.jsonl")] == [1, 3, 4, 5, 6]


def test_a_torn_event_does_not_swallow_the_next(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"event": "save"}\n{"event": "sa')
    TrainingLogger(tmp_path).event("resume", 3)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(lines[2])["event"] == "resume"
