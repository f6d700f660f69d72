"""What a second run of the stages does again: nothing, or what depends on a change or a damage."""

import json
import os

from pipeline_corpus import (
    Runs,
    context_of,
    edit_yaml,
    hashes,
    run_all,
)


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
    run_all(context_of(fresh, allow_changed=True))
    assert runs.since_last() == {"pack/long", "pack/train", "pack/validation"}

    with open(path, "a") as file:
        file.write(
            json.dumps({"text": "one more document that is not like any of the others, of sufficient length"}) + "\n"
        )
    run_all(context_of(fresh, allow_changed=True))
    redone = runs.since_last()
    assert {"math/task", "math/filter", "math/write", "clean/compare", "pack/train"} <= redone
    assert not {name for name in redone if name.startswith(("web/", "code/"))}

    edit_yaml(fresh / "data_config.yaml", pipeline={"task_bytes": 40000, "quality": {"min_chars": 61}})
    run_all(context_of(fresh, allow_changed=True))
    assert {"web/filter", "web/write"} <= runs.since_last()


def test_a_change_gives_the_same_bytes_as_a_clean_start(fresh):
    run_all(context_of(fresh))
    edit_yaml(fresh / "data_config.yaml", total_tokens=12000, shard_size_tokens=7000)
    path = fresh / "sources" / "web.jsonl"
    # The texts that web shared with the others go, so that the others now keep theirs.
    path.write_text("".join(path.read_text().splitlines(keepends=True)[20:]))
    run_all(context_of(fresh, allow_changed=True))
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
