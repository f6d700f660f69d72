"""The four stages together: formats, accounts, determinism, what is redone, kills."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pipeline_corpus import STAGES, WEIGHTS, context_of, edit_yaml, hashes, make_corpus, run_all, sentence, write_lines

from shared_data.errors import UserError
from shared_data.filters import content_digest
from shared_data.manifest import Manifest, read_sidecar
from shared_data.scripts import clean, download_raw, pack_shards, tokenize
from shared_data.tokenizer import load_tokenizer

EOS = 128009


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A corpus that went through all stages in one process; the tests only read it."""
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder)
    context = context_of(folder)
    return folder, context, run_all(context)


@pytest.fixture
def fresh(tmp_path):
    make_corpus(tmp_path)
    return tmp_path


def lines_of(root: Path, stage: str, source: str) -> list[dict]:
    paths = sorted((root / stage / source).glob("data*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def documents_of(folder: Path, inserts: bool = True) -> list[tuple[str, str]]:
    """(source, text) of every document of a packed corpus, in order; with the passkey inserts unless not wanted."""
    tokenizer, found = load_tokenizer(), []
    for path in Manifest.load(folder).shard_paths(folder):
        sidecar, ids = read_sidecar(path), np.fromfile(path, "<u4")
        left_out = set() if inserts else set(sidecar.inserts.tolist())
        columns = zip(sidecar.starts, sidecar.lengths, sidecar.source_index, strict=True)
        for start, length, source in (line for n, line in enumerate(columns) if n not in left_out):
            found.append((sidecar.sources[source], tokenizer.decode(ids[start : start + length - 1].tolist())))
    return found


def test_every_document_is_accounted_for(done):
    _, context, reports = done
    for stage in ("download", "clean", "tokenize"):
        report = json.loads((context.layout.reports / f"{stage}.json").read_text())
        assert report == reports[stage]
        for own in report["sources"].values():
            assert own["read"] == own["kept"] + sum(own["dropped"].values())
    for before, after in (("download", "clean"), ("clean", "tokenize"), ("tokenize", "pack")):
        for source in WEIGHTS:
            assert reports[before]["sources"][source]["kept"] == reports[after]["sources"][source]["read"]
    assert reports["clean"]["sources"]["web"]["dropped"]["duplicate"] == 4
    assert reports["clean"]["sources"]["code"]["dropped"]["duplicate"] == 16


def test_clean_text_is_what_a_plain_loop_keeps(done):
    folder, context, _ = done
    seen: set[bytes] = set()
    for source in WEIGHTS:
        raw = [json.loads(line)["text"] for line in (folder / "sources" / f"{source}.jsonl").read_text().splitlines()]
        expected = []
        for text in raw:
            if len(text.strip()) >= 60 and content_digest(text) not in seen:
                seen.add(content_digest(text))
                expected.append(text)
        assert [record["text"] for record in lines_of(context.layout.root, "clean", source)] == expected


def test_token_streams_have_the_stated_format(done):
    _, context, reports = done
    tokenizer = load_tokenizer()
    for source in WEIGHTS:
        expected = []
        for record in lines_of(context.layout.root, "clean", source):
            expected += [*tokenizer.encode(record["text"]), EOS]
        ids = []
        for path in sorted((context.layout.root / "tokens" / source).glob("tokens*.bin")):
            stream = np.fromfile(path, "<u4")
            assert stream[:2].tolist() == [1, EOS]
            ids += stream[2:].tolist()
        assert ids == expected
        assert reports["tokenize"]["sources"][source]["tokens"] == len(expected)


def test_one_task_makes_one_file_and_several_make_numbered_parts(done, tmp_path):
    _, context, _ = done
    assert len(list((context.layout.root / "raw" / "web").glob("data-0000*.jsonl"))) > 1
    make_corpus(tmp_path, pipeline={"quality": {"min_chars": 60}})
    run_all(context_of(tmp_path))
    root = tmp_path / "data"
    assert [path.name for path in (root / "raw" / "web").iterdir()] == ["data.jsonl"]
    assert [path.name for path in (root / "clean" / "web").iterdir()] == ["data.jsonl"]
    assert sorted(path.name for path in (root / "tokens" / "web").iterdir()) == ["tokens.bin", "tokens.idx"]
    cut, whole = (documents_of(own / "pretrain_chinchilla") for own in (context.layout.root, root))
    assert cut == whole, "how the input is cut into tasks changes no document and no order"


def test_the_corpus_holds_clean_documents_in_the_mixtures_shares(done):
    _, context, reports = done
    layout = context.layout
    documents = documents_of(layout.corpus, inserts=False)
    kept = {source: {own["text"] for own in lines_of(layout.root, "clean", source)} for source in WEIGHTS}
    assert all(text in kept[source] for source, text in documents)
    assert len(set(documents)) == len(documents)
    manifest = Manifest.load(layout.corpus, check_hashes=True)
    assert manifest.mixture == "tiny"
    assert manifest.total_tokens >= 20000
    longest = reports["pack"]["longest_document_tokens"]
    taken, total = dict.fromkeys(WEIGHTS, 0), 0
    for path in manifest.shard_paths(layout.corpus):
        sidecar = read_sidecar(path)
        assert sidecar.n_tokens <= 4000
        for index, source in enumerate(sidecar.sources):
            taken[source] += int(sidecar.lengths[sidecar.source_index == index].sum())
        total += sidecar.n_tokens
        assert all(abs(taken[source] - WEIGHTS[source] * total) <= longest for source in WEIGHTS)
    assert {source: own.tokens for source, own in manifest.sources.items()} == taken


def test_sidecars_count_the_bytes_of_each_document(done):
    _, context, _ = done
    manifest = Manifest.load(context.layout.corpus)
    sizes = [int(n) for path in manifest.shard_paths(context.layout.corpus) for n in read_sidecar(path).n_bytes]
    assert sizes == [len(text.encode()) for _, text in documents_of(context.layout.corpus)]


def test_validation_is_apart_and_the_corpus_shares_its_bytes_with_shards(done):
    _, context, _ = done
    layout = context.layout
    train, validation = documents_of(layout.corpus), documents_of(layout.corpus / "validation")
    assert validation
    assert not {text for _, text in train} & {text for _, text in validation}
    packed = [sorted((layout.shards / split).glob("shard_*.bin")) for split in ("long", "", "validation")]
    published = [sorted((layout.corpus / split).glob("shard_*.bin")) for split in ("", "validation")]
    assert all(packed)
    for path, own in zip(*(itertools.chain(*own) for own in (packed, published)), strict=True):
        for suffix in (".bin", ".idx"):
            assert path.with_suffix(suffix).samefile(own.with_suffix(suffix))
            assert not own.with_suffix(suffix).is_symlink()


@pytest.mark.parametrize("forbidden", [("link",), ("link", "symlink")])
def test_without_hard_links_there_are_symbolic_ones_or_copies(done, tmp_path, monkeypatch, forbidden):
    from shared_data.publish import publish

    _, context, _ = done
    for name in forbidden:
        monkeypatch.setattr(os, name, lambda *_: (_ for _ in ()).throw(OSError(1, "not permitted")))
    manifest = publish([context.layout.shards], tmp_path / "corpus")
    assert Manifest.load(tmp_path / "corpus", check_hashes=True) == manifest
    linked = {path.is_symlink() for path in (tmp_path / "corpus").glob("*.bin")}
    assert linked == {forbidden == ("link",)}


def test_d19_workers_and_hash_seeds_change_no_byte(done, tmp_path):
    folder, context, _ = done
    expected = hashes(context.layout.root)
    for name, workers, seed in (("two", 2, "1"), ("four", 4, "2")):
        prepare(folder, tmp_path / name, "--workers", str(workers), PYTHONHASHSEED=seed)
        assert hashes(tmp_path / name) == expected


def prepare(folder: Path, root: Path, *options: str, **environment: str) -> str:
    """The pipeline as a command; returns what it said on standard error."""
    files = ("--mixture", folder / "mixture.yaml", "--data-config", folder / "data_config.yaml")
    command = [sys.executable, "-m", "shared_data.prepare_data", *map(str, files), "--data-root", str(root), *options]
    ran = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


class Runs:
    """Counts the tasks that are really done, by the name of their work."""

    def __init__(self, monkeypatch) -> None:
        from shared_data import executor

        self.names: list[str] = []
        plain = executor.write_commit

        def counted(record, *rest):
            self.names.append(f"{record.parent.name}/{record.stem.split('-')[0]}")
            return plain(record, *rest)

        monkeypatch.setattr(executor, "write_commit", counted)

    def since_last(self) -> set[str]:
        names, self.names = set(self.names), []
        return names


def test_a_second_run_does_nothing(fresh, monkeypatch):
    runs = Runs(monkeypatch)
    run_all(context_of(fresh))
    assert "web/filter" in runs.since_last()
    root = fresh / "data"
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file() and path.name != "lock"}
    run_all(context_of(fresh))
    after = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file() and path.name != "lock"}
    assert runs.since_last() == set()
    assert after == before


def test_only_what_depends_on_a_change_is_redone(fresh, monkeypatch):
    runs = Runs(monkeypatch)
    run_all(context_of(fresh))
    runs.since_last()

    path = fresh / "sources" / "math.jsonl"
    os.utime(path, (1, 1))
    run_all(context_of(fresh))
    assert runs.since_last() == set(), "a file that only looks new is the same"

    edit_yaml(fresh / "data_config.yaml", total_tokens=15000)
    run_all(context_of(fresh))
    assert runs.since_last() == {"pack/long", "pack/train", "pack/validation"}

    with open(path, "a") as file:
        file.write(
            json.dumps({"text": "one more document that is not like any of the others, of sufficient length"}) + "\n"
        )
    run_all(context_of(fresh))
    redone = runs.since_last()
    assert {"math/task", "math/filter", "math/write", "clean/compare", "pack/train"} <= redone
    assert not {name for name in redone if name.startswith(("web/", "code/"))}

    edit_yaml(fresh / "data_config.yaml", pipeline={"task_bytes": 40000, "quality": {"min_chars": 61}})
    run_all(context_of(fresh))
    assert {"web/filter", "web/write"} <= runs.since_last()


def test_a_change_gives_the_same_bytes_as_a_clean_start(fresh):
    run_all(context_of(fresh))
    edit_yaml(fresh / "data_config.yaml", total_tokens=12000, shard_size_tokens=7000)
    path = fresh / "sources" / "web.jsonl"
    # The texts that web shared with the others go, so that the others now keep theirs.
    path.write_text("".join(path.read_text().splitlines(keepends=True)[20:]))
    run_all(context_of(fresh))
    run_all(context_of(fresh, root="clean-start"))
    assert hashes(fresh / "data") == hashes(fresh / "clean-start")


def test_a_damaged_output_is_made_again(fresh):
    run_all(context_of(fresh))
    expected = hashes(fresh / "data")
    for pattern in ("raw/web/*", "clean/code/*", "tokens/math/*.bin", "shards/*.bin", "shards/validation/*.idx",
                    "pretrain_chinchilla/*.bin", "state/clean/web/digests*"):  # fmt: skip
        path = sorted((fresh / "data").glob(pattern))[0]
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[:-5])
    run_all(context_of(fresh))
    assert hashes(fresh / "data") == expected


KILLER = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from pipeline_corpus import context_of, run_all
countdown, when = int(sys.argv[3]), sys.argv[4]
plain = os.replace
def replace(*paths):
    global countdown
    countdown -= 1
    if countdown == 0 and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    plain(*paths)
    if countdown == 0:
        os.kill(os.getpid(), signal.SIGKILL)
os.replace = replace
run_all(context_of(Path(sys.argv[2]), root=sys.argv[5]))
"""


def test_killed_at_any_rename_and_run_again_gives_the_same_bytes(done, tmp_path):
    """Every file appears by a rename: right before and right after them are all the states a kill can leave."""
    folder, context, _ = done
    script = tmp_path / "killer.py"
    script.write_text(KILLER)
    kills = 0
    for step, when in ((3, "before"), (5, "after"), (16, "before"), (17, "after"), (9, "before"), (30, "after"),
                       (14, "before"), (21, "after"), (11, "before"), (8, "after")):  # fmt: skip
        arguments = [Path(__file__).parent, folder, step, when, tmp_path / "killed"]
        ran = subprocess.run([sys.executable, script, *map(str, arguments)], capture_output=True, text=True)
        kills += ran.returncode == -9
    assert kills >= 8, ran.stderr
    subprocess.run([sys.executable, script, *map(str, arguments[:2]), "0", "", str(tmp_path / "killed")], check=True)
    assert hashes(tmp_path / "killed") == hashes(context.layout.root)


def test_packing_anew_and_killed_never_leaves_a_manifest_that_lies(fresh):
    run_all(context_of(fresh))
    edit_yaml(fresh / "data_config.yaml", total_tokens=15000, shard_size_tokens=3000)
    context = context_of(fresh)
    folders = [root / split for root in (context.layout.shards, context.layout.corpus) for split in ("", "validation")]
    folders.append(context.layout.shards / "long")
    seen = set()
    for countdown in range(1, 60, 4):
        child = os.fork()
        if child == 0:
            pack_and_die(context, countdown)
        _, status = os.waitpid(child, 0)
        there = [folder for folder in folders if (folder / "manifest.json").is_file()]
        seen.add(len(there))
        for folder in there:
            Manifest.load(folder, check_hashes=True)
        if os.WIFEXITED(status):
            break
    assert os.WIFEXITED(status)
    assert len(seen) > 1, "some were killed while a manifest was away"
    run_all(context_of(fresh, root="clean-start"))
    assert hashes(fresh / "data") == hashes(fresh / "clean-start")


def pack_and_die(context, countdown: int) -> None:
    """In a forked child: pack, and be killed right after the given rename or link."""
    plain = {name: getattr(os, name) for name in ("replace", "unlink")}

    def counted(name):
        def call(*arguments, **keywords):
            nonlocal countdown
            plain[name](*arguments, **keywords)
            countdown -= 1
            if countdown == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        return call

    try:
        for name in plain:
            setattr(os, name, counted(name))
        pack_shards.run(context)
        os._exit(0)
    finally:
        os._exit(1)


def test_the_orchestrator_killed_takes_its_stage_along_and_a_new_run_goes_on(done, tmp_path):
    folder, context, _ = done
    files = ("--mixture", folder / "mixture.yaml", "--data-config", folder / "data_config.yaml")
    command = [
        sys.executable,
        "-m",
        "shared_data.prepare_data",
        *map(str, files),
        "--data-root",
        str(tmp_path / "data"),
    ]
    for patience in (0.9, 1.6, 2.5):
        with subprocess.Popen([*command, "--workers", "2"], stderr=subprocess.DEVNULL) as running:
            try:
                running.wait(patience)
            except subprocess.TimeoutExpired:
                running.kill()
    prepare(folder, tmp_path / "data", "--workers", "2")
    assert hashes(tmp_path / "data") == hashes(context.layout.root)


def test_d22_an_empty_source_is_an_error(fresh):
    write_lines(fresh / "sources" / "code.jsonl", ["too short"])
    with pytest.raises(UserError, match="source code has no document left after cleaning"):
        run_all(context_of(fresh))
    (fresh / "sources" / "code.jsonl").write_text("")
    with pytest.raises(UserError, match="source code: all its files are empty"):
        run_all(context_of(fresh))


def test_d23_a_shortage_is_an_error_by_default_or_ends_or_repeats(fresh):
    edit_yaml(fresh / "data_config.yaml", total_tokens=160000)
    with pytest.raises(UserError, match=r"math needs 24,000 tokens and has [\d,]+ \(short by [\d,]+\)"):
        run_all(context_of(fresh))
    assert not (fresh / "data" / "pretrain_chinchilla").exists()

    edit_yaml(fresh / "mixture.yaml", on_shortage="stop")
    stopped = run_all(context_of(fresh))["pack"]
    assert stopped["train_tokens"] < 160000
    assert all(own["repeated_documents"] == 0 for own in stopped["sources"].values())
    assert abs(stopped["largest_deviation_tokens"]) <= stopped["longest_document_tokens"]

    edit_yaml(fresh / "mixture.yaml", on_shortage="repeat", max_epochs=5)
    repeated = run_all(context_of(fresh))["pack"]
    assert repeated["train_tokens"] >= 160000
    assert repeated["sources"]["math"]["repeated_documents"] > 0
    edit_yaml(fresh / "data_config.yaml", total_tokens=10**6)
    with pytest.raises(UserError, match="short by"):
        run_all(context_of(fresh))


def test_d9_a_document_longer_than_a_shard_goes_through(fresh):
    path = fresh / "sources" / "web.jsonl"
    write_lines(
        path, [sentence(random.Random(1), 3000), *[json.loads(line)["text"] for line in path.read_text().splitlines()]]
    )
    edit_yaml(fresh / "mixture.yaml", on_shortage="stop")
    edit_yaml(fresh / "data_config.yaml", validation_share=0.0, total_tokens=10**9)
    report = run_all(context_of(fresh))["pack"]
    assert report["oversized_documents"] == 1
    manifest = Manifest.load(fresh / "data" / "pretrain_chinchilla")
    assert [shard.n_eos for shard in manifest.shards if shard.n_tokens > 4000] == [1]
    assert not (fresh / "data" / "shards" / "validation").exists()


def test_one_source_alone_says_so_in_its_name(fresh):
    context = context_of(fresh, source=["code"], total_tokens=5000)
    run_all(context)
    assert Manifest.load(context.layout.corpus).mixture == "tiny[code]"
    assert [path.name for path in (fresh / "data" / "raw").iterdir()] == ["code"]


def test_skipped_stages_take_files_that_another_program_made(fresh):
    for source in WEIGHTS:
        text = (fresh / "sources" / f"{source}.jsonl").read_text()
        path = fresh / "data" / "raw" / source / "data.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    context = context_of(fresh)
    reports = [stage.run(context) for stage in (clean, tokenize, pack_shards)]
    assert reports[0]["sources"]["web"]["read"] == 256
    run_all(context_of(fresh, root="whole"))
    mine, whole = (fresh / root / "pretrain_chinchilla" for root in ("data", "whole"))
    assert documents_of(mine) == documents_of(whole)


def test_a_stage_without_its_input_names_the_stage_to_run(fresh):
    context = context_of(fresh)
    for stage, missing in ((clean, "download"), (tokenize, "clean"), (pack_shards, "tokenize")):
        with pytest.raises(UserError, match=f"run the {missing} stage, without --skip-{missing}"):
            stage.run(context)


def test_d27_a_text_that_the_encoder_cannot_do_is_counted_and_the_file_goes_on(fresh, monkeypatch):
    from shared_data.tokenizer import Tokenizer

    plain = Tokenizer.encode_array
    calls = iter(range(10**6))

    def broken(self, text):
        if next(calls) == 5:
            raise ValueError("cannot")
        return plain(self, text)

    monkeypatch.setattr(Tokenizer, "encode_array", broken)
    reports = run_all(context_of(fresh))
    assert reports["tokenize"]["sources"]["web"]["dropped"] == {"tokenizer_error": 1}
    assert reports["tokenize"]["sources"]["code"]["dropped"] == {}


def test_a_local_data_set_is_read_file_by_file(fresh):
    import pyarrow
    import pyarrow.parquet

    folder = fresh / "dataset"
    folder.mkdir()
    texts = [json.loads(line)["text"] for line in (fresh / "sources" / "web.jsonl").read_text().splitlines()]
    for index in range(2):
        table = pyarrow.table({"text": texts[index::2], "id": [f"doc-{n}" for n in range(len(texts[index::2]))]})
        pyarrow.parquet.write_table(table, folder / f"part-{index}.parquet")
    source = {"id": "web", "weight": 1.0, "dataset": str(folder)}
    edit_yaml(fresh / "mixture.yaml", sources=[source])
    edit_yaml(fresh / "data_config.yaml", total_tokens=5000)
    context = context_of(fresh)
    run_all(context)
    records = lines_of(context.layout.root, "raw", "web")
    assert [record["text"] for record in records] == texts[0::2] + texts[1::2]
    assert records[0]["id"] == "doc-0"
    assert len(list((context.layout.root / "raw" / "web").iterdir())) == 2


def test_a_data_set_that_cannot_be_opened_is_one_line():
    from shared_data.config import Source
    from shared_data.hub import explain

    class GatedRepoError(Exception):
        pass

    gated = explain(
        Source(id="a", weight=1.0, dataset="bigcode/the-stack-dedup"),
        GatedRepoError("403 Client Error\nAccess is restricted"),
    )
    assert "https://huggingface.co/datasets/bigcode/the-stack-dedup" in gated
    assert "hf auth login" in gated
    assert (
        explain(Source(id="a", weight=1.0, dataset="x/y"), ValueError("no\nsuch thing"))
        == "cannot be opened (ValueError: no such thing)"
    )


def test_a_missing_data_set_is_named_with_its_source(fresh):
    edit_yaml(fresh / "mixture.yaml", sources=[{"id": "web", "weight": 1.0, "dataset": str(fresh / "nowhere")}])
    with pytest.raises(UserError, match=r"source web: dataset .*nowhere: cannot be opened"):
        download_raw.run(context_of(fresh))


def test_leading_data_stands_for_the_data_root(fresh, monkeypatch):
    monkeypatch.chdir(fresh)
    write_lines(fresh / "elsewhere" / "in.jsonl", [sentence(random.Random(2), 50)])
    edit_yaml(fresh / "mixture.yaml", sources=[{"id": "web", "weight": 1.0, "files": ["data/in.jsonl"]}])
    assert download_raw.run(context_of(fresh, root="elsewhere"))["sources"]["web"]["kept"] == 1


def test_every_stage_is_covered_by_the_orchestrator():
    from shared_data.prepare_data import STAGES as NAMES

    assert [stage.__name__ for stage in STAGES] == [f"shared_data.scripts.{name}" for name in NAMES]
    assert download_raw.STAGE == "download"
