"""The documented command, `python data/prepare_data.py --stage pretrain`, as a person types it."""

import gzip
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
WEIGHTS = {"web": 0.5, "code": 0.3, "math": 0.2}


def prepare(
    folder: Path, *options: str, prefix: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess:
    """Run the command in `folder`, as in a checkout that is not installed."""
    command = [*prefix, sys.executable, str(REPOSITORY / "data" / "prepare_data.py"), "--stage", "pretrain"]
    command += ["--mixture", "mixture.yaml", "--data-config", "data_config.yaml", "--workers", "1", *options]
    environment = {**os.environ, **environment}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def write_corpus(folder: Path) -> None:
    """Small sources in three formats with the two config files."""
    rng = random.Random(3)
    texts = {
        source: [" ".join(str(rng.randint(0, 10**6)) for _ in range(rng.randint(20, 60))) for _ in range(80)]
        for source in WEIGHTS
    }
    (folder / "in" / "code").mkdir(parents=True)
    lines = {source: "".join(json.dumps({"text": text}) + "\n" for text in own) for source, own in texts.items()}
    (folder / "in" / "web.jsonl").write_text(lines["web"])
    (folder / "in" / "math.json.gz").write_bytes(gzip.compress(lines["math"].encode()))
    for number, text in enumerate(texts["code"]):
        (folder / "in" / "code" / f"{number:03d}.txt").write_text(text)
    files = {"web": "in/web.jsonl", "code": "in/code/*.txt", "math": "in/math.json.gz"}
    sources = [{"id": source, "weight": weight, "files": [files[source]]} for source, weight in WEIGHTS.items()]
    (folder / "mixture.yaml").write_text(yaml.safe_dump({"name": "tiny", "sources": sources}))
    settings = {"total_tokens": 9000, "validation_share": 0.05, "pipeline": {"quality": {"min_chars": 40}}}
    (folder / "data_config.yaml").write_text(yaml.safe_dump(settings))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkout")
    write_corpus(folder)
    return folder, prepare(folder, "--shard-size-tokens", "3000")


def test_the_command_makes_what_training_reads(prepared):
    folder, ran = prepared
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == ""
    corpus = folder / "data" / "pretrain_chinchilla"
    manifest = json.loads((corpus / "manifest.json").read_text())
    expected = {"version": "1.0.0", "vocab_size": 128000, "eos_token_id": 128009, "pad_token_id": 128002,
                "tokenizer_name": "llama3", "dtype": "uint32", "shard_size_tokens": 3000}  # fmt: skip
    assert {key: manifest[key] for key in expected} == expected
    assert manifest["total_tokens"] >= 9000
    assert manifest["shard_count"] == len(manifest["shards"]) == len(list(corpus.glob("shard_*.bin")))
    assert set(manifest["shards"][0]) >= {"index", "path", "n_tokens", "sha256", "n_eos"}
    assert set(manifest["sources"]) == set(WEIGHTS)
    ids = np.concatenate([np.fromfile(corpus / shard["path"], "<u4") for shard in manifest["shards"]])
    assert len(ids) == manifest["total_tokens"]
    assert set(ids[ids >= 128000].tolist()) == {128009}
    assert (ids == 128009).sum() == sum(shard["n_eos"] for shard in manifest["shards"])
    assert (corpus / "validation" / "manifest.json").is_file()
    assert "training tokens in" in ran.stderr
    assert "\r" not in ran.stderr


def test_stages_can_be_skipped_and_reports_come_as_json(prepared):
    folder, _ = prepared
    skips = ("--skip-download", "--skip-clean", "--skip-tokenize")
    before = (folder / "data" / "pretrain_chinchilla" / "manifest.json").read_bytes()
    ran = prepare(folder, "--shard-size-tokens", "3000", *skips, "--json")
    assert ran.returncode == 0, ran.stderr
    reports = json.loads(ran.stdout)
    assert [report["stage"] for report in reports] == ["download", "clean", "tokenize", "pack"]
    code = reports[0]["sources"]["code"]
    assert {name: code[name] for name in ("read", "kept", "dropped", "changed")} == {
        "read": 80, "kept": 80, "dropped": {}, "changed": {}
    }  # fmt: skip
    assert code["work"]["input_bytes"] == code["work"]["processed_bytes"] > 0
    assert (folder / "data" / "pretrain_chinchilla" / "manifest.json").read_bytes() == before


def test_one_source_and_another_data_root(prepared, tmp_path):
    folder, _ = prepared
    ran = prepare(folder, "--source", "code", "--total-tokens", "2000", LLM_DATA_ROOT=str(tmp_path / "elsewhere"))
    assert ran.returncode == 0, ran.stderr
    manifest = json.loads((tmp_path / "elsewhere" / "pretrain_chinchilla" / "manifest.json").read_text())
    assert list(manifest["sources"]) == ["code"]
    assert manifest["total_tokens"] >= 2000


def test_dry_run_tells_what_to_expect_and_does_nothing(prepared, tmp_path):
    folder, _ = prepared
    ran = prepare(folder, "--dry-run", "--json", LLM_DATA_ROOT=str(tmp_path / "nothing"))
    assert ran.returncode == 0, ran.stderr
    expected = json.loads(ran.stdout)["sources"]
    assert {source: own["tokens_wanted"] for source, own in expected.items()} == {
        "web": 4500,
        "code": 2700,
        "math": 1800,
    }
    # The sample is the whole of so small a source: the estimate is what the run then counted.
    reports = {stage: json.loads((folder / "data/state/reports" / f"{stage}.json").read_text())["sources"]
               for stage in ("clean", "tokenize", "pack")}  # fmt: skip
    for source in WEIGHTS:
        assert expected[source]["tokens_expected"] == pytest.approx(reports["tokenize"][source]["tokens"], rel=0.02)
        assert expected[source]["share_kept"] == 1.0
        assert expected[source]["seconds"] > 0
    assert "too little text" not in ran.stderr
    assert "GB of disk" in ran.stderr
    assert not (tmp_path / "nothing").exists()


def test_names_that_readers_of_the_description_import():
    from shared_data.config import PIPELINE_VERSION, UNIVERSAL_TOTAL_TOKENS, load_universal_data_config
    from shared_data.prepare_data import main

    assert (PIPELINE_VERSION, UNIVERSAL_TOTAL_TOKENS) == ("1.0.0", 8_000_000_000)
    assert load_universal_data_config().tokenizer.name == "llama3"
    assert callable(main)


def edit(name: str, **changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))

    return change


def replace(name: str, content: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(content)

    return change


def remove(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()

    return change


def cut_off(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return change


def forbid(name: str, mode: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        if name == "data":
            (folder / name).mkdir()
        (folder / name).chmod(mode)

    return change


# (change, options, what the line must name)
BAD_INPUT = {
    "missing source": (remove("in/web.jsonl"), (), ["source web", "in/web.jsonl matches no file"]),
    "missing mixture": (remove("mixture.yaml"), (), ["mixture.yaml: No such file"]),
    "unreadable source": (forbid("in/web.jsonl", 0), (), ["in/web.jsonl: Permission denied"]),
    "unreadable config": (forbid("data_config.yaml", 0), (), ["data_config.yaml: Permission denied"]),
    "folder without write permission": (forbid("data", 0o555), (), ["data", "Permission denied"]),
    "empty source": (replace("in/web.jsonl", ""), (), ["source web: all its files are empty"]),
    "empty config": (replace("data_config.yaml", ""), (), ["data_config.yaml: the file is empty"]),
    "empty corpus": (replace("in/web.jsonl", '{"text": "short"}\n'), (), ["source web has no document left"]),
    "no text field": (
        replace("in/web.jsonl", '{"title": "t", "body": "x"}\n'), (),
        ["mixture.yaml: source web: none of its 1 record has text in 'text'; set text_field",
         "(the first record has: title, body)"]),
    "no text field, seen by a dry run": (
        replace("in/web.jsonl", '{"title": "t", "body": "x"}\n'), ("--dry-run",),
        ["mixture.yaml: source web: none of its 1 record has text in 'text'", "(the first record has: title, body)"]),
    "wrong tokenizer": (
        edit("data_config.yaml", tokenizer={"name": "gpt2"}), (), ["data_config.yaml", "gpt2", "llama3"]
    ),
    "wrong vocabulary": (
        edit("data_config.yaml", tokenizer={"vocab_size": 50257}), (), ["tokenizer.vocab_size is 50257", "has 128000"]
    ),
    "wrong end id": (edit("data_config.yaml", tokenizer={"eos_token_id": 0}), (), ["eos_token_id is 0", "has 128009"]),
    "non-finite value": (edit("data_config.yaml", validation_share=float("nan")), (), ["validation_share is nan"]),
    "unknown key": (edit("data_config.yaml", sed=3), (), ["sed is not a known key", "the nearest known key is seed"]),
    "unknown source": (replace("x", ""), ("--source", "wob"), ["--source is 'wob'", "web, code, math"]),
    "unknown option": (replace("x", ""), ("--wrokers", "3"), ["--wrokers"]),
    "no workers": (replace("x", ""), ("--workers", "0"), ["--workers"]),
    "skipped too early": (replace("x", ""), ("--skip-download",), ["raw/web/data.jsonl is not there"]),
    "too little text": (replace("x", ""), ("--total-tokens", "900000"), ["web needs 450,000 tokens", "short by"]),
    "truncated archive": (cut_off("in/math.json.gz"), (), ["in/math.json.gz: the compressed file is cut off"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, name):
    change, options, expected = BAD_INPUT[name]
    write_corpus(tmp_path)
    change(tmp_path)
    # Root may read and write everything: without these two capabilities it is held to the permissions like anyone.
    prefix = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
    ran = prepare(tmp_path, *options, prefix=prefix)
    lines = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    assert ran.returncode == 2, ran.stderr
    assert len(lines) == 1
    assert all(words in lines[0] for words in expected), lines[0]
    assert "Traceback" not in ran.stderr
    assert ran.stderr.splitlines()[-1] == lines[0]
    assert not (tmp_path / "data" / "pretrain_chinchilla").exists()
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_full_disk_is_one_line_and_nothing_is_marked_done(tmp_path):
    """With files limited to 16 KiB by the system, which fails writes just as a full disk does."""
    write_corpus(tmp_path)
    prefix = ("sh", "-c", 'trap "" XFSZ; ulimit -f 16; exec "$@"', "sh")
    ran = prepare(tmp_path, prefix=prefix)
    assert ran.returncode == 1, ran.stderr
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("error: data/")
    assert last.endswith(": File too large")
    assert not list(tmp_path.rglob("*.tmp"))
    shutil.rmtree(tmp_path / "data" / "raw")
    assert prepare(tmp_path).returncode == 0


def test_debug_shows_the_traceback(tmp_path):
    write_corpus(tmp_path)
    (tmp_path / "mixture.yaml").unlink()
    assert "Traceback" in prepare(tmp_path, "--debug").stderr
