"""`verify`: names each bad file, exits non-zero, rebuilds a missing manifest and never guesses."""

import json

import numpy as np
import pytest
import typer

from shared_data.console import run_app
from shared_data.manifest import CorpusInfo, Manifest, SourceInfo
from shared_data.shard_writer import write_corpus
from shared_data.verify import verify

EOS = 128009
INFO = CorpusInfo(
    corpus="c0",
    mixture="tiny",
    tokenizer_name="llama3",
    vocab_size=128000,
    eos_token_id=EOS,
    pad_token_id=128002,
    shard_size_tokens=60,
    sources=[SourceInfo(id="a", weight=1.0)],
)


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    write_corpus(folder, INFO, [(range(n), 0, n) for n in range(25)])
    write_corpus(folder / "validation", INFO, [([5, 6], 0, 2)], split="validation")
    return folder


def run(*words) -> int:
    app = typer.Typer()
    app.command()(verify)
    return run_app(app, [str(word) for word in words])


def damage(path, offset, content):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


def token(value) -> bytes:
    return np.array([value], "<u4").tobytes()


def rehash(corpus, name):
    """Make the manifest agree with a changed shard, so that only the deeper checks can see it."""
    from shared_data.files import sha256_file

    content = json.loads((corpus / "manifest.json").read_text())
    for shard in content["shards"]:
        if shard["path"] == name:
            shard["sha256"] = sha256_file(corpus / name)
    (corpus / "manifest.json").write_text(json.dumps(content))


def test_a_good_corpus_passes(corpus, capsys):
    assert run(corpus) == 0
    out = capsys.readouterr().out
    assert f"{corpus}: " in out
    assert "all good" in out
    assert run(corpus, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result[str(corpus)]["documents"] == 25
    assert result[f"{corpus}/validation"]["problems"] == []


def test_d8_every_bad_file_is_named(corpus, capsys):
    damage(corpus / "shard_00001.bin", 8, b"\x01")
    (corpus / "shard_00003.bin").unlink()
    path = corpus / "shard_00004.bin"
    path.write_bytes(path.read_bytes()[:-4])
    damage(corpus / "validation" / "shard_00000.bin", 0, b"\x09")
    assert run(corpus) == 1
    said = capsys.readouterr().err
    assert "shard_00001.bin: SHA-256 is" in said
    assert "shard_00003.bin is not there" in said
    assert "shard_00004.bin has" in said
    assert "validation/shard_00000.bin: SHA-256 is" in said
    assert said.count("bad: ") == 4


@pytest.mark.parametrize(
    ("value", "place", "message"),
    [
        (128000, 0, "token 0 is 128000, not below vocab_size (128000)"),
        (128002, 1, "token 1 is 128002, not below vocab_size"),
        (EOS, 1, "documents, but manifest.json says"),
    ],
)
def test_d10_ids_and_counts_are_read_again(corpus, capsys, value, place, message):
    damage(corpus / "shard_00002.bin", 4 * place, token(value))
    rehash(corpus, "shard_00002.bin")
    assert run(corpus) == 1
    assert message in capsys.readouterr().err


def test_a_moved_document_end_is_seen(corpus, capsys):
    path = corpus / "shard_00002.bin"
    ids = np.fromfile(path, "<u4")
    end = int(np.flatnonzero(ids == EOS)[0])
    ids[[end - 1, end]] = ids[[end, end - 1]]
    ids.tofile(path)
    rehash(corpus, path.name)
    assert run(corpus) == 1
    assert "its documents do not end where those of shard_00002.bin do" in capsys.readouterr().err


def test_damaged_or_missing_ids_of_documents_are_seen(corpus, capsys):
    names = [f"https://example.org/{n}" for n in range(25)]
    write_corpus(corpus, INFO, [(range(n), 0, n) for n in range(25)], names=names)
    assert run(corpus) == 0
    path = corpus / "shard_00001.idx"
    whole = path.read_bytes()
    for damaged in (whole.replace(b"example", b"exbmple", 1), whole.replace(b'"id_ends"', b'"id_endz"', 1)):
        assert damaged != whole
        path.write_bytes(damaged)
        capsys.readouterr()
        assert run(corpus) == 1
        assert f"{path}: not a whole sidecar" in capsys.readouterr().err
    path.write_bytes(whole)
    assert run(corpus) == 0


def test_wrong_counts_in_the_manifest_are_seen(corpus, capsys):
    content = json.loads((corpus / "manifest.json").read_text())
    content["sources"]["a"]["documents"] += 1
    (corpus / "manifest.json").write_text(json.dumps(content))
    assert run(corpus) == 1
    assert "manifest.json: sources is" in capsys.readouterr().err


def test_d7_a_missing_manifest_is_refused_then_rebuilt(corpus, capsys):
    before = [(own / "manifest.json").read_bytes() for own in (corpus, corpus / "validation")]
    for own in (corpus, corpus / "validation"):
        (own / "manifest.json").unlink()
    assert run(corpus) == 2
    assert f"gpt-oss-lite verify {corpus} --repair" in capsys.readouterr().err
    assert run(corpus, "--repair") == 0
    assert [(own / "manifest.json").read_bytes() for own in (corpus, corpus / "validation")] == before


def test_d7_repair_does_not_take_damage_for_truth(corpus, capsys):
    (corpus / "manifest.json").unlink()
    damage(corpus / "shard_00001.bin", 8, b"\x01")
    assert run(corpus, "--repair") == 1
    assert "shard_00001.bin: SHA-256 is" in capsys.readouterr().err
    (corpus / "manifest.json").unlink()
    (corpus / "shard_00001.idx").unlink()
    assert run(corpus, "--repair") == 2
    assert "shard_00001.idx is not there" in capsys.readouterr().err
    assert not (corpus / "manifest.json").exists()


def test_a_corpus_of_another_program_without_sidecars_can_be_verified(corpus):
    content = json.loads((corpus / "manifest.json").read_text())
    del content["corpus"]
    (corpus / "manifest.json").write_text(json.dumps(content))
    for path in corpus.glob("*.idx"):
        path.unlink()
    assert Manifest.load(corpus).corpus is None
    assert run(corpus) == 0


def test_several_corpora_are_verified_together(corpus, tmp_path, capsys):
    other = tmp_path / "other"
    write_corpus(other, INFO, [(range(n), 0, n) for n in range(9)])
    assert run(corpus, other, "--json") == 0
    assert list(json.loads(capsys.readouterr().out)) == [str(corpus), f"{corpus}/validation", str(other)]
    damage(other / "shard_00000.bin", 8, token(7))
    assert run(corpus, other) == 1
    assert f"bad: {other}/shard_00000.bin: SHA-256 is" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nowhere", "corpus/manifest.json"])
def test_what_is_no_folder_is_refused(corpus, capsys, name):
    assert run(corpus.parent / name) == 2
    assert "is not a folder" in capsys.readouterr().err
