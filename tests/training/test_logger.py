"""Rates over a synthetic clock, and logs that survive being torn."""

import json
import math

import pytest

from gpt_oss_lite.training import logger as logger_module
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
    assert [json.loads(line)["event"] for line in lines] == ["save", "resume"]


def test_a_full_disk_loses_no_row_and_tears_none(tmp_path, capsys, monkeypatch):
    logger = TrainingLogger(tmp_path)
    logger.log(row(1), 10, 1.0)
    real, refuse = open, [True]

    class Half:
        """A file that takes half of what it is given, as a full disk does."""

        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, content):
            return self.file.write(content[: len(content) // 2]) if refuse[0] else self.file.write(content)

    monkeypatch.setattr(logger_module, "open", lambda *words, **options: Half(real(*words, **options)), raising=False)
    logger.log(row(2), 10, 1.0)
    assert "metrics.jsonl NOT WRITTEN" in capsys.readouterr().err
    assert [entry["step"] for entry in read_rows(tmp_path / "metrics.jsonl")] == [1]
    with pytest.raises(OSError, match="could be written"):
        logger.finish()
    refuse[0] = False
    logger.log(row(3), 10, 1.0)
    logger.finish()
    assert [entry["step"] for entry in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_damaged_line_is_named_and_passed_over(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st\xffep": 2}\n[3]\n{"step": 4}\n{"step": 5')
    assert [entry["step"] for entry in read_rows(path)] == [1, 4]
    assert f"{path}, line 2, is damaged" in capsys.readouterr().err
