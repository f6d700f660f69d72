"""`verify --repair`: bad shards made again from the token streams, byte for byte, and nothing else touched."""

import os
import shutil

import numpy as np
import pytest
import typer
from pipeline_corpus import context_of, hashes, make_corpus, run_all

from shared_data.console import run_app
from shared_data.verify import verify


def run(*words) -> int:
    app = typer.Typer()
    app.command()(verify)
    return run_app(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    make_corpus(folder)
    context = context_of(folder)
    run_all(context)
    return context.layout.root


@pytest.fixture
def data(whole, tmp_path):
    """A copy of a prepared data folder in which the corpus shares its files with shards/, as in the original."""
    shutil.copytree(whole, tmp_path / "data")
    root = tmp_path / "data"
    for folder in ("pretrain_chinchilla", "pretrain_chinchilla/validation"):
        for path in (root / folder).glob("shard_*"):
            for twin in (root / "shards").rglob("shard_*"):
                if twin.suffix == path.suffix and twin.read_bytes() == path.read_bytes():
                    path.unlink()
                    os.link(twin, path)
                    break
    return root


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    with open(path, "r+b") as file:  # in place, as a disk does it: all names of the file see it
        file.write(content)


def inodes(root):
    return {path: path.stat().st_ino for path in root.rglob("shard_*")}


@pytest.mark.parametrize("folder", ["pretrain_chinchilla", "shards"])
def test_d8_a_flipped_byte_is_found_and_only_its_shard_rebuilt(data, capsys, folder):
    before, nodes = hashes(data), inodes(data)
    bad = sorted((data / folder).glob("shard_*.bin"))[1]
    flip(bad)
    assert run(data / folder) == 1
    assert f"{bad}: SHA-256 is" in capsys.readouterr().err
    assert run(data / folder, "--repair") == 0
    assert f"{bad}: rebuilt from the token streams" in capsys.readouterr().err
    assert hashes(data) == before
    changed = {path for path, inode in inodes(data).items() if nodes[path] != inode}
    twins = {path for path in inodes(data) if path.samefile(bad) or path.samefile(bad.with_suffix(".idx"))}
    assert len(twins) == 4, "both names of the shard and of its sidecar are whole again"
    assert changed == twins


@pytest.mark.parametrize(
    "lost", ["shard_00000.bin", "shard_00002.idx", "validation/shard_00000.bin", "shard_00003.bin"]
)
def test_what_is_lost_or_cut_is_rebuilt(data, lost):
    before = hashes(data)
    path = data / "pretrain_chinchilla" / lost
    if lost == "shard_00003.bin":
        path.write_bytes(path.read_bytes()[:-4])
    else:
        path.unlink()
    assert run(data / "pretrain_chinchilla") == 1
    assert run(data / "pretrain_chinchilla", "--repair") == 0
    assert hashes(data) == before


def test_a_damaged_manifest_is_rebuilt_from_the_sidecars(data):
    path = data / "pretrain_chinchilla" / "manifest.json"
    whole = path.read_bytes()
    for damaged in (whole[:-100], whole.replace(b'"documents": ', b'"documents": 1')):
        path.write_bytes(damaged)
        assert run(path.parent) != 0
        assert run(path.parent, "--repair") == 0
        assert path.read_bytes() == whole


def test_changed_streams_are_never_put_in(data, capsys):
    path = data / "pretrain_chinchilla" / "shard_00004.bin"
    flip(path)
    damaged = path.read_bytes()
    for stream in (data / "tokens").rglob("*.bin"):
        ids = np.fromfile(stream, "<u4")
        text = np.flatnonzero(ids[2:] != 128009) + 2
        ids[text] = (ids[text] + 1) % 128000
        ids.tofile(stream)
    assert run(path.parent, "--repair") == 1
    assert "the token streams no longer give the bytes that manifest.json names" in capsys.readouterr().err
    assert path.read_bytes() == damaged


def test_without_the_plan_the_error_says_so(data, capsys):
    flip(data / "pretrain_chinchilla" / "shard_00001.bin")
    shutil.rmtree(data / "state")
    assert run(data / "pretrain_chinchilla", "--repair") == 1
    said = capsys.readouterr().err
    assert "shard_00001.bin: SHA-256 is" in said
    assert "the plan of its packing (state/pack/plan.json) is not beside it" in said
