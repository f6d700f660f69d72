"""What the sources give to the stages: too little, too long, one alone, from elsewhere, or nothing."""

import json
import random

import pytest
from pipeline_corpus import (
    WEIGHTS,
    context_of,
    documents_of,
    edit_yaml,
    lines_of,
    run_all,
    sentence,
    write_lines,
)

from shared_data.errors import UserError
from shared_data.manifest import Manifest
from shared_data.scripts import clean, download_raw, pack_shards, tokenize


def test_d22_an_empty_source_is_an_error(fresh):
    write_lines(fresh / "sources" / "code.jsonl", ["too short"])
    with pytest.raises(UserError, match="source code has no document left after cleaning"):
        run_all(context_of(fresh))
    (fresh / "sources" / "code.jsonl").write_text("")
    with pytest.raises(UserError, match="source code: all its files are empty"):
        run_all(context_of(fresh))


def test_d23_a_shortage_is_an_error_by_default_or_ends_or_repeats(fresh, capsys):
    edit_yaml(fresh / "data_config.yaml", total_tokens=160000)
    with pytest.raises(UserError, match=r"math needs 24,000 tokens and has [\d,]+ \(short by [\d,]+\)"):
        run_all(context_of(fresh))
    assert not (fresh / "data" / "pretrain_chinchilla").exists()

    edit_yaml(fresh / "mixture.yaml", on_shortage="stop")
    stopped = run_all(context_of(fresh))["pack"]
    assert stopped["train_tokens"] < 160000
    reached = f"{stopped['train_tokens']:,} of 160,000 training tokens wanted"
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("stopped short")]
    assert said.startswith(f"stopped short (on_shortage: stop): {reached}")
    sizes = {source: sum(path.stat().st_size for path in (fresh / "data/tokens" / source).glob("*.bin"))
             for source in WEIGHTS}  # fmt: skip
    scarcest = min(WEIGHTS, key=lambda source: sizes[source] / WEIGHTS[source])
    assert said.endswith(f"no more text in: {scarcest}")
    assert all(own["repeated_documents"] == 0 for own in stopped["sources"].values())
    assert abs(stopped["largest_deviation_tokens"]) <= stopped["longest_document_tokens"]

    edit_yaml(fresh / "mixture.yaml", on_shortage="repeat", max_epochs=5)
    repeated = run_all(context_of(fresh, allow_changed=True))["pack"]
    assert repeated["train_tokens"] >= 160000
    assert repeated["sources"]["math"]["repeated_documents"] > 0
    edit_yaml(fresh / "data_config.yaml", total_tokens=10**6)
    with pytest.raises(UserError, match="short by"):
        run_all(context_of(fresh, allow_changed=True))


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
