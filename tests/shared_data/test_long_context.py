"""The long-context share: exact windows of whole documents, passkeys in the gaps, the mixture kept."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_corpus import WEIGHTS, context_of, edit_yaml, hashes, make_corpus, run_all

from shared_data.long_context import INSERT_TOKENS, Insert, pack_windows
from shared_data.manifest import Manifest, read_sidecar
from shared_data.manifest_builder import build_manifest
from shared_data.passkeys import ANSWER, NEEDLE, QUESTION, is_evaluation_key, training_keys
from shared_data.tokenizer import load_tokenizer

WINDOW = 1024
EOS = 128009


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    make_corpus(folder, total_tokens=60000, pack={"long_context": {"share": 0.3, "window_tokens": WINDOW}})
    context = context_of(folder)
    return context, run_all(context)["pack"]


def windows_of(context):
    """(sidecar, first and end document, ids) of each long-context window."""
    for path in sorted((context.layout.shards / "long").glob("*.bin")):
        sidecar, ids = read_sidecar(path), np.fromfile(path, "<u4")
        for start in range(0, len(ids), WINDOW):
            first, end = np.searchsorted(sidecar.starts, [start, start + WINDOW])
            yield sidecar, int(first), int(end), ids[start : start + WINDOW]


def test_windows_hold_whole_documents_of_one_source_and_are_full(packed):
    context, report = packed
    windows = list(windows_of(context))
    # floor(weight x 0.3 x 60000 / 1024) of each source
    assert len(windows) == 10 + 4 + 2 == report["long_context"]["windows"]
    for sidecar, first, end, ids in windows:
        assert sidecar.starts[first] % WINDOW == 0
        assert len(ids) == WINDOW
        assert ids[-1] == EOS
        assert (ids == EOS).sum() == end - first
        assert len(set(sidecar.source_index[first:end])) == 1


def test_long_shards_come_first_and_only_aligned_windows_are_in_them(packed):
    context, _ = packed
    corpus = context.layout.corpus
    manifest = Manifest.load(corpus, check_hashes=True)
    splits = [read_sidecar(path).position.split for path in manifest.shard_paths(corpus)]
    n_long = splits.count("long")
    assert splits == ["long"] * n_long + ["train"] * (len(splits) - n_long)
    assert n_long > 1
    assert all(shard.n_tokens % WINDOW == 0 and shard.n_tokens <= 4000 for shard in manifest.shards[:n_long])
    for index, path in enumerate(sorted((context.layout.shards / "long").glob("*.bin"))):
        assert path.samefile(corpus / manifest.shards[index].path)


def test_each_gap_tells_a_training_key_and_asks_for_it_at_the_end(packed):
    context, _ = packed
    tokenizer, keys = load_tokenizer(), []
    for sidecar, first, end, ids in windows_of(context):
        inserts = [index for index in sidecar.inserts.tolist() if first <= index < end]
        if end - first == 1:
            assert inserts == [], "filled by one document"
            continue
        tells, asks = inserts
        assert asks == end - 1
        texts = []
        for index in (tells, asks):
            begin = int(sidecar.starts[index] % WINDOW)
            length = int(sidecar.lengths[index])
            assert length >= INSERT_TOKENS
            texts.append(tokenizer.decode(ids[begin : begin + length - 1].tolist()))
            assert sidecar.n_bytes[index] == len(texts[-1].encode())
        key = int(re.search(r"The pass key is (\d{5})\. Remember", texts[0])[1])
        assert texts[0].endswith(NEEDLE.format(key=key))
        assert texts[1].endswith((QUESTION + ANSWER).format(key=key))
        keys.append(key)
    assert len(keys) > 8
    assert not any(is_evaluation_key(key) for key in keys)
    assert len(set(keys)) > 8


def test_the_manifest_counts_windows_and_inserts(packed):
    context, report = packed
    manifest = Manifest.load(context.layout.corpus)
    long = manifest.long_context
    assert long is not None
    assert long.tokens == long.windows * WINDOW == 16 * WINDOW
    inserts = sum(len(read_sidecar(path).inserts) for path in manifest.shard_paths(context.layout.corpus))
    assert long.inserts == inserts == sum(own.inserts for own in manifest.sources.values())
    assert long.insert_tokens == sum(own.insert_tokens for own in manifest.sources.values()) > 0
    assert long.insert_tokens < long.tokens / 4
    assert manifest.total_documents == sum(shard.n_eos for shard in manifest.shards)
    assert long.inserts == report["long_context"]["inserts"]
    assert build_manifest(context.layout.corpus) == manifest
    assert Manifest.load(context.layout.shards).long_context is None


def test_documents_are_used_once_and_charged_to_their_sources(packed):
    context, report = packed
    corpus = context.layout.corpus
    manifest = Manifest.load(corpus)
    seen = []
    for path in manifest.shard_paths(corpus):
        sidecar, ids = read_sidecar(path), np.fromfile(path, "<u4")
        texts = np.setdiff1d(np.arange(len(sidecar.starts)), sidecar.inserts)
        seen += [ids[sidecar.starts[n] : sidecar.starts[n] + sidecar.lengths[n]].tobytes() for n in texts]
    assert len(seen) == len(set(seen)) == sum(own["train_documents"] for own in report["sources"].values())
    for source, weight in WEIGHTS.items():
        away = abs(manifest.sources[source].tokens - weight * manifest.total_tokens)
        assert away <= report["longest_document_tokens"]
        own = report["sources"][source]
        assert own["read"] == own["kept"] + sum(own["dropped"].values())
    assert 60000 <= manifest.total_tokens < 60000 + report["longest_document_tokens"]
    assert report["longest_document_tokens"] == WINDOW, "a window is charged like a document"
    assert report["largest_deviation_tokens"] <= WINDOW


def test_the_cut_into_tasks_changes_no_byte_of_it(packed, tmp_path):
    context, _ = packed
    make_corpus(tmp_path, total_tokens=60000, pack={"long_context": {"share": 0.3, "window_tokens": WINDOW}})
    edit_yaml(tmp_path / "data_config.yaml", pipeline={"task_bytes": 11000, "quality": {"min_chars": 60}})
    other = context_of(tmp_path)
    run_all(other)

    def shards(root):
        return {name: own for name, own in hashes(root / "shards").items() if name.endswith(".bin")}

    assert shards(other.layout.root) == shards(context.layout.root)


def test_without_a_share_the_shards_of_an_earlier_packing_go(packed, tmp_path):
    make_corpus(tmp_path, total_tokens=60000, pack={"long_context": {"share": 0.3, "window_tokens": WINDOW}})
    run_all(context_of(tmp_path))
    assert (tmp_path / "data" / "shards" / "long").is_dir()
    edit_yaml(tmp_path / "data_config.yaml", pack={"long_context": {"share": 0.0}})
    context = context_of(tmp_path, allow_changed=True)
    report = run_all(context)["pack"]
    assert report["long_context"]["windows"] == 0
    assert not (tmp_path / "data" / "shards" / "long").exists()
    assert Manifest.load(context.layout.corpus).long_context is None


def test_a_mixture_that_stops_does_not_give_all_its_text_to_long_windows(tmp_path):
    make_corpus(tmp_path, total_tokens=10**9, pack={"long_context": {"share": 0.1, "window_tokens": WINDOW}})
    edit_yaml(tmp_path / "mixture.yaml", on_shortage="stop")
    report = run_all(context_of(tmp_path))["pack"]
    assert 0.05 < report["long_context"]["tokens"] / report["train_tokens"] <= 0.1
    total = report["train_tokens"]
    for own in report["sources"].values():
        assert abs(own["train_tokens"] - own["target_share"] * total) <= report["longest_document_tokens"]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=300),
    st.integers(0, 40),
    st.sampled_from([1024, 4096]),
)
def test_packing_never_overfills_or_repeats_and_keeps_room_for_the_inserts(lengths, count, window):
    own = np.array(lengths, np.int64)
    windows = pack_windows(own, count, window)
    places = [int(place) for some in windows for place in some]
    assert len(places) == len(set(places))
    assert len(windows) <= count
    for some in windows:
        gap = window - int(own[some].sum())
        assert 2 * INSERT_TOKENS <= gap <= window / 4 or (gap, len(some)) == (0, 1)
        assert (np.diff(some) > 0).all()


def test_packing_fills_windows_tightly():
    lengths = np.random.default_rng(0).lognormal(6.3, 1.0, 20_000).astype(np.int64) + 1
    windows = pack_windows(lengths, 400, 4096)
    assert len(windows) >= 396
    filled = np.array([int(lengths[some].sum()) for some in windows])
    assert filled.mean() / 4096 > 0.95


@pytest.mark.parametrize("key", [training_keys()[0], training_keys()[-1]])
def test_an_insert_has_its_length_whatever_the_length(key):
    tokenizer = load_tokenizer()
    for asks in (False, True):
        for length in (INSERT_TOKENS, INSERT_TOKENS + 1, 500):
            insert = Insert.of_code(Insert(key, asks, length).code, length)
            ids = insert.ids(tokenizer)
            assert (len(ids), ids[-1]) == (length, EOS)
            text = tokenizer.decode(ids[:-1].tolist())
            assert insert.n_bytes(tokenizer) == len(text.encode())
            assert text.count(str(key)) == (1 if asks else 2)
