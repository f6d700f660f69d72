"""Fuzzed input: configs, manifests, shards and checkpoints, damaged in every way that hypothesis thinks of.

The promise: the right answer, or an error in one line that names the file; never another exception, a hang, or a value
that is silently another than the file's. `test_fuzz.py` runs a few hundred cases, `scripts/torture.py` 10,000.
"""

import copy
import json
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tiny_run
import torch
import yaml
from forging import forge
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st

from gpt_oss_lite.config import ModelConfig, TrainingConfig
from gpt_oss_lite.config.recipe import dump_recipe, load_recipe
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.checkpoint import CheckpointManager
from gpt_oss_lite.training.dataset import PretrainDataset, check_corpus
from gpt_oss_lite.training.optimizer import make_optimizer, make_scheduler
from gpt_oss_lite.training.snapshot import DamagedCheckpoint
from shared_data.errors import UserError
from shared_data.yaml_files import parse_yaml

CASE_LIMIT_S = 20

# Values that break naive readers: types that look alike, extremes, and what YAML 1.1 reads differently.
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-2, 70), st.floats(), st.text(max_size=8),
    st.sampled_from([2**63, -(2**63), 10**40, 1e308, 5e-324, -0.0, "yes", "1e3", "010", "0x1f", "~", "", " ", "wsd"]),
)  # fmt: skip
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner))


@contextmanager
def time_limit() -> Iterator[None]:
    """A case that hangs is a failure."""

    def late(number: int, frame: Any) -> None:
        raise AssertionError(f"no answer within {CASE_LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(CASE_LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def one_line(error: UserError | OSError, *names: str) -> None:
    """The error is what a command can print: one line that names one of the files."""
    text = " ".join(str(error).split())
    assert text
    assert "Traceback" not in text
    assert any(name in text for name in names), text


def damaged(draw: Any, content: bytes) -> bytes:
    """A file after an accident: bytes flipped, lost, added, doubled or swapped; or another file altogether."""
    kind = draw(st.sampled_from(["flip", "cut", "append", "insert", "zero", "double", "foreign"]))
    at = draw(st.integers(0, max(len(content) - 1, 0)))
    if kind == "flip":
        return content[:at] + bytes([content[at] ^ draw(st.integers(1, 255))]) + content[at + 1 :]
    if kind == "cut":
        return content[:at]
    if kind == "append":
        return content + draw(st.binary(min_size=1, max_size=64))
    if kind == "insert":
        return content[:at] + draw(st.binary(min_size=1, max_size=16)) + content[at:]
    if kind == "zero":
        return content[:at] + b"\0" * len(content[at : at + 512]) + content[at + 512 :]
    if kind == "double":
        return content + content
    return draw(st.binary(max_size=200) | st.sampled_from([b"", b"PK\x03\x04", b"\x80\x02}q\x00.", b"{}", b"null"]))


def changed_somewhere(draw: Any, content: Any) -> Any:
    """A JSON-like value with one of its parts replaced, removed, renamed or doubled."""
    content = copy.deepcopy(content)
    place = content
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return content
        key = draw(st.sampled_from(keys))
        if isinstance(place[key], (dict, list)) and place[key] and draw(st.booleans()):
            place = place[key]
            continue
        action = draw(st.sampled_from(["replace", "replace", "remove", "rename"]))
        if action == "replace":
            place[key] = draw(VALUES)
        else:
            value = place.pop(key)
            if action == "rename" and isinstance(place, dict):
                place[f"{key}{draw(st.sampled_from(['s', '_', 'x']))}"] = value
        return content


class Fuzz:
    """The four properties, each over one small valid input that the cases damage.

    Args:
        folder: for files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cases: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.corpus = tiny_run.make_corpus(folder / "fuzz-corpus", n_documents=20)
        self.recipe = tiny_run.write_recipe(folder / "fuzz.yaml", self.corpus).read_text()
        self.model_config = ModelConfig(**{**tiny_run.MODEL, "n_layers": 1, "n_experts": 2})
        self.saved = folder / "saved"
        model, optimizer, scheduler = self.live(0)
        model.zero_grad()
        logits, aux = model(torch.arange(8)[None])
        (logits.logsumexp(-1).mean() + aux).backward()
        optimizer.step(), scheduler.step()
        about = {"model": self.model_config.model_dump(mode="json")}
        CheckpointManager(self.saved).save(model, optimizer, 2, scheduler, about)
        self.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.moments = copy.deepcopy(optimizer.state_dict()["state"])

    def live(self, seed: int) -> tuple[GPTOSS, Any, Any]:
        """A model, its optimizer and its schedule."""
        torch.manual_seed(seed)
        model, training = GPTOSS(self.model_config), TrainingConfig(warmup_steps=1, total_steps=10)
        optimizer = make_optimizer(model, training)
        return model, optimizer, make_scheduler(optimizer, training)

    # A config is loaded as it says, or refused.

    def config(self, draw: Any) -> None:
        path = self.folder / "case.yaml"
        if draw(st.integers(0, 3)):
            path.write_text(yaml.safe_dump(changed_somewhere(draw, yaml.safe_load(self.recipe)), allow_unicode=True))
        else:
            path.write_bytes(damaged(draw, self.recipe.encode()))
        try:
            recipe = load_recipe(path)
        except UserError as error:
            self.refused["config"] += 1
            one_line(error, path.name)
            return
        said, taken = parse_yaml(path.read_bytes(), ""), recipe.model_dump(mode="json")
        for block, keys in said.items():
            for key, value in keys.items():
                assert taken[block][key] == value, f"{block}.{key} is {value!r} in the file, {taken[block][key]!r} here"
        path.write_text(dump_recipe(recipe))
        assert load_recipe(path) == recipe

    # A corpus gives the tokens that its files hold, or is refused.

    def manifest(self, draw: Any) -> None:
        folder = self.folder / "manifest-case"
        if not folder.exists():
            shutil.copytree(self.corpus, folder)
        content = (self.corpus / "manifest.json").read_bytes()
        if draw(st.integers(0, 3)):
            content = json.dumps(changed_somewhere(draw, json.loads(content))).encode()
        else:
            content = damaged(draw, content)
        (folder / "manifest.json").write_bytes(content)
        self._corpus_is_right("manifest", folder)

    def shard(self, draw: Any) -> None:
        folder = self.folder / "shard-case"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.corpus, folder)
        path = draw(st.sampled_from(sorted(folder.glob("shard_*"))))
        path.write_bytes(damaged(draw, path.read_bytes()))
        if draw(st.booleans()):
            path = path.rename(folder / "one-file")  # as a corpus in one file
            self._corpus_is_right("shard", path)
        else:
            self._corpus_is_right("shard", folder)

    def _corpus_is_right(self, kind: str, path: Path) -> None:
        config = ModelConfig(**tiny_run.MODEL)
        try:
            dataset = PretrainDataset(path, config.max_seq_len, config.embedding_rows)
            check_corpus(dataset, config)
        except (UserError, OSError) as error:
            self.refused[kind] += 1
            one_line(error, path.name, "shard_")
            return
        paths = [path] if dataset.manifest is None else dataset.manifest.shard_paths(path)
        tokens = np.concatenate([np.fromfile(shard, "<u4") for shard in paths])
        assert dataset.total_tokens == len(tokens)
        assert tokens.max() < config.embedding_rows
        assert np.array_equal(dataset.tokens(0, len(tokens)), tokens)
        assert len(dataset) == (len(tokens) - 1) // config.max_seq_len

    # A checkpoint loads bit for bit, or is refused and its file named.

    def checkpoint(self, draw: Any) -> None:
        folder = self.folder / "checkpoint-case"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.saved, folder)
        path = draw(st.sampled_from(sorted(folder.iterdir())))
        path.write_bytes(damaged(draw, path.read_bytes()))
        forged = path.suffix != ".json" and draw(st.integers(0, 2)) == 0
        if forged:
            forge(folder, path.name)
        model, optimizer, scheduler = self.live(1)
        manager = CheckpointManager(folder)
        try:
            manager.load(model, 2, optimizer, scheduler, with_rng=True)
        except UserError as error:
            self.refused["checkpoint"] += 1
            one_line(error, path.name, "no complete checkpoint of step 2")
            if not forged and not isinstance(error, DamagedCheckpoint):
                raise
            return
        if forged:
            return  # its author wrote what loads: any numbers, but nothing was executed
        assert all(torch.equal(tensor, self.weights[name]) for name, tensor in model.state_dict().items())
        loaded = optimizer.state_dict()["state"]
        assert all(torch.equal(loaded[i][key], self.moments[i][key]) for i in self.moments for key in self.moments[i])

    def run(self, name: str, n_cases: int, seed: int, shrink: bool = True) -> None:
        """Try a property on so many cases; raises on the first that breaks it, as small as hypothesis can make it."""
        phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
        check: Callable[[Any], None] = getattr(self, name)

        @hypothesis_seed(seed)
        @settings(
            max_examples=n_cases, deadline=None, database=None, phases=phases, suppress_health_check=list(HealthCheck)
        )
        @given(st.data())
        def cases(data: Any) -> None:
            self.cases[name] += 1
            with time_limit():
                check(data.draw)

        cases()


PROPERTIES = ("config", "manifest", "shard", "checkpoint")


def run_all(n_cases: int, seed: int, folder: Path) -> dict[str, Any]:
    """All properties, n_cases in all; the counts, and what broke."""
    fuzz, losses = Fuzz(folder), []
    for name in PROPERTIES:
        try:
            fuzz.run(name, -(-n_cases // len(PROPERTIES)), seed)
        except Exception as failure:
            losses.append(f"{name}: {type(failure).__name__}: {failure}")
    return {"cases": fuzz.cases.total(), "by_kind": dict(fuzz.cases), "refused": dict(fuzz.refused), "losses": losses}
