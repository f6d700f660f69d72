"""What a reader of the description runs first: the names that `training.pretrain` exports, and a small run end to
end."""

import os
import random
import resource
import subprocess
import sys

import numpy as np
import pytest
import tiny_run
import torch
import torch.nn.functional as F

from shared_data.errors import UserError
from shared_data.manifest import Manifest
from training.pretrain import PretrainDataset, chunked_cross_entropy, make_warmup_cosine_lambda, seed_everything


def all_tokens(folder):
    """The corpus as one array, read without the dataset."""
    return np.concatenate([np.fromfile(path, "<u4") for path in Manifest.load(folder).shard_paths(folder)]).astype(int)


class TestPretrainDataset:
    def test_d24_windows_are_the_corpus_shifted_by_one_across_shards(self, tmp_path):
        corpus = tiny_run.make_corpus(tmp_path)
        tokens = all_tokens(corpus)
        assert len(Manifest.load(corpus).shards) > 5
        dataset = PretrainDataset(corpus, 16)
        assert len(dataset) == (len(tokens) - 1) // 16
        for index in range(len(dataset)):
            source, target = dataset[index]
            assert source.dtype == target.dtype == torch.int64
            assert source.shape == target.shape == (16,)
            assert source.tolist() == tokens[16 * index : 16 * index + 16].tolist()
            assert target.tolist() == tokens[16 * index + 1 : 16 * index + 17].tolist()

    @pytest.mark.parametrize(("n_tokens", "windows"), [(17, 1), (32, 1), (33, 2), (48, 2), (49, 3)])
    def test_d24_count_is_tokens_less_one_over_the_window(self, tmp_path, n_tokens, windows):
        path = tmp_path / "tokens.bin"
        np.arange(n_tokens, dtype="<u4").tofile(path)
        dataset = PretrainDataset(path, 16)
        assert len(dataset) == windows
        assert dataset[-1][1][-1] == windows * 16
        with pytest.raises(IndexError):
            dataset[windows]

    def test_a_window_may_span_many_shards(self, tmp_path):
        corpus = tiny_run.make_corpus(tmp_path, shard_size_tokens=10)
        dataset = PretrainDataset(corpus, 64)
        assert dataset[1][0].tolist() == all_tokens(corpus)[64:128].tolist()

    def test_raw_file_and_saved_tensor_read_alike(self, tmp_path):
        tokens = np.array([19280, 0, 128009, 65535, 65536, 7], dtype="<u4")  # 19280 is "PK" in bytes
        tokens.tofile(tmp_path / "raw.bin")
        torch.save(torch.from_numpy(tokens.astype(np.int64)), tmp_path / "saved.pt")
        for name in ("raw.bin", "saved.pt"):
            assert PretrainDataset(tmp_path / name, 5)[0][0].tolist() == [19280, 0, 128009, 65535, 65536]

    def test_more_shards_than_the_process_may_open_files(self, tmp_path):
        corpus = tiny_run.make_corpus(tmp_path, n_documents=200, shard_size_tokens=10)
        dataset = PretrainDataset(corpus, 16)
        assert len(dataset.shards) > 150
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
        try:
            for index in range(len(dataset)):
                dataset[index]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def test_shards_are_mapped_once_and_only_when_needed(self, tmp_path):
        dataset = PretrainDataset(tiny_run.make_corpus(tmp_path), 16)
        assert [shard._ids is None for shard in dataset.shards] == [True] * len(dataset.shards)
        dataset[0]
        first = dataset.shards[0].ids
        dataset[1]
        assert dataset.shards[0].ids is first
        assert all(shard._ids is None for shard in dataset.shards[1:])

    def test_missing_path_names_the_preparing_command(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"python data/prepare_data\.py --stage pretrain") as missing:
            PretrainDataset(tmp_path / "nothing", 16)
        assert missing.value.filename == str(tmp_path / "nothing")

    def test_llm_data_root_replaces_a_leading_data_folder_that_is_not_there(self, tmp_path, monkeypatch):
        tiny_run.make_corpus(tmp_path / "store" / "corpus")
        (tmp_path / "work").mkdir()
        monkeypatch.chdir(tmp_path / "work")
        monkeypatch.setenv("LLM_DATA_ROOT", str(tmp_path / "store"))
        assert PretrainDataset("data/corpus", 16).path == tmp_path / "store" / "corpus"
        with pytest.raises(FileNotFoundError):
            PretrainDataset("other/corpus", 16)
        tiny_run.make_corpus(tmp_path / "work" / "data" / "corpus")
        assert str(PretrainDataset("data/corpus", 16).path) == "data/corpus"  # one that is there comes first

    def test_damage_is_an_error_that_names_the_file(self, tmp_path):
        corpus = tiny_run.make_corpus(tmp_path / "c")
        shard = Manifest.load(corpus).shard_paths(corpus)[2]
        os.truncate(shard, shard.stat().st_size - 4)
        with pytest.raises(UserError, match=shard.name):
            PretrainDataset(corpus, 16)
        (corpus / "manifest.json").unlink()
        with pytest.raises(UserError, match=r"verify .* --repair"):
            PretrainDataset(corpus, 16)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "0 bytes"), (b"abcde", "5 bytes"), (b"PK\x03\x04zzzz", "not a saved tensor"),
            (b"\0" * 64, "16 tokens, but one window takes 17"),
        ],
    )  # fmt: skip
    def test_bad_files_are_refused(self, tmp_path, content, message):
        path = tmp_path / "tokens.bin"
        path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            PretrainDataset(path, 16)

    @pytest.mark.parametrize("saved", [torch.zeros(4, 20, dtype=torch.int64), torch.zeros(40), {"ids": torch.zeros(3)}])
    def test_saved_tensors_of_another_kind_are_refused(self, tmp_path, saved):
        torch.save(saved, tmp_path / "saved.pt")
        with pytest.raises(UserError, match=r"saved\.pt"):
            PretrainDataset(tmp_path / "saved.pt", 16)

    def test_ids_beyond_the_model_are_refused_when_loaded(self, tmp_path):
        ids = np.zeros(40, "<u4")
        ids[30] = 64
        ids.tofile(tmp_path / "tokens.bin")
        dataset = PretrainDataset(tmp_path / "tokens.bin", 16, vocab_rows=64)
        dataset[0]
        with pytest.raises(UserError, match=r"tokens\.bin: token id 64, but the model has 64 rows"):
            dataset[1]


def test_seed_everything_sets_every_generator(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)

    def draw():
        return random.random(), np.random.random(), torch.rand(1).item()

    seed_everything(5)
    first = draw()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert draw() != first
    seed_everything(5)
    assert draw() == first
    seed_everything(6)
    assert draw() != first


def test_exported_schedule_and_loss():
    assert make_warmup_cosine_lambda(3000, 61000, 0.05)(32000) == pytest.approx(0.525)
    logits, targets = torch.randn(2, 9, 7), torch.randint(0, 7, (2, 9))
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(chunked_cross_entropy(logits, targets), expected)


def test_importing_the_exported_names_loads_no_optional_package():
    code = (
        "import sys, training.pretrain; "
        "print([m for m in ('datasets', 'transformers', 'wandb', 'matplotlib', 'pyarrow') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tiny_run.ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_small_run_learns_and_leaves_what_is_promised(tmp_path):
    corpus = tiny_run.make_corpus(tmp_path / "corpus")
    recipe = tiny_run.write_recipe(tmp_path / "tiny.yaml", corpus, total_steps=40, save_interval=20, eval_interval=20)
    run = tmp_path / "run"
    code, stderr = tiny_run.finish(tiny_run.start_run(config=recipe, out=run, seed=0))
    assert code == 0, stderr
    assert "Traceback" not in stderr
    assert "[model] total params: 0.01M, active: 0.01M" in stderr
    rows = tiny_run.rows(run)
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert rows[-1]["ce"] < rows[0]["ce"] - 0.8
    assert rows[-1]["tokens"] == 40 * 2 * 2 * 16
    assert rows[-1]["position"] == 160
    assert {path.name for path in run.iterdir()} >= {"config.yaml", "run.json", "metrics.jsonl", "events.jsonl"}
    evaluations = tiny_run.events(run, "eval")
    assert [event["step"] for event in evaluations] == [0, 20, 40]
    assert evaluations[-1]["bits_per_byte"] < evaluations[0]["bits_per_byte"] * 0.8
    assert set(evaluations[-1]["by_source"]) == {"prose", "code"}
    assert [event["step"] for event in tiny_run.events(run, "save")] == [20, 40]
