"""Which micro-batches count as non-finite, and when a run must go back."""

import pytest
import torch
from syncs import syncs_refused

from gpt_oss_lite.training.nan_guard import LAG_STEPS, NanGuard, micro_batch_flags

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("losses", "norm", "flags"),
    [
        ([1.0, 2.0], 3.0, [False, False]),
        ([1.0, NAN], NAN, [False, True]),
        ([INF, 1.0], 3.0, [True, False]),
        ([1.0, 2.0], INF, [True, True]),
        ([1.0, 2.0], NAN, [True, True]),
    ],
)
def test_flags(losses, norm, flags):
    assert micro_batch_flags(torch.tensor(losses), torch.tensor(norm)).tolist() == flags


def feed(guard, steps, start=1):
    """Record steps of 2 micro-batches of 3 windows each, reading as the loop does; the verdicts with something to
    say."""
    verdicts = []
    for step, flags in enumerate(steps, start):
        guard.record(step, 6 * (step - 1), torch.tensor(flags))
        verdicts.append(guard.read())
    return [v for v in verdicts if v.skipped or v.resume_position is not None]


def test_flags_are_read_late_and_a_skip_is_reported_once():
    guard = NanGuard(max_consecutive=5, micro_batch_size=3)
    good, bad = [False, False], [False, True]
    assert feed(guard, [bad, *[good] * (LAG_STEPS - 1)]) == []
    (verdict,) = feed(guard, [good, good], start=LAG_STEPS + 1)
    (skip,) = verdict.skipped
    assert (skip.step, skip.position, skip.micro_batches) == (1, 0, [1])
    assert guard.read(everything=True).skipped == []


def test_five_in_a_row_across_steps_send_the_run_back_to_after_the_last():
    guard = NanGuard(max_consecutive=5, micro_batch_size=3)
    verdicts = feed(guard, [[False, True], [True, True], [True, True], *[[False, False]] * LAG_STEPS])
    assert verdicts[-1].resume_position == 18
    guard = NanGuard(max_consecutive=5, micro_batch_size=3)
    verdicts = feed(guard, [[True, True], [True, True], [True, False], *[[False, False]] * LAG_STEPS])
    assert verdicts[-1].resume_position == 15  # the window after the fifth: the step's other micro-batch was fine


def test_one_finite_micro_batch_starts_the_count_anew():
    guard = NanGuard(max_consecutive=5, micro_batch_size=3)
    steps = [[True, True], [True, True], [False, True], [True, True], [True, False]]
    verdicts = feed(guard, steps)
    rest = guard.read(everything=True)
    assert all(verdict.resume_position is None for verdict in [*verdicts, rest])
    assert guard.streak == 0


def test_a_count_goes_on_from_a_checkpoint():
    guard = NanGuard(max_consecutive=5, micro_batch_size=3)
    guard.reset(streak=4)
    guard.record(7, 36, torch.tensor([True, False]))
    assert guard.read(everything=True).resume_position == 39


@pytest.mark.gpu
def test_recording_and_reading_on_the_gpu_do_not_wait():
    guard = NanGuard(max_consecutive=5, micro_batch_size=3)
    losses, norm = torch.tensor([1.0, NAN], device="cuda"), torch.tensor(1.0, device="cuda")
    with syncs_refused():
        for step in range(4):
            guard.record(step + 1, 6 * step, micro_batch_flags(losses, norm))
    assert [skip.micro_batches for skip in guard.read(everything=True).skipped] == [[1]] * 4
