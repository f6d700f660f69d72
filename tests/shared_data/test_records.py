"""Reading sources: every line once however a file is cut, damaged files named, bad records counted."""

import gzip
import json
import lzma
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_data.download import write_raw
from shared_data.errors import UserError
from shared_data.records import Fields, Span, cut_into_spans, find_files, read_documents, read_json_lines, read_lines

FIELDS = Fields("text", None, "")
TEXTS = [f"document {n} é 中" for n in range(50)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def whole(path: Path) -> Span:
    return Span(path, path.name, 0, path.stat().st_size)


def texts_of(path: Path, fields: Fields = FIELDS) -> list[str | None]:
    return [document.text for document in read_documents([whole(path)], fields)]


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"")), max_size=12),
    step=st.integers(1, 20),
    ended=st.booleans(),
)
def test_d25_any_cut_into_spans_reads_each_line_once(tmp_path_factory, lines, step, ended):
    path = tmp_path_factory.mktemp("cut") / "x.jsonl"
    content = b"\n".join(lines) + (b"\n" if ended and lines else b"")
    path.write_bytes(content)
    spans = [Span(path, "x", start, min(start + step, len(content))) for start in range(0, len(content), step)]
    read = [line for span in spans for _, line in read_lines(span)]
    assert read == [line for line in content.split(b"\n") if line.strip()]


def test_lines_longer_than_a_chunk_are_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("shared_data.records.CHUNK_BYTES", 7)
    (tmp_path / "x.jsonl").write_bytes(LINES)
    assert texts_of(tmp_path / "x.jsonl") == TEXTS


def test_tasks_group_small_files_and_cut_large_ones(tmp_path):
    files = [(tmp_path / f"{n}.jsonl", f"{n}.jsonl", size) for n, size in enumerate([10, 10, 250, 0, 90])]
    files.append((tmp_path / "big.jsonl.gz", "big", 900))
    tasks = cut_into_spans(files, 100)
    covered = [(span.name, span.start, span.end) for spans in tasks for span in spans]
    assert covered == [
        ("0.jsonl", 0, 10), ("1.jsonl", 0, 10), ("2.jsonl", 0, 125), ("2.jsonl", 125, 250), ("4.jsonl", 0, 90),
        ("big", 0, 900),
    ]  # fmt: skip
    assert [len(spans) for spans in tasks] == [2, 1, 1, 1, 1]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz", ".jsonl.xz", ".json.zst", ".parquet"])
def test_every_format_gives_the_same_documents(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    if suffix.endswith(".gz"):
        path.write_bytes(gzip.compress(LINES[:300]) + gzip.compress(LINES[300:]))
    elif suffix.endswith(".xz"):
        path.write_bytes(lzma.compress(LINES[:300]) + lzma.compress(LINES[300:]))
    elif suffix.endswith(".zst"):
        compressor = zstandard.ZstdCompressor()
        path.write_bytes(compressor.compress(LINES[:300]) + compressor.compress(LINES[300:]))
    elif suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS, "other": TEXTS}), path, row_group_size=7)
    else:
        path.write_bytes(LINES)
    assert texts_of(path) == TEXTS


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"three"))
    assert texts_of(tmp_path / "a.txt") == ["one\n\ntwo\n"]
    assert texts_of(tmp_path / "b.txt.gz") == ["three"]


@pytest.mark.parametrize("cut", [0.3, 0.9, -1])
@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_d15_a_truncated_archive_is_an_error_that_names_it(tmp_path, suffix, cut):
    content = os.urandom(1 << 20).hex().encode()
    compress = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix]
    packed = compress(content)
    path = tmp_path / f"x.jsonl{suffix}"
    path.write_bytes(packed[: cut if cut < 0 else int(cut * len(packed))])
    with pytest.raises(UserError, match=rf"{path.name}: the compressed file is"):
        texts_of(path)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.xz", ".jsonl.zst", ".parquet"])
def test_a_file_that_is_not_what_its_suffix_says_is_named(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(b"plainly not compressed, and quite a bit longer than any magic number")
    with pytest.raises(UserError, match=path.name):
        texts_of(path)


def test_a_truncated_parquet_file_is_named(tmp_path):
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"x\.parquet: not a whole parquet file"):
        texts_of(path)


def test_a_missing_parquet_column_is_named_with_those_there(tmp_path):
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"content": TEXTS}), path)
    with pytest.raises(UserError, match="no column 'text'; it has: content"):
        texts_of(path)


BAD_LINES = [
    (b'{"text": "cut', "bad_json"),
    (b"[1, 2]", "no_text"),
    (b'{"txt": "x"}', "no_text"),
    (b'{"text": 3}', "no_text"),
    (b'{"text": null}', "no_text"),
    (b"[" * 5000, "bad_json"),
]


def test_d27_a_bad_line_is_counted_by_reason_and_the_file_goes_on(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "first"}\n' + b"\n".join(line for line, _ in BAD_LINES) + b'\n\n{"text": "last"}')
    documents = list(read_json_lines(whole(path), FIELDS))
    assert [document.reason for document in documents] == [None, *(reason for _, reason in BAD_LINES), None]
    result = write_raw(documents, tmp_path / "raw.jsonl")
    size = (tmp_path / "raw.jsonl").stat().st_size
    assert dict(result.counts) == {"read": 8, "kept": 2, "dropped.bad_json": 2, "dropped.no_text": 4, "bytes": size}
    written = [json.loads(line)["text"] for line in (tmp_path / "raw.jsonl").read_text().splitlines()]
    assert written == ["first", "last"]


def test_d13_surrogates_and_invalid_utf8_are_replaced_and_counted(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a\\ud800b"}\n{"text": "c\xff\xfed \xef\xbf\xbd"}\n{"text": "\\ud83d\\ude00"}\n')
    first, second, third = read_json_lines(whole(path), FIELDS)
    assert (first.text, first.repairs) == ("a\ufffdb", {"lone_surrogates_replaced": 1})
    assert (second.text, second.repairs) == ("c\ufffd\ufffdd \ufffd", {"invalid_utf8_replaced": 2})
    assert (third.text, third.repairs) == ("\U0001f600", {})


def test_two_fields_are_joined_as_openmath_asks(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"problem": "1+1?", "generated_solution": "2", "id": 5}) + "\n")
    fields = Fields("problem", "generated_solution", "\n\n### Solution\n\n")
    (document,) = read_json_lines(whole(path), fields)
    assert document.text == "1+1?\n\n### Solution\n\n2"
    assert document.id == "5"


def test_files_are_found_sorted_and_once(tmp_path):
    for name in ("b.jsonl", "a.txt", "deep/c.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_files([tmp_path / "**", tmp_path / "a.txt"], "s")
    assert [path.name for path in found] == ["a.txt", "b.jsonl", "c.parquet"]
    with pytest.raises(UserError, match=r"source s: files: .*none.* matches no file"):
        find_files([tmp_path / "none*"], "s")
    with pytest.raises(
        UserError, match=rf"{tmp_path} is a folder; write the files in it, such as {tmp_path}/\*\.jsonl"
    ):
        find_files([tmp_path], "s")
    with pytest.raises(UserError, match=r"such as .*/deep/\*\.parquet"):
        find_files([tmp_path / "deep"], "s")
    (tmp_path / "x.docx").write_text("x")
    with pytest.raises(UserError, match=r"x\.docx has a suffix that is not known; allowed: \.jsonl"):
        find_files([tmp_path / "*"], "s")
