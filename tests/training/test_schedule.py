"""Multipliers against the closed forms and golden figures of the recipe."""

import math

import pytest
import torch

from gpt_oss_lite.config import TrainingConfig
from gpt_oss_lite.training.optimizer import make_optimizer, make_scheduler
from gpt_oss_lite.training.schedule import make_multiplier, make_warmup_cosine_lambda

RECIPE = make_warmup_cosine_lambda(warmup_steps=3000, total_steps=61000, min_lr_ratio=0.05)


@pytest.mark.parametrize(
    ("step", "multiplier"),
    [
        (0, 0.0), (1500, 0.5), (3000, 1.0), (10000, 0.9662639), (32000, 0.525), (46500, 0.1891243), (60999, 0.05),
        (61000, 0.05), (70000, 0.05),
    ],
)  # fmt: skip
def test_golden_multipliers(step, multiplier):
    assert RECIPE(step) == pytest.approx(multiplier, abs=5e-8)


def test_sum_over_the_steps_and_integral():
    assert math.fsum(RECIPE(step) for step in range(61000)) == pytest.approx(31949.975, abs=1e-3)
    # Trapezium over the same grid is exact for the ramp, and for the cosine up to terms of h^2.
    trapezium = math.fsum((RECIPE(step) + RECIPE(step + 1)) / 2 for step in range(61000))
    assert trapezium == pytest.approx(31950.0, abs=1e-3)


def test_no_warmup_starts_at_the_peak():
    assert make_warmup_cosine_lambda(0, 10, 0.1)(0) == 1.0


def test_constant_and_stable_decay():
    constant = make_multiplier(TrainingConfig(schedule="constant", warmup_steps=4, total_steps=100))
    assert [constant(step) for step in (0, 2, 4, 99, 1000)] == [0, 0.5, 1, 1, 1]
    stable = make_multiplier(
        TrainingConfig(schedule="wsd", warmup_steps=4, total_steps=100, decay_steps=20, min_lr_ratio=0.1)
    )
    assert [stable(step) for step in (0, 2, 4, 80, 90, 100, 500)] == pytest.approx([0, 0.5, 1, 1, 0.55, 0.1, 0.1])


def test_optimizer_sees_the_multiplier_of_each_step():
    config = TrainingConfig(lr=1.0, warmup_steps=4, total_steps=10, min_lr_ratio=0.0)
    optimizer = make_optimizer(torch.nn.Linear(2, 2), config)
    scheduler = make_scheduler(optimizer, config)
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0, 0.25, 0.5, 0.75, 1, (1 + math.cos(math.pi / 6)) / 2])
