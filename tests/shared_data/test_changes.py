"""A corpus is not replaced unasked: what differs is named with both values, and nothing of it is touched."""

import json
import re
import shutil

import pytest
from pipeline_corpus import context_of, edit_yaml, hashes, make_corpus, prepare, run_all, run_prepare, write_lines

from shared_data.changes import refuse_another_corpus
from shared_data.errors import UserError
from shared_data.scripts import pack_shards

WAYS_ON = "Keep it and prepare the new one elsewhere with --data-root DIR, or replace it with --allow-changed"


@pytest.fixture
def prepared(done, tmp_path):
    """A copy of a prepared data folder with its config files."""
    shutil.copytree(done[0], tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize(
    ("edit", "options", "named"),
    [
        ({}, ("--total-tokens", "15000"), "total_tokens was 20000, is 15000"),
        ({}, ("--source", "web"), (
         'mixture was tiny, is tiny[web]; sources was ["web", "code", "math"], is ["web"]; '
         'sources.web.weight was 0.6, is 1.0')),
        ({"seed": 7}, (), "seed was 42, is 7"),
        ({"pipeline": {"task_bytes": 40000, "quality": {"min_chars": 61}}}, (),
         "pipeline.quality.min_chars was 60, is 61"),
        ({"pipeline": {"task_bytes": 40000, "quality": {"min_chars": 60}, "decontaminate": {"against": {"x": ["y"]}}}},
         (), 'pipeline.decontaminate.against was {}, is (none); pipeline.decontaminate.against.x was (none), is ["y"]'),
    ],
)  # fmt: skip
def test_other_settings_are_refused_before_any_work(prepared, edit, options, named):
    if edit:
        edit_yaml(prepared / "data_config.yaml", **edit)
    before = hashes(prepared / "data", state=True)
    ran = run_prepare(prepared, prepared / "data", *options)
    root = prepared / "data"
    assert (ran.returncode, ran.stderr) == (
        2, f"error: {root / 'pretrain_chinchilla'} holds a corpus that was made otherwise: {named}. {WAYS_ON}\n"
    )  # fmt: skip
    assert hashes(root, state=True) == before


def test_both_ways_on_work_and_settings_without_effect_are_no_change(prepared, tmp_path):
    root = prepared / "data"
    before = hashes(root)
    edit_yaml(prepared / "data_config.yaml", tokenizer={"batch_size": 3, "prefetch": 2})
    prepare(prepared, root)
    assert hashes(root) == before
    prepare(prepared, tmp_path / "elsewhere", "--total-tokens", "15000")
    assert hashes(root) == before
    prepare(prepared, root, "--total-tokens", "15000", "--allow-changed")
    assert hashes(root) == hashes(tmp_path / "elsewhere")
    prepare(prepared, root, "--total-tokens", "15000")
    assert run_prepare(prepared, root).returncode == 2, "now the old settings are the other ones"


def test_other_text_is_refused_before_a_shard_is_touched(prepared):
    root = prepared / "data"
    write_lines(prepared / "sources" / "more.jsonl", ["one more document that is not like any of the others " * 3])
    (prepared / "sources" / "math.jsonl").open("a").write((prepared / "sources" / "more.jsonl").read_text())
    files = [str(prepared / "sources" / f"{source}.jsonl") for source in ("web", "code", "math")]
    origin = json.loads((root / "state/pack/corpus.json").read_text())
    assert all(origin["settings"][f"sources.{source}.files"] for source in ("web", "code", "math"))
    point_at_copies(prepared, files)
    corpus = {name: digest for name, digest in hashes(root).items() if name.startswith(("shards", "pretrain"))}
    with pytest.raises(UserError) as refused:
        run_all(context_of(prepared))
    text = str(refused.value)
    assert re.search(r"otherwise: the fingerprint of the tokens of math was [0-9a-f]{64}, is [0-9a-f]{64}\. Keep", text)
    assert WAYS_ON in text
    after = hashes(root)
    assert {name: after[name] for name in corpus} == corpus
    run_all(context_of(prepared, allow_changed=True))
    assert hashes(root) != after


def point_at_copies(folder, files) -> None:
    """Let mixture and record name the copied sources."""
    mixture = [
        {"id": source, "weight": weight, "files": [path]}
        for (source, weight), path in zip({"web": 0.6, "code": 0.25, "math": 0.15}.items(), files, strict=True)
    ]
    edit_yaml(folder / "mixture.yaml", sources=mixture)
    path = folder / "data/state/pack/corpus.json"
    origin = json.loads(path.read_text())
    for source, file in zip(("web", "code", "math"), files, strict=True):
        origin["settings"][f"sources.{source}.files"] = [file]
    path.write_text(json.dumps(origin))


def test_without_its_record_a_corpus_is_held_against_its_manifest(prepared):
    record = prepared / "data/state/pack/corpus.json"
    record.unlink()
    refuse_another_corpus(context_of(prepared))
    for options, named in (
        ({"source": ["web"]}, "mixture was tiny, is tiny[web]"),
        ({"shard_size_tokens": 5000}, "shard_size_tokens was 4000, is 5000"),
    ):
        with pytest.raises(UserError, match=re.escape(named)):
            refuse_another_corpus(context_of(prepared, **options))
    with pytest.raises(UserError, match=r"otherwise: the packing's fingerprint was [0-9a-f]{64}, is [0-9a-f]{64}\."):
        pack_shards.run(context_of(prepared, total_tokens=15000))
    pack_shards.run(context_of(prepared))
    assert record.is_file(), "the same corpus made again is known again"


def test_a_corpus_that_is_not_whole_holds_nobody_up(tmp_path):
    make_corpus(tmp_path)
    context = context_of(tmp_path)
    run_all(context)
    (context.layout.corpus / "manifest.json").unlink()
    run_all(context_of(tmp_path, total_tokens=15000))
    fresh = context_of(tmp_path, root="fresh", total_tokens=15000)
    run_all(fresh)
    assert hashes(context.layout.corpus) == hashes(fresh.layout.corpus)
