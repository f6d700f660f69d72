"""The four stages together: formats, accounts, determinism."""

import itertools
import json
import os

import numpy as np
import pytest
from pipeline_corpus import (
    STAGES,
    WEIGHTS,
    context_of,
    documents_of,
    hashes,
    lines_of,
    make_corpus,
    prepare,
    run_all,
)

from shared_data.filters import content_digest
from shared_data.manifest import Manifest, read_sidecar
from shared_data.scripts import download_raw
from shared_data.tokenizer import load_tokenizer

EOS = 128009


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


def test_sidecars_name_where_each_document_comes_from(done):
    _, context, _ = done
    layout, tokenizer = context.layout, load_tokenizer()
    texts = {(source, own["id"]): own["text"] for source in WEIGHTS for own in lines_of(layout.root, "clean", source)}
    seen = set()
    for folder in (layout.corpus, layout.corpus / "validation"):
        for path in Manifest.load(folder).shard_paths(folder):
            sidecar, ids = read_sidecar(path, with_ids=True), np.fromfile(path, "<u4")
            for number, name in enumerate(sidecar.ids):
                start = sidecar.starts[number]
                text = tokenizer.decode(ids[start : start + sidecar.lengths[number] - 1].tolist())
                if number in sidecar.inserts:
                    assert name == "passkey"
                else:
                    source = sidecar.sources[sidecar.source_index[number]]
                    assert texts[source, name] == text
                    seen.add((source, name))
            assert read_sidecar(path).ids is None, "read only where it is asked for"
    assert {source for source, _ in seen} == set(WEIGHTS)
    assert len(seen) > 80


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


def test_every_stage_is_covered_by_the_orchestrator():
    from shared_data.prepare_data import STAGES as NAMES

    assert [stage.__name__ for stage in STAGES] == [f"shared_data.scripts.{name}" for name in NAMES]
    assert download_raw.STAGE == "download"
