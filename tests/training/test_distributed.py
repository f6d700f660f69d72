"""The same numbers on 1, 2 and 4 ranks, and one decision on all of them."""

import pytest
import ranks
import tiny_run
import torch
from ranks import Job
from safetensors.torch import load_file

EXACT = ("step", "tokens", "epoch", "position", "lr")
CLOSE = ("ce", "aux", "grad_norm", "expert_load", "expert_imbalance", "router_entropy", "sink_mean")


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """A corpus, and a recipe of 4 micro-batches of 2 windows a step."""
    folder = tmp_path_factory.mktemp("ranks")
    corpus = tiny_run.make_corpus(folder / "corpus")
    recipe = tiny_run.write_recipe(
        folder / "tiny.yaml", corpus, gradient_accumulation_steps=4, eval_interval=10, grad_clip=0.5, save_interval=10
    )
    return folder, recipe


def flat(value):
    return [x for item in value for x in flat(item)] if isinstance(value, list) else [value]


def assert_same_rows(run, other, bound):
    """Every row equal: counters and rates exactly, what is computed within a relative bound."""
    rows, others = tiny_run.rows(run), tiny_run.rows(other)
    assert len(rows) == len(others) == 20
    for row, expected in zip(rows, others, strict=True):
        assert {key: row[key] for key in EXACT} == {key: expected[key] for key in EXACT}
        for key in CLOSE:
            found, wanted = flat(row[key]), flat(expected[key])
            assert [x is None for x in found] == [x is None for x in wanted]  # of a step that was skipped
            pairs = [(x, y) for x, y in zip(found, wanted, strict=True) if y is not None]
            assert [x for x, _ in pairs] == pytest.approx([y for _, y in pairs], rel=bound, abs=bound), (row, key)


BOTH_DTYPES = pytest.mark.parametrize(("float64", "bound"), [(False, 1e-6), (True, 1e-10)], ids=["fp32", "float64"])


@BOTH_DTYPES
def test_20_steps_on_2_and_4_ranks_are_those_of_one_process(setting, float64, bound):
    folder, recipe = setting
    # Micro-batches 1 and 2 of step 2 are not finite, wherever they run: every rank skips that step.
    poison = {1: {0: [5, 6]}, 2: {1: [2], 0: [3]}, 4: {1: [1], 2: [1]}}
    kinds = [(1, "ddp"), (2, "ddp"), (4, "ddp"), (2, "fsdp"), (4, "fsdp")]
    runs = {kind: folder / f"{kind[0]}-{kind[1]}-{float64}" for kind in kinds}
    jobs = [
        Job(n, str(recipe), str(run), [f"training.parallelism={p}"], seed=3, float64=float64, poison=poison[n])
        for (n, p), run in runs.items()
    ]
    assert ranks.run(*jobs) == [[0] * n for n, _ in kinds]
    for run in runs.values():
        assert_same_rows(run, runs[1, "ddp"], bound)
        assert [(e["step"], e["micro_batches"]) for e in tiny_run.events(run, "skip")] == [(2, [1, 2])]
        losses = [e["loss"] for e in tiny_run.events(run, "eval")]
        assert losses == pytest.approx([e["loss"] for e in tiny_run.events(runs[1, "ddp"], "eval")], rel=bound)


@BOTH_DTYPES
def test_a_run_goes_from_1_rank_to_2_to_4_and_back(setting, float64, bound, tmp_path):
    _, recipe = setting
    run, unbroken = tmp_path / "run", tmp_path / "unbroken"
    fsdp = ["training.parallelism=fsdp", "training.save_interval=5"]
    plain = fsdp[1:]
    chain = [(1, plain), (2, fsdp), (4, fsdp), (2, plain), (1, plain)]
    jobs = [
        Job(n, str(recipe), str(run), words, 4 * (place + 1), resume_latest=place > 0, seed=3, float64=float64,
            dump=str(tmp_path / f"{place}.pt"))
        for place, (n, words) in enumerate(chain)
    ]  # fmt: skip
    codes = ranks.run(Job(1, str(recipe), str(unbroken), plain, seed=3, float64=float64), *jobs)
    assert codes == [[0], *([0] * n for n, _ in chain)]
    assert_same_rows(run, unbroken, bound)
    for place in range(1, len(chain)):
        step, found = 4 * place, torch.load(tmp_path / f"{place}.pt")
        saved = saved_state(run / "checkpoints", step)
        assert found.keys() == saved.keys()
        for name, tensors in saved.items():
            assert all(torch.equal(a, b) for a, b in zip(found[name], tensors, strict=True)), (step, name)


def saved_state(checkpoints, step):
    """Weights, step count and moments of a checkpoint of either form by name, read without the code under test."""
    if shards := sorted((checkpoints / f"shards_step_{step}").glob("*.safetensors")):
        pieces = {}
        for path in shards:  # the first dimension is shared out in the order of the ranks
            for name, tensor in load_file(path).items():
                pieces.setdefault(name, []).append(tensor)
        whole = {name: torch.cat(tensors) for name, tensors in pieces.items()}
        counts = torch.load(checkpoints / f"counts_step_{step}.pt")["step"]
        return {
            name: [whole[f"model.{name}"], count, whole[f"exp_avg.{name}"], whole[f"exp_avg_sq.{name}"]]
            for name, count in counts.items()
        }
    weights = load_file(checkpoints / f"model_step_{step}.safetensors")
    moments = torch.load(checkpoints / f"optim_step_{step}.pt")["state"]
    return {name: [weights[name], *moments[name].values()] for name in weights}
