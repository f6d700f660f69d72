"""Manifest, sidecars and the shard writer."""

import hashlib
import json

import numpy as np
import pytest
import safetensors

from shared_data.errors import UserError
from shared_data.manifest import CorpusInfo, Manifest, Position, SourceInfo, read_sidecar
from shared_data.manifest_builder import build_manifest
from shared_data.shard_writer import ShardWriter, split_into_shards, write_corpus

EOS = 128009
INFO = CorpusInfo(
    corpus="c0",
    mixture="tiny",
    tokenizer_name="llama3",
    vocab_size=128000,
    eos_token_id=EOS,
    pad_token_id=128002,
    shard_size_tokens=100,
    sources=[SourceInfo(id="a", weight=0.5), SourceInfo(id="b", weight=0.5)],
)


@pytest.fixture
def corpus(tmp_path):
    documents = [(list(range(n % 37)), n % 2, 3 * n) for n in range(40)]
    write_corpus(tmp_path / "corpus", INFO, documents)
    return tmp_path / "corpus"


def test_shards_hold_every_document_and_nothing_else(corpus):
    manifest = Manifest.load(corpus, check_hashes=True)
    ids = np.concatenate([np.fromfile(path, "<u4") for path in manifest.shard_paths(corpus)])
    expected = [token for n in range(40) for token in [*range(n % 37), EOS]]
    assert ids.tolist() == expected
    assert manifest.total_tokens == len(expected)
    assert (manifest.sources["b"].documents, manifest.sources["b"].bytes) == (20, 3 * sum(range(1, 40, 2)))


def test_d11_every_document_ends_in_eos_and_is_counted(corpus):
    manifest = Manifest.load(corpus)
    for path, shard in zip(manifest.shard_paths(corpus), manifest.shards, strict=True):
        ids, sidecar = np.fromfile(path, "<u4"), read_sidecar(path)
        assert ids[-1] == EOS
        assert (ids == EOS).sum() == shard.n_eos == len(sidecar.starts)
        assert (ids[sidecar.starts[1:] - 1] == EOS).all()
    assert manifest.total_documents == 40


def test_d21_ids_above_65535_round_trip(tmp_path):
    write_corpus(tmp_path, INFO, [([65535, 65536, 100_000, 127_999], 0, 9)])
    assert np.fromfile(tmp_path / "shard_00000.bin", "<u4").tolist() == [65535, 65536, 100_000, 127_999, EOS]


@pytest.mark.parametrize("wrong", [128000, EOS, 2**31])
def test_d10_ids_outside_the_vocabulary_are_refused_on_write(tmp_path, wrong):
    with pytest.raises(UserError, match=rf"{wrong} is not below vocab_size \(128000\)"):
        write_corpus(tmp_path, INFO, [([1, wrong], 0, 2)])
    assert not (tmp_path / "manifest.json").exists()


def test_d9_a_document_longer_than_a_shard_has_its_own_and_is_counted(tmp_path):
    manifest = write_corpus(tmp_path, INFO, [([1] * 10, 0, 1), ([2] * 350, 0, 1), ([3] * 10, 0, 1)])
    assert [shard.n_tokens for shard in manifest.shards] == [11, 351, 11]
    assert manifest.oversized_documents == 1


def test_documents_are_never_split_and_shards_are_full():
    lengths = np.array([40, 40, 30, 100, 1, 99, 250, 10, 90])
    assert split_into_shards(lengths, 100) == [
        slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 6), slice(6, 7), slice(7, 9)
    ]  # fmt: skip
    assert split_into_shards(np.array([], np.int64), 100) == []


def test_d7_a_missing_manifest_is_refused_and_rebuilt_byte_for_byte(corpus):
    before = (corpus / "manifest.json").read_bytes()
    (corpus / "manifest.json").unlink()
    with pytest.raises(UserError, match=f"gpt-oss-lite verify {corpus} --repair"):
        Manifest.load(corpus)
    build_manifest(corpus).write(corpus)
    assert (corpus / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("lost", ["shard_00000.bin", "shard_00003.bin", "last"])
def test_d7_a_manifest_is_never_guessed_when_a_shard_is_missing(corpus, lost):
    paths = sorted(corpus.glob("*.bin"))
    path = paths[-1] if lost == "last" else corpus / lost
    path.unlink()
    with pytest.raises(UserError, match=f"shard {int(path.stem[-5:])} of {len(paths)} of the train split is not there"):
        build_manifest(corpus)


def test_d7_shards_of_two_packings_are_never_taken_for_one_corpus(corpus, tmp_path):
    other = INFO.model_copy(update={"corpus": "c1"})
    write_corpus(tmp_path / "other", other, [([1, 2], 0, 2)])
    for suffix in (".bin", ".idx"):
        (tmp_path / "other" / f"shard_00000{suffix}").replace(corpus / f"shard_00001{suffix}")
    with pytest.raises(UserError, match="belongs to another packing"):
        build_manifest(corpus)


def test_a_damaged_sidecar_is_named(corpus):
    path = corpus / "shard_00001.idx"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=r"shard_00001\.idx: not a whole sidecar"):
        build_manifest(corpus)


def edit(corpus, change):
    content = json.loads((corpus / "manifest.json").read_text())
    change(content)
    (corpus / "manifest.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["shards"][1].update(path="../x.bin"), r"shards\[1\]\.path is '\.\./x\.bin': it must stay inside"),
        (lambda m: m["shards"][1].update(path="/etc/passwd"), "must stay inside the manifest's folder"),
        (lambda m: m.update(shard_count=3), "shard_count is 3, but shards has"),
        (lambda m: m.update(total_tokens=1), "total_tokens is 1"),
        (lambda m: m.update(dtype="uint16"), "dtype: Input should be 'uint32'"),
        (lambda m: m.pop("eos_token_id"), "eos_token_id: Field required"),
        (lambda m: m.update(vocab_size="many"), "vocab_size: Input should be a valid integer"),
        (lambda m: m["shards"][0].update(n_tokens=1), "total_tokens is"),
    ],
)
def test_a_wrong_manifest_is_refused_with_the_key(corpus, change, message):
    edit(corpus, change)
    with pytest.raises(UserError, match=message) as caught:
        Manifest.load(corpus)
    assert "manifest.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_keys_that_are_not_known_are_allowed(corpus):
    before = Manifest.load(corpus)
    edit(corpus, lambda m: m.update(added_later=1))
    assert Manifest.load(corpus) == before


def test_sizes_are_checked_at_start_and_hashes_on_demand(corpus):
    path = corpus / "shard_00002.bin"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    Manifest.load(corpus)
    with pytest.raises(UserError, match=r"shard_00002\.bin: SHA-256"):
        Manifest.load(corpus, check_hashes=True)
    path.write_bytes(content[:-4])
    with pytest.raises(UserError, match=r"shard_00002\.bin has"):
        Manifest.load(corpus)
    path.unlink()
    with pytest.raises(UserError, match=r"shard_00002\.bin is not there"):
        Manifest.load(corpus)


def test_a_reader_that_does_not_know_ids_reads_the_rest_of_a_sidecar(tmp_path):
    """Version 1 reads these arrays and these keys by name; ids are further arrays."""
    names = ["a", "https://example.org/ä", "", "urn:uuid:1"]
    documents = [([1, 2, 3], 0, 5), ([4], 0, 1), ([5, 6], 0, 2), ([7], 0, 9)]
    write_corpus(tmp_path / "with", INFO, documents, names=names)
    write_corpus(tmp_path / "without", INFO, documents)
    old, new = (tmp_path / kind / "shard_00000.idx" for kind in ("without", "with"))
    with safetensors.safe_open(old, framework="numpy") as one, safetensors.safe_open(new, framework="numpy") as other:
        for name in ("starts", "source_index", "n_bytes"):
            assert one.get_tensor(name).tobytes() == other.get_tensor(name).tobytes()
        before, after = (json.loads(file.metadata()["sidecar"]) for file in (one, other))
        assert {key: after[key] for key in before if key != "version"} == {
            key: value for key, value in before.items() if key != "version"
        }
        assert set(other.keys()) - set(one.keys()) == {"ids", "id_ends"}
    assert read_sidecar(new, with_ids=True).ids == names
    assert read_sidecar(old, with_ids=True).ids is None
    twice = new.read_bytes()
    write_corpus(tmp_path / "with", INFO, documents, names=names)
    assert new.read_bytes() == twice


def writer(folder, lengths, key="k"):
    zeros = np.zeros(len(lengths), np.int64)
    return ShardWriter(
        path=folder / "shard_00000.bin",
        info=INFO,
        position=Position(split="train", index=0, count=1),
        lengths=np.array(lengths),
        source_index=zeros,
        n_bytes=zeros,
        key=key,
    )


def test_d6_the_shard_writer_resumes_where_it_was_safe(tmp_path, monkeypatch):
    monkeypatch.setattr("shared_data.shard_writer.CHECKPOINT_BYTES", 4000)
    rng = np.random.default_rng(0)
    documents = [np.append(rng.integers(0, 128000, 90), EOS).astype("<u4") for _ in range(60)]
    lengths = [len(ids) for ids in documents]
    first = writer(tmp_path, lengths)
    for ids in documents[:37]:
        first.add(ids)
    first._file.write(b"torn")  # what a killed process may leave behind its last safe point
    first.abandon()
    second = writer(tmp_path, lengths)
    assert 20 < second.done <= 37, "most of the work was kept"
    for ids in documents[second.done :]:
        second.add(ids)
    expected = hashlib.sha256(np.concatenate(documents).tobytes()).hexdigest()
    assert second.finish() == expected
    assert hashlib.sha256((tmp_path / "shard_00000.bin").read_bytes()).hexdigest() == expected
    assert read_sidecar(tmp_path / "shard_00000.bin").sha256 == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard_00000.bin", "shard_00000.idx"]


def test_d6_progress_of_another_content_is_not_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr("shared_data.shard_writer.CHECKPOINT_BYTES", 4)
    first = writer(tmp_path, [9, 2], key="old")
    first.add(np.array([1] * 8 + [EOS], "<u4"))
    first.abandon()
    second = writer(tmp_path, [2], key="new")
    assert second.done == 0
    second.add(np.array([5, EOS], "<u4"))
    second.finish()
    assert np.fromfile(tmp_path / "shard_00000.bin", "<u4").tolist() == [5, EOS]
