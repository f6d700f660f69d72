"""Steps on stacks are PyTorch's Muon's, within the roundings that those have; how many operations they take."""

import copy
from collections import Counter
from typing import Any

import pytest
import tiny_run
import torch
from syncs import syncs_refused
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Muon
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training import muon
from gpt_oss_lite.training.muon import STACK_BYTES, STACK_ELEMENTS, StackedMuon, orthogonal, stacks
from gpt_oss_lite.training.optimizer import muon_matrices

# Tall, wide and square ones, mixed; some alone in their shape; and one without a gradient, its shape's second.
SHAPES = [(96, 48), (48, 96), (64, 64), (96, 48), (64, 64), (7, 200), (48, 96), (200, 7), (96, 48), (1, 9), (96, 48),
          (64, 64), (130, 260), (96, 48)]  # fmt: skip
WITHOUT_GRADIENT = 3
KEYS = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


def matrices_on(device: str) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, device=device)) for shape in SHAPES]


def give_gradients(*lists: list[nn.Parameter], seed: int) -> None:
    """The same ones to each list: of several sizes, and from step to step alike in part."""
    for i, matrices in enumerate(zip(*lists, strict=True)):
        fixed, own = (
            torch.randn(SHAPES[i], generator=torch.Generator().manual_seed(number)) for number in (i, 100 * seed + i)
        )
        gradient = 10.0 ** (i % 5 - 3) * (fixed + own)
        for matrix in matrices:
            matrix.grad = None if i == WITHOUT_GRADIENT else gradient.to(matrix.device)


def iterated_in_float64(direction: Tensor, steps: int = 5) -> Tensor:
    """The iteration without roundings, through singular values: they alone are changed (Jordan et al., 2024)."""
    left, values, right = torch.linalg.svd(direction.double() / direction.double().norm(), full_matrices=False)
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ values.diag() @ right


def update_of(before: Tensor, after: Tensor, group: dict[str, Any]) -> Tensor:
    """What was subtracted after the decay, for a rate of 1 and before its size was adjusted."""
    before, after = before.detach().double(), after.detach().double()
    rows, columns = before.shape
    of_adamw = group["adjust_lr_fn"] == "match_rms_adamw"
    size = 0.2 * max(rows, columns) ** 0.5 if of_adamw else max(1, rows / columns) ** 0.5
    return (before * (1 - group["lr"] * group["weight_decay"]) - after) / (group["lr"] * size)


def largest_distance(ours: StackedMuon, theirs: Muon, steps: int = 4) -> float:
    """Between both updates of a matrix, in units of the distance between PyTorch's and the one without roundings, over
    some steps: two results that round alike, but not the same way, are at most 2 apart."""
    largest = torch.zeros((), dtype=torch.float64)
    group, our_matrices = theirs.param_groups[0], ours.param_groups[0]["params"]
    for step in range(steps):
        give_gradients(our_matrices, group["params"], seed=step)
        before = [[matrix.detach().clone() for matrix in matrices] for matrices in (our_matrices, group["params"])]
        ours.step()
        theirs.step()
        for i, (our, their) in enumerate(zip(our_matrices, group["params"], strict=True)):
            if i == WITHOUT_GRADIENT:
                assert torch.equal(our, before[0][i])
                assert our not in ours.state
                continue
            our_update, their_update = update_of(before[0][i], our, group), update_of(before[1][i], their, group)
            momentum = theirs.state[their]["momentum_buffer"]
            direction = their.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
            rounding = (their_update - iterated_in_float64(direction)).norm()
            assert rounding < 0.1 * their_update.norm()  # the oracle is one: the unit is roundings and nothing else
            largest = largest.maximum(((our_update - their_update).norm() / rounding).cpu())
    return float(largest)


@pytest.fixture
def small_stacks(monkeypatch):
    """Two of the commonest shape in a stack; the largest matrix is larger than a stack."""
    monkeypatch.setattr(muon, "STACK_ELEMENTS", 2 * 96 * 48)


@pytest.mark.parametrize("keys", [{}, {"nesterov": False}, {"adjust_lr_fn": "original"}, {"adjust_lr_fn": None}])
@pytest.mark.parametrize("device", DEVICES)
def test_steps_are_those_of_pytorchs_muon_within_its_own_roundings(device, keys, small_stacks):
    ours, theirs = (kind(matrices_on(device), **{**KEYS, **keys}) for kind in (StackedMuon, Muon))
    assert largest_distance(ours, theirs) < 2
    for our, their in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        assert ours.state[our].keys() == theirs.state[their].keys()
        for name, value in ours.state[our].items():
            apart = (value - theirs.state[their][name]).abs().max()
            assert apart <= (0 if device == "cpu" else 1e-6) * value.abs().max()


@pytest.mark.parametrize(
    "other", [{"ns_coefficients": (3.4445, -4.7750, 2.1)}, {"ns_coefficients": (3.3, -4.7750, 2.0315)}, {"ns_steps": 4},
              {"nesterov": False}, {"momentum": 0.95}, {"weight_decay": 0.09}, {"lr": 0.021}, {"eps": 100.0},
              {"adjust_lr_fn": "original"}],
    ids=lambda other: "-".join(other),
)  # fmt: skip
def test_any_other_arithmetic_is_farther_off_than_roundings(other, small_stacks):
    ours = StackedMuon(matrices_on("cpu"), **{**KEYS, **other})
    assert largest_distance(ours, Muon(matrices_on("cpu"), **KEYS)) > 2


@pytest.mark.parametrize(("first", "then"), [(Muon, StackedMuon), (StackedMuon, Muon)])
def test_a_state_of_either_is_gone_on_with_by_the_other(first, then):
    ours, theirs = StackedMuon(matrices_on("cpu"), **KEYS), Muon(matrices_on("cpu"), **KEYS)
    saves, loads = (ours, theirs) if first is StackedMuon else (theirs, ours)
    saves.param_groups[0]["lr"] = 0.01
    for step in range(2):
        give_gradients(saves.param_groups[0]["params"], seed=step)
        saves.step()
    loads.load_state_dict(copy.deepcopy(saves.state_dict()))
    assert loads.param_groups[0]["lr"] == 0.01
    one, other = loads.state_dict(), saves.state_dict()
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    loads.param_groups[0]["lr"] = saves.param_groups[0]["lr"] = KEYS["lr"]
    assert largest_distance(ours, theirs) < 2


@pytest.mark.parametrize("shape", [(96, 48), (48, 96), (64, 64), (7, 200)])
def test_singular_values_come_near_one(shape):
    """Those of at least 0.02: the polynomial brings all from 0.02 to 1 to between 0.68 and 1.13."""
    torch.manual_seed(1)
    smaller = min(shape)
    left, _, right = torch.linalg.svd(torch.randn(5, *shape), full_matrices=False)
    values = torch.linspace(0.05, 1.0, smaller).expand(5, smaller)
    values = values / values.norm(dim=1, keepdim=True)
    counted = values[0] >= 0.02
    stack_BRC = (left @ torch.diag_embed(values) @ right).bfloat16()
    after = orthogonal(stack_BRC, (3.4445, -4.7750, 2.0315), steps=5)
    assert after.shape == stack_BRC.shape
    projected = (left.mT @ after.float() @ right.mT).diagonal(dim1=1, dim2=2)[:, counted]
    assert counted.sum() > 0.8 * smaller
    assert 0.66 < projected.min() < 0.8
    assert 1.0 < projected.max() < 1.15


def test_matrices_of_one_shape_are_stacked_up_to_the_bound(small_stacks):
    matrices = matrices_on("cpu")
    sizes = Counter((tuple(stack[0].shape), len(stack)) for stack in stacks(matrices))
    assert sizes == {
        ((96, 48), 2): 2, ((96, 48), 1): 1, ((48, 96), 2): 1, ((64, 64), 2): 1, ((64, 64), 1): 1, ((7, 200), 1): 1,
        ((200, 7), 1): 1, ((1, 9), 1): 1, ((130, 260), 1): 1,
    }  # fmt: skip
    assert sorted(id(matrix) for stack in stacks(matrices) for matrix in stack) == sorted(map(id, matrices))
    of_two_dtypes = [torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bfloat16)]
    assert [len(stack) for stack in stacks(of_two_dtypes)] == [1, 1]


class _Operations(TorchDispatchMode):
    """Names of the operations that the host dispatches, and the most bytes of what they made that were there."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.peak_bytes = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        self._made = {place: (kept, size) for place, (kept, size) in self._made.items() if not kept.expired()}
        for storage in (leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            if storage._cdata not in given:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._made.values()))
        return result


def operations_of_a_step(kind: type[Muon], config: ModelConfig) -> _Operations:
    """Of one with momenta there, on tensors without data: what the host would wait to read is an error with them."""
    with torch.device("meta"):
        model = GPTOSS(config)
    matrices = list(muon_matrices(model).values())
    for matrix in matrices:
        matrix.grad = torch.empty_like(matrix)
    optimizer = kind(matrices, **KEYS)
    optimizer.step()
    with _Operations() as operations:
        optimizer.step()
    return operations


# Operations that compute nothing.
NOTHING = {"permute", "transpose", "unbind", "empty", "_record_function_enter_new", "_record_function_exit"}


def test_a_step_takes_as_many_operations_for_many_layers_as_for_few():
    few, many = (
        operations_of_a_step(StackedMuon, ModelConfig(**{**tiny_run.MODEL, "n_layers": layers})).names
        for layers in (2, 20)
    )
    assert few == many
    with torch.device("meta"):
        model = GPTOSS(ModelConfig(**tiny_run.MODEL))
    shapes = {matrix.shape for matrix in muon_matrices(model).values()}
    assert few["bmm"] + few["baddbmm"] == 15 * len(shapes)
    assert few["_local_scalar_dense"] == few["item"] == few["is_nonzero"] == few["equal"] == 0


def test_operations_and_workspace_of_the_502m_model():
    """360 matrices: PyTorch's 8,280 operations that compute, 5,400 of them products, become 168 and 105; and no more is
    made beside state and gradients than is counted for the largest stack."""
    theirs, ours = (operations_of_a_step(kind, ModelConfig()) for kind in (Muon, StackedMuon))
    their_work, our_work = (
        {name: count for name, count in one.names.items() if name not in NOTHING} for one in (theirs, ours)
    )
    assert (their_work["mm"] + their_work["addmm"], sum(their_work.values())) == (15 * 360, 8280)
    assert (our_work["bmm"] + our_work["baddbmm"], sum(our_work.values())) == (15 * 7, 168)
    assert ours.peak_bytes - 2 * 56 == STACK_BYTES * 56 * 768 * 1536 <= STACK_BYTES * STACK_ELEMENTS  # and 56 norms


def test_workspace_of_square_matrices_is_no_larger():
    torch.manual_seed(0)
    matrices = [nn.Parameter(torch.randn(64, 64)) for _ in range(5)]
    for matrix in matrices:
        matrix.grad = torch.randn(64, 64)
    optimizer = StackedMuon(matrices, **KEYS)
    optimizer.step()
    with _Operations() as operations:
        optimizer.step()
    assert STACK_BYTES * 5 * 64 * 64 <= operations.peak_bytes < STACK_BYTES * 5 * 64 * 64 + 1000  # norms of 5 matrices


@pytest.mark.gpu
def test_the_host_does_not_wait_in_a_step():
    matrices = matrices_on("cuda")
    optimizer = StackedMuon(matrices, **KEYS)
    for seed in range(2):
        give_gradients(matrices, seed=seed)
        before = [matrix.detach().clone() for matrix in matrices]
        with syncs_refused():
            optimizer.step()
        moved = [not torch.equal(matrix, old) for matrix, old in zip(matrices, before, strict=True)]
        assert moved == [index != WITHOUT_GRADIENT for index in range(len(SHAPES))]
