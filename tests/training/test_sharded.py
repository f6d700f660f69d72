"""Shards: the same bytes whether a run was killed or not."""

import pytest
import ranks
import tiny_run
from ranks import Job

STEP = 2


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs on 2 ranks with fsdp: one of 4 steps without a break, and one that was killed in step 3."""
    folder = tmp_path_factory.mktemp("shards")
    corpus = tiny_run.make_corpus(folder / "corpus")
    recipe = tiny_run.write_recipe(
        folder / "tiny.yaml", corpus, gradient_accumulation_steps=4, total_steps=4, save_interval=STEP,
        parallelism="fsdp",
    )  # fmt: skip
    unbroken, killed = folder / "unbroken", folder / "killed"
    codes = ranks.run(
        Job(2, str(recipe), str(unbroken), seed=3),
        Job(2, str(recipe), str(killed), seed=3, kill_after=6),  # 2 forward passes a step on each rank
        Job(2, str(recipe), str(killed), resume_latest=True),
    )
    assert codes == [[0, 0], [-9, -9], [0, 0]]
    assert tiny_run.events(killed, "resume")[0]["step"] == STEP
    return unbroken, killed


def test_every_file_of_a_run_that_was_killed_is_byte_for_byte_that_of_the_unbroken_one(runs):
    unbroken, killed = runs
    for step in (STEP, 2 * STEP):
        expected = tiny_run.digests(unbroken, step)
        assert sum("shard-" in name for name in expected) == 2
        assert tiny_run.digests(killed, step) == expected
