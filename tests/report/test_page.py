"""The page as text: what it holds, that it needs nothing else, that nothing of a run is taken for markup."""

import datetime
import json
import os
import re
from html.parser import HTMLParser

import command_line
import numpy as np
import pytest
import tiny_run
import torch

from gpt_oss_lite import cli
from gpt_oss_lite.report.monitor import lines
from gpt_oss_lite.report.page import render
from gpt_oss_lite.report.run_log import RunLog, read_run
from shared_data.console import run_app

NOW = datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.UTC)
VOID = {"meta", "input", "img", "source", "br", "path"}


class Outline(HTMLParser):
    """Tags in order, checked for being closed; text; addresses."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.text, self.addresses, self.paths = [], [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        values = dict(attributes)
        self.addresses += [values[key] for key in ("src", "href", "srcset") if key in values]
        if tag == "path":
            self.paths.append(values)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text.append(data)


@pytest.fixture(scope="module")
def page(run_folders):
    return render([read_run(folder) for folder in run_folders], NOW)


def test_the_page_is_whole_and_needs_nothing_else(page):
    outline = Outline(page)
    assert outline.addresses
    assert all(address.startswith("data:image/png;base64,") for address in outline.addresses)
    assert "http" not in page
    assert "@import" not in page
    assert "url(" not in page
    assert outline.tags.count("figure") == 10 + 2  # curves, and a heat map a run
    headings = ["Curves", "Expert load", "Samples", "Recipe", "Events"]
    assert [text for text in outline.text if text in headings] == headings


def test_what_a_run_wrote_is_text_not_markup(page):
    outline = Outline(page)
    assert outline.tags.count("script") == 1
    assert "b" not in outline.tags
    assert "<b>import " in outline.text
    assert any("<script>document.title" in text for text in outline.text)
    page.encode(errors="replace")  # a lone surrogate of a sample is no obstacle


def test_what_differs_between_the_recipes_stands_in_the_table(page):
    table = page[page.index("What differs.") : page.index("Whole recipe of")]
    keys = re.findall(r"<th scope=row>([^<]+)</th>", table)
    assert {"training.lr", "training.aux_loss_alpha", "training.total_steps", "seed"} <= set(keys)
    assert "training.warmup_steps" not in keys
    assert "<td>0.003</td>" in table


def test_events_are_told_in_order(page):
    events = re.findall(r"<tr><td>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d</td><td>(\d+)</td><td[^>]*>(.*?)</td></tr>", page)
    process = f", torch {torch.__version__} on cpu"
    assert events == [
        ("0", f"started{process}"), ("30", "done at step 30"), ("30", f"resumed from step 30{process}"),
        ("60", "done at step 60"),
        ("0", f"started{process}"), ("3", "step 3 skipped: non-finite in micro-batches [1]"),
        ("16", "step 16 skipped: non-finite in micro-batches [1]"),
        ("17", "step 17 skipped: non-finite in micro-batches [0, 1]"),
        ("18", "step 18 skipped: non-finite in micro-batches [0, 1]"), ("10", "rolled back from step 20 to 10"),
        ("40", "done at step 40"),
    ]  # fmt: skip


def test_the_drawn_curve_is_the_logged_loss(run_folders):
    log = read_run(run_folders[0])
    page = render([log], NOW)
    low, high = map(float, re.search(r'data-y="([\d.]+) ([\d.]+) 1"', page).groups())
    (path,) = [p for p in Outline(page).paths if p.get("data-name") == "calm training" and "faint" in p["class"]]
    points = np.array(re.findall(r"(\d+) (\d+)", path["d"]), dtype=float)
    losses = low * (high / low) ** (1 - points[:, 1] / 10_000)
    assert losses == pytest.approx([row["ce"] for row in tiny_run.rows(run_folders[0])], rel=2e-4)
    assert points[:, 0] == pytest.approx(10_000 * log.tokens / log.tokens[-1], abs=1)


def long_run(n_rows: int) -> RunLog:
    """61,000 steps of the 502M recipe's shape, logged in n_rows rows."""
    rng = np.random.default_rng(0)
    load = rng.dirichlet(np.ones(8) * 50, size=(n_rows, 12))
    rows = [
        {
            "step": step, "tokens": step * 131072, "ce": 3 + 8 * np.exp(-step / 2500) + rng.normal() * 0.05,
            "aux": 1.01, "grad_norm": float(np.exp(rng.normal())), "lr": 4e-4,
            "tokens_per_s": 243e3 * rng.uniform(0.9, 1), "mfu": 0.39, "memory_gib": 22.1,
            "data_wait_s": rng.uniform(0, 0.01), "time": 0.5 * step,
            "expert_load": load[index].tolist(), "router_entropy": rng.uniform(1, 2, 12).tolist(),
            "sink_mean": rng.normal(size=12).tolist(),
        }
        for index, step in enumerate(np.linspace(1, 61_000, n_rows).astype(int).tolist())
    ]  # fmt: skip
    events = [{"event": "save", "step": step, "time": 0.0} for step in range(100, 61_000, 100)]
    events += [{"event": "skip", "step": step, "time": 0.0, "micro_batches": [0]} for step in range(1, 5000)]
    return RunLog("long", tiny_run.ROOT / "long", rows, events, [], {}, {})


def test_a_long_run_stays_small_and_says_how_it_was_thinned():
    page = render([long_run(6100)], NOW)
    assert len(page) < 500_000
    assert "Of 6,100 logged rows each curve shows the smallest and the largest value in each of 400 equal spans" in page
    assert "The newest 200 of 4,999 other events" in page
    assert "Every logged row is drawn" in render([long_run(800)], NOW)


def test_an_empty_run_has_a_page(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"event": "start", "step": 0, "time": 5.0}\n')
    page = render([read_run(tmp_path)], NOW)
    Outline(page)
    assert "at step 0" in page
    assert "No expert load logged." in page


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "run.json"])
def test_whatever_a_log_of_another_version_lacks_there_is_a_page_and_a_screen(run_folders, tmp_path, name):
    for path in run_folders[1].iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    text = (tmp_path / name).read_text()
    whole = [json.loads(text)] if name == "run.json" else [json.loads(line) for line in text.splitlines()]
    for key in {key for entry in whole for key in entry}:
        missing = [{k: v for k, v in entry.items() if k != key} for entry in whole]
        for part in (missing, [{**entry, key: None} for entry in missing]):
            (tmp_path / name).write_text("\n".join(map(json.dumps, part)) + "\n")
            log = read_run(tmp_path)
            Outline(render([log], NOW))
            assert lines(log, 0.0, 20)


def channel(value: int) -> float:
    share = value / 255
    return share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4


def luminance(colour: str) -> float:
    red, green, blue = (channel(int(colour[at : at + 2], 16)) for at in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_have_the_contrast_that_wcag_asks_for(scheme):
    """WCAG 2.2: 4.5 to 1 for text, 3 to 1 for graphics."""
    block = re.findall(r":root \{(.*?)\}", (tiny_run.ROOT / "gpt_oss_lite/report/page.css").read_text(), re.S)[scheme]
    colours = dict(re.findall(r"--(\w+): (#\w{6})", block))
    for paper in ("page", "card"):
        for name, least in [("ink", 7), ("soft", 4.5), ("bad", 4.5), *((f"run{number}", 3.5) for number in range(6))]:
            light, dark = sorted((luminance(colours[name]), luminance(colours[paper])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= least, f"{name} on {paper}"


def report(*words):
    return run_app(cli.app, ["report", *map(str, words)])


def test_the_command_writes_into_the_run_or_where_it_is_told(run_folders, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calm, rough = run_folders
    assert report(calm) == 0
    assert capsys.readouterr().out.strip() == str(calm / "report.html")
    assert (calm / "report.html").read_text().startswith("<!doctype html>")
    assert report(calm, rough, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["report"] == "report.html"
    assert [run["status"] for run in result["runs"]] == ["done at step 60", "done at step 40"]
    assert report(calm, "--out", tmp_path / "new/page.html") == 0
    assert (tmp_path / "new/page.html").exists()


@pytest.mark.parametrize(
    ("words", "hint"), [(["nowhere"], "nowhere is not a folder"), ([], "RUN"), (["{calm}", "{calm}"], "each run once"),
                        (["{calm}", "--out", "/proc/x.html"], "/proc/x.html")]
)  # fmt: skip
def test_bad_input_is_one_line_and_nothing_written(run_folders, words, hint, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert report(*[word.format(calm=run_folders[0]) for word in words]) == 2
    output = capsys.readouterr()
    assert output.err.count("\n") == 1
    assert hint in output.err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_runs_is_answered_with_the_runs_in_it(tmp_path, capsys):
    for number in range(6):
        (tmp_path / f"run-{number}").mkdir()
        (tmp_path / f"run-{number}" / "events.jsonl").write_text("")
        os.utime(tmp_path / f"run-{number}", (number, number))
    assert report(tmp_path) == 2
    newest = ", ".join(f"{tmp_path}/run-{number}" for number in (5, 4, 3, 2))
    assert capsys.readouterr().err.endswith(f"is there; the runs below are {newest} and 2 more\n")


def test_prompts_are_continued_once_a_step_and_kept(tmp_path, capsys):
    corpus = command_line.write_text_corpus(tmp_path / "corpus")
    recipe = command_line.write_recipe(tmp_path / "r.yaml", corpus)
    assert run_app(cli.app, ["pretrain", "--config", str(recipe), "--out", str(tmp_path / "run"), "--seed", "1"]) == 0
    for _ in range(2):
        assert report(tmp_path / "run", "--prompt", "A sentence", "--prompt", "def ") == 0
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    assert [(sample["step"], sample["prompt"]) for sample in samples] == [(4, "A sentence"), (4, "def ")]
    page = (tmp_path / "run/report.html").read_text()
    assert page.count('<div class="sample') == 2
    assert '<span class="prompt">A sentence</span>' in page


def test_prompts_need_a_checkpoint_and_the_tokenizers_vocabulary(run_folders, tmp_path, capsys):
    assert report(run_folders[0], "--prompt", "x") == 2
    assert "rows, but the tokenizer llama3 has vocab_size 128000" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("")
    assert report(tmp_path, "--prompt", "x") == 2
    assert "has no complete one yet" in capsys.readouterr().err
