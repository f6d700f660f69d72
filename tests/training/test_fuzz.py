"""A few hundred fuzzed cases; `make torture` runs 10,000."""

import pytest
from fuzz import PROPERTIES, Fuzz

from gpt_oss_lite.training.checkpoint import CheckpointManager


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory):
    return Fuzz(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("name", PROPERTIES)
def test_fuzzed_input_gives_the_right_answer_or_one_line(fuzz, name):
    fuzz.run(name, n_cases=75, seed=0)
    assert fuzz.cases[name] >= 60
    assert 0.2 < fuzz.refused[name] / fuzz.cases[name] <= 1.0  # most damage is noticed


def test_a_broken_promise_is_found(fuzz, monkeypatch):
    """The harness itself: a reader that compares no hashes does not pass."""
    monkeypatch.setattr(CheckpointManager, "verify", CheckpointManager.meta)
    with pytest.raises(AssertionError):
        fuzz.run("checkpoint", n_cases=200, seed=0, shrink=False)
