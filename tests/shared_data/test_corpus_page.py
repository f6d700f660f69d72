"""The corpus's page: figures from the reports and the manifest, real samples, one self-contained file."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from pipeline_corpus import WEIGHTS, context_of, make_corpus, run_all

from gpt_oss_lite import cli
from shared_data.console import run_app
from shared_data.dropped import dropped_samples
from shared_data.manifest import Manifest
from shared_data.page import gather, render, write_page

VOID = {"meta", "br"}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    make_corpus(folder)
    path = folder / "sources" / "web.jsonl"
    lines = [{"text": "<script>alert(1)</script> & \x00 tiny"}, {"nothing": 1}, {"text": ""}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + path.read_text() + "{broken\n")
    context = context_of(folder)
    return context, run_all(context)


class Checker(HTMLParser):
    """Every element closed in order, and nothing loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attributes):
        assert tag not in ("script", "link", "img", "iframe")
        assert not {name for name, _ in attributes} & {"src", "href", "onclick"}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_whole_self_contained_and_shows_the_reports_figures(done):
    context, reports = done
    page = write_page(context).read_text()
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    text = "".join(checker.text)
    manifest = Manifest.load(context.layout.corpus)
    assert f"{manifest.total_tokens:,}" in text
    for source in WEIGHTS:
        assert f"{manifest.sources[source].tokens:,}" in text
        assert f"{reports['pack']['sources'][source]['share']:.2%}" in text
        assert f"{source} · {reports['pack']['sources'][source]['train_documents']:,} documents" in text
        for reason, count in reports["clean"]["sources"][source]["dropped"].items():
            assert re.search(rf"{reason} {count:,}(?!\d)", text)
    duplicates = sum(own["dropped"]["duplicate"] for own in reports["clean"]["sources"].values())
    kept = sum(own["kept"] for own in reports["clean"]["sources"].values())
    assert f"{duplicates / (kept + duplicates):.2%}" in text
    assert "url(" not in page
    assert "@import" not in page


def cells_of(page, heading):
    """The rows of a section's table."""
    section = page.partition(f"<h2>{heading}</h2>")[2].partition("</section>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", section)
    return [[re.sub("<.*?>", "", cell) for cell in re.findall(r"<t[dh].*?>(.*?)</t[dh]>", row)] for row in rows]


def test_training_and_validation_add_up_to_what_packing_kept(done):
    context, reports = done
    head, *rows = cells_of(render(gather(context)), "Training and validation")
    assert head == ["source", "training documents", "+ validation", "= in all", "training tokens", "+ validation",
                    "= in all"]  # fmt: skip
    found = {name: [int(cell.replace(",", "")) for cell in cells] for name, *cells in rows}
    packed = reports["pack"]["sources"]
    for source in WEIGHTS:
        training, held_out, documents, tokens, held_out_tokens, total = found[source]
        assert (training + held_out, tokens + held_out_tokens) == (documents, total)
        assert (documents, held_out) == (packed[source]["kept"], packed[source]["validation_documents"])
        assert tokens == packed[source]["train_tokens"]
    assert found["all"] == [sum(found[source][column] for source in WEIGHTS) for column in range(6)]
    assert found["all"][3:5] == [reports["pack"]["train_tokens"], reports["pack"]["validation_tokens"]]
    assert found["all"][1] > 0


def test_samples_are_what_the_rules_dropped_and_no_more(done):
    context, reports = done
    for source in context.sources:
        samples = dropped_samples(context, source)
        dropped = reports["clean"]["sources"][source.id]["dropped"]
        assert {reason: min(3, count) for reason, count in dropped.items()} == {
            reason: len(own) for reason, own in samples.items()
        }
    web = dropped_samples(context, context.sources[0])
    assert all(len(sample.text.strip()) < 60 for sample in web["too_short"])
    assert any("<script>" in sample.text for sample in web["too_short"])
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; \ufffd tiny" in render(gather(context))


@pytest.mark.parametrize("sampled_bytes", [2000, 5000, 20000])
def test_a_document_beyond_what_was_read_is_not_taken_for_a_duplicate(done, monkeypatch, sampled_bytes):
    context, _ = done
    monkeypatch.setattr("shared_data.dropped.SAMPLED_BYTES", sampled_bytes)
    for source in context.sources:
        clean = sorted((context.layout.root / "clean" / source.id).glob("*.jsonl"))
        kept = {json.loads(line)["id"] for path in clean for line in path.read_text().splitlines()}
        for samples in dropped_samples(context, source).values():
            assert not {sample.id for sample in samples} & kept


def test_without_raw_text_or_reports_the_rest_is_still_shown(done, tmp_path):
    context, _ = done
    shutil.copytree(context.layout.root, tmp_path / "data")
    for name in ("raw", "state"):
        shutil.rmtree(tmp_path / "data" / name)
    bare = context_of(tmp_path.parent / context.layout.root.parent, root=str(tmp_path / "data"))
    page = render(gather(bare))
    assert "Training tokens by source" in page
    assert "What the rules dropped" not in page
    Checker().feed(page)


@pytest.mark.parametrize("corpus", ["", "pretrain_chinchilla"])
def test_the_command_takes_the_data_folder_or_the_corpus_in_it(done, tmp_path, corpus):
    context, _ = done
    folder = context.layout.root.parent
    words = ["corpus", str(context.layout.root / corpus), "--mixture", str(folder / "mixture.yaml"), "--data-config",
             str(folder / "data_config.yaml"), "--out", str(tmp_path / "page.html")]  # fmt: skip
    assert run_app(cli.app, words) == 0
    assert "Training tokens by source" in (tmp_path / "page.html").read_text()


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_shows_it_without_a_word_on_its_console(done, tmp_path):
    context, _ = done
    path = write_page(context, tmp_path / "page.html")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--dump-dom", path.as_uri()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "<dt>training tokens</dt>" in ran.stdout
    assert "CONSOLE" not in ran.stderr
