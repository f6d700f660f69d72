"""Data sets of the hub, from a stand-in on 127.0.0.1: outages, resuming, revisions, limits; and files at addresses."""

import gzip
import io
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from pipeline_corpus import context_of, edit_yaml, make_corpus
from stand_in_hub import StandInHub

from shared_data.errors import UserError
from shared_data.remote import Patience, may_pass
from shared_data.scripts import download_raw

README = b"""---
configs:
- config_name: sample
  data_files:
  - split: train
    path: sample/*
---
"""
N_FILES, N_ROWS = 3, 60


def parquet(number: int) -> bytes:
    """A file in several row groups, with a column that nobody asks for."""
    texts = [f"file {number} row {row} " + "word " * 40 for row in range(N_ROWS)]
    table = pyarrow.table(
        {"text": texts, "junk": [os.urandom(20)] * N_ROWS, "id": [f"{number}-{n}" for n in range(N_ROWS)]}
    )
    content = io.BytesIO()
    pyarrow.parquet.write_table(table, content, row_group_size=16)
    return content.getvalue()


ALL_IDS = [f"{number}-{row}" for number in range(N_FILES) for row in range(N_ROWS)]
FILES = {"README.md": README, "other.parquet": b"", **{f"sample/{n}.parquet": parquet(n) for n in range(N_FILES)}}

# Reads the sources; is killed by itself at document number N if that is given.
DRIVER = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from pipeline_corpus import context_of
from shared_data import download
from shared_data.console import run_app
from shared_data.errors import UserError
from shared_data.scripts import download_raw
download.SAVE_EVERY_BYTES = 1500
left, plain = int(sys.argv[3]), download.raw_line
def raw_line(document, counts):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(document, counts)
download.raw_line = raw_line
try:
    download_raw.run(context_of(Path(sys.argv[2]), root=sys.argv[4]))
except UserError as error:
    print(error)
    sys.exit(2)
"""


@pytest.fixture
def hub():
    with StandInHub("org/name", dict(FILES)) as server:
        yield server


@pytest.fixture
def folder(tmp_path):
    make_corpus(tmp_path, pipeline={"download_margin": None})
    set_source(tmp_path)
    return tmp_path


def set_source(folder: Path, **source: object) -> None:
    edit_yaml(
        folder / "mixture.yaml",
        sources=[{"id": "web", "weight": 1.0, "dataset": "org/name", "config": "sample", **source}],
    )


def download(
    folder: Path, hub: StandInHub, *, kill_at: int = 0, root: str = "data", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the stage in a process of its own, whose hub is the stand-in."""
    script = folder / "driver.py"
    script.write_text(DRIVER)
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
                   "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": str(folder / "hf"), "HF_TOKEN": "",
                   "NO_PROXY": "127.0.0.1", **variables}  # fmt: skip
    hub.log.clear()
    command = [sys.executable, script, Path(__file__).parent, folder, str(kill_at), root]
    return subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=100)


def ids_of(folder: Path, root: str = "data") -> list[str]:
    paths = sorted((folder / root / "raw" / "web").glob("*.jsonl"))
    return [json.loads(line)["id"] for path in paths for line in path.read_text().splitlines()]


def test_d1_stopped_twice_each_document_comes_once_and_no_finished_file_is_opened_again(folder, hub):
    assert download(folder, hub, kill_at=N_ROWS + 30).returncode == -9
    assert hub.opened()[0] == "sample/0.parquet"
    assert download(folder, hub, kill_at=N_ROWS + 10).returncode == -9
    assert set(hub.opened()) == {"sample/1.parquet", "sample/2.parquet"}, "the first file was finished"
    ran = download(folder, hub)
    assert ran.returncode == 0, ran.stderr
    assert set(hub.opened()) == {"sample/2.parquet"}
    assert ids_of(folder) == ALL_IDS
    report = json.loads((folder / "data/state/reports/download.json").read_text())["sources"]["web"]
    assert (report["read"], report["kept"], report["revision"]) == (len(ALL_IDS), len(ALL_IDS), hub.commit)
    assert (report["files"], report["files_read"]) == (3, 3)
    assert not list((folder / "data").rglob("*.tmp"))
    hub.commit = "f" * 40
    assert download(folder, hub).returncode == 0
    assert hub.log == [], "what is finished needs no hub, and stays at its commit when the hub moves on"
    set_source(folder, revision=hub.commit[::-1][:39] + "0")
    ran = download(folder, hub)
    assert ran.returncode == 2
    assert f"but the hub has the commit {'f' * 40} under it" in ran.stdout


def test_d2_an_outage_of_the_hub_is_waited_for(folder, hub):
    hub.fail_with = [429, 502]

    def outage() -> None:
        while not hub.opened():
            time.sleep(0.02)
        for status in (502, 429, 503):
            hub.down_with = status
            time.sleep(1.5)
        hub.down_with, hub.cut_after = None, 1000

    thread = threading.Thread(target=outage)
    thread.start()
    ran = download(folder, hub)
    thread.join()
    assert ran.returncode == 0, ran.stderr
    assert hub.cut_after is None, "a broken connection came on top"
    assert ids_of(folder) == ALL_IDS


def test_no_more_is_read_than_is_wanted_and_more_goes_on_where_it_stopped(folder, hub):
    set_source(folder, max_bytes=3000)
    assert download(folder, hub).returncode == 0
    few = ids_of(folder)
    assert 3000 <= sum(path.stat().st_size for path in (folder / "data/raw/web").iterdir()) < 3400
    assert few == ALL_IDS[: len(few)]
    assert set(hub.opened()) == {"sample/0.parquet"}
    set_source(folder, max_bytes=20000)
    assert download(folder, hub, kill_at=N_ROWS).returncode == -9, "it read on, so that less than a whole file was new"
    assert download(folder, hub).returncode == 0
    assert len(ids_of(folder)) > len(few)
    assert download(folder, hub, root="clean-start").returncode == 0
    assert ids_of(folder, "clean-start") == ids_of(folder)


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"])
def test_a_hub_that_the_environment_forbids_is_refused_at_once(folder, hub, variable):
    ran = download(folder, hub, **{variable: "1"})
    message = f"the hub is not asked, since {variable}=1 is set; unset it, or name local files"
    assert (ran.returncode, ran.stdout) == (2, f"source web: dataset org/name: {message}\n"), ran.stderr
    assert "trying again" not in ran.stderr
    assert hub.log == []
    assert download(folder, hub, kill_at=N_ROWS + 30).returncode == -9
    ran = download(folder, hub, **{variable: "1"})
    assert ran.returncode == 2, "also where a file is gone on with"
    assert message in ran.stdout
    assert "trying again" not in ran.stderr
    assert download(folder, hub).returncode == 0
    assert download(folder, hub, **{variable: "1"}).returncode == 0, "what is finished needs no hub"


def test_a_gated_data_set_says_what_to_do(folder, hub):
    hub.gated = True
    ran = download(folder, hub)
    assert ran.returncode == 2, ran.stderr
    assert (
        "source web: dataset org/name: it is gated: accept its terms at https://huggingface.co/datasets/org/name"
        in ran.stdout
    )


class Failing:
    """Fails for some seconds of a clock that only sleep moves."""

    def __init__(self, seconds: float, error: Exception) -> None:
        self.now, self._until, self._error, self.calls = 0.0, seconds, error, 0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> str:
        self.calls += 1
        if self.now < self._until:
            raise self._error
        return "done"


class Status(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"status {code}")
        self.response = type("Response", (), {"status_code": code})()


@pytest.mark.parametrize("error", [Status(429), Status(502), TimeoutError("slow"), ConnectionResetError()])
def test_d2_a_minute_of_failures_is_ridden_out(error):
    action = Failing(60.0, error)
    assert Patience("x", clock=lambda: action.now, sleep=action.sleep).until_it_works(action) == "done"
    assert action.calls < 12, "it does not hammer"


def test_patience_ends():
    action = Failing(1e9, Status(503))
    with pytest.raises(UserError, match=r"x: no answer for 1800 s \(status 503\)"):
        Patience("x", clock=lambda: action.now, sleep=action.sleep).until_it_works(action)


@pytest.mark.parametrize("error", [Status(404), Status(401), ValueError("no"), FileNotFoundError("no")])
def test_what_cannot_pass_is_not_tried_again(error):
    action = Failing(60.0, error)
    assert not may_pass(error)
    with pytest.raises(type(error)):
        Patience("x", clock=lambda: action.now, sleep=action.sleep).until_it_works(action)
    assert action.calls == 1


def test_files_at_an_address_are_read(tmp_path):
    make_corpus(tmp_path)
    lines = b"".join(json.dumps({"text": f"text {n}", "id": str(n)}).encode() + b"\n" for n in range(9))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "b.json").write_bytes(lines)
    (tmp_path / "c.parquet").write_bytes(FILES["sample/0.parquet"])
    files = [f"file://{tmp_path}/?.*json*", f"file://{tmp_path}/c.parquet"]
    edit_yaml(tmp_path / "mixture.yaml", sources=[{"id": "web", "weight": 1.0, "files": files}])
    edit_yaml(tmp_path / "data_config.yaml", total_tokens=10**6)
    download_raw.run(context_of(tmp_path))
    assert ids_of(tmp_path) == [*map(str, range(9)), *map(str, range(9)), *ALL_IDS[:N_ROWS]]


def test_files_behind_http_are_read_and_an_outage_is_waited_for(tmp_path, hub):
    make_corpus(tmp_path)
    files = [f"{hub.url}/datasets/org/name/resolve/main/sample/{n}.parquet" for n in range(2)]
    edit_yaml(tmp_path / "mixture.yaml", sources=[{"id": "web", "weight": 1.0, "files": files, "max_bytes": 10**6}])
    hub.fail_with = [503, 503]
    download_raw.run(context_of(tmp_path))
    assert ids_of(tmp_path) == ALL_IDS[: 2 * N_ROWS]


def test_d15_a_truncated_archive_at_an_address_is_an_error_and_the_source_not_done(tmp_path):
    make_corpus(tmp_path)
    packed = gzip.compress(os.urandom(3 << 20).hex().encode())
    (tmp_path / "a.jsonl.gz").write_bytes(packed[:-1000])
    source = {"id": "web", "weight": 1.0, "files": [f"file://{tmp_path}/a.jsonl.gz"]}
    edit_yaml(tmp_path / "mixture.yaml", sources=[source])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: the compressed file is cut off"):
        download_raw.run(context_of(tmp_path))
    assert not (tmp_path / "data" / "state" / "download" / "web" / "parts.json").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [("file:///nowhere/x.jsonl", "matches no file"), ("nosuch://x/y.jsonl", "nosuch://: Protocol not known"),
     ("file:///etc/hosts", "files from afar can be .jsonl"), ("s3x://b/*.jsonl", "s3x://: Protocol not known")],
)  # fmt: skip
def test_an_address_that_cannot_be_read_is_one_line(tmp_path, name, message):
    make_corpus(tmp_path)
    edit_yaml(tmp_path / "mixture.yaml", sources=[{"id": "web", "weight": 1.0, "files": [name]}])
    with pytest.raises(UserError, match=message):
        download_raw.run(context_of(tmp_path))
