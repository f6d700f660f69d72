"""`inspect`: windows as text, with boundaries and sources."""

import json

import numpy as np
import pytest
import typer
from pipeline_corpus import context_of, make_corpus, run_all

from shared_data.console import run_app
from shared_data.inspection import Corpus, excerpt, inspect
from shared_data.manifest import Manifest, read_sidecar
from shared_data.tokenizer import load_tokenizer

WINDOW = 1024
EOS = 128009


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect")
    make_corpus(folder)
    context = context_of(folder)
    run_all(context)
    return context.layout.corpus


def run(*words) -> int:
    app = typer.Typer()
    app.command()(inspect)
    return run_app(app, [str(word) for word in words])


@pytest.mark.parametrize("window", [1, 77, 1024, 5000])
def test_the_pieces_of_all_windows_are_the_corpus(corpus, window):
    manifest, tokenizer = Manifest.load(corpus), load_tokenizer()
    ids = np.concatenate([np.fromfile(path, "<u4") for path in manifest.shard_paths(corpus)])
    if window < 1000:
        ids = ids[: 40 * window]
    own, begin = Corpus(corpus), 0
    while begin < len(ids):
        end = min(begin + window, len(ids))
        pieces = list(own.pieces(begin, end))
        assert [piece.begin for piece in pieces] == [0, *np.cumsum([p.n_tokens for p in pieces])[:-1].tolist()]
        assert sum(piece.n_tokens for piece in pieces) == end - begin
        assert sum(piece.ends_here for piece in pieces) == (ids[begin:end] == EOS).sum()
        for piece in pieces:
            part = ids[begin + piece.begin : begin + piece.begin + piece.n_tokens]
            assert piece.text == tokenizer.decode(part[part != EOS].tolist())
            before = begin + piece.begin - 1
            assert piece.starts_here == (before < 0 or ids[before] == EOS)
        begin = end


def test_sources_and_passkeys_are_those_of_the_sidecar(corpus, capsys):
    assert run(corpus, "--window", 0, "--window-tokens", WINDOW, "--json") == 0
    [shown] = json.loads(capsys.readouterr().out)
    sidecar = read_sidecar(corpus / "shard_00000.bin")
    expected = [sidecar.sources[index] for index in sidecar.source_index[: len(shown["pieces"])]]
    assert [piece["source"] for piece in shown["pieces"]] == expected
    names = read_sidecar(corpus / "shard_00000.bin", with_ids=True).ids
    assert [piece["id"] for piece in shown["pieces"]] == names[: len(shown["pieces"])]
    assert run(corpus, "--window", 0, "--window-tokens", WINDOW) == 0
    text = next(piece for piece in shown["pieces"] if not piece["is_passkey"])
    assert f", from {text['id']}\n{text['text'][:100]}" in capsys.readouterr().out
    passkeys = [piece["document"] for piece in shown["pieces"] if piece["is_passkey"]]
    assert passkeys == [number for number in sidecar.inserts.tolist() if number < len(expected)]
    assert passkeys


def test_text_shows_boundaries_and_sources(corpus, capsys):
    assert run(corpus, "--window", 0, "--window-tokens", WINDOW) == 0
    out = capsys.readouterr().out
    assert "=== window 0 of " in out
    assert "--- web: document 0 of shard_00000.bin, tokens 0 to " in out or "--- web, passkey: document 0" in out
    assert "The pass key is" in out
    assert "[end of document]" in out
    assert run(corpus, "--window", 9, "--window-tokens", 100) == 0
    out = capsys.readouterr().out
    assert "begun in an earlier window" in out
    assert "[goes on in the next window]" in out


def test_a_seed_shows_the_same_windows_and_a_source_only_its_own(corpus, capsys):
    shown = []
    for words in (("--seed", 4), ("--seed", 4), ("--seed", 5)):
        assert run(corpus, "--json", "--windows", 3, "--window-tokens", 300, *words) == 0
        shown.append([window["window"] for window in json.loads(capsys.readouterr().out)])
    assert shown[0] == shown[1] != shown[2]
    assert run(corpus, "--json", "--source", "math", "--windows", 4, "--window-tokens", 300) == 0
    windows = json.loads(capsys.readouterr().out)
    assert len(windows) == 4
    assert all("math" in {piece["source"] for piece in window["pieces"]} for window in windows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--source", "wob"), "--source is 'wob': the corpus has web, code, math"),
        (("--window", "9999"), "--window is 9999: the corpus has "),
        (("--window-tokens", "0"), "--window-tokens"),
    ],
)
def test_bad_options_are_one_line(corpus, capsys, words, message):
    assert run(corpus, *words) == 2
    assert message in capsys.readouterr().err
    assert run(corpus / "nowhere") == 2


def test_without_sidecars_the_boundaries_come_from_the_eos(corpus, tmp_path):
    from shared_data.links import share_file

    for path in [*corpus.glob("*.bin"), corpus / "manifest.json"]:
        share_file(path, tmp_path / path.name, symbolic=True)
    with_sidecars = list(Corpus(corpus).pieces(0, 3000))
    without = list(Corpus(tmp_path).pieces(0, 3000))
    assert [(piece.begin, piece.text) for piece in without] == [(piece.begin, piece.text) for piece in with_sidecars]
    assert {piece.source for piece in without} == {None}


def test_an_excerpt_says_what_it_leaves_out_and_hides_no_control_character():
    text = "a" * 50 + "\x1b[31m" + "b" * 50
    assert excerpt(text, 1000) == "a" * 50 + "\\x1b[31m" + "b" * 50
    assert "[... 88 characters ...]" in excerpt(text, 10)
