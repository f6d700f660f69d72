"""Thinning, smoothing, axes and images: nothing is lost, shifted or out of place."""

import base64
import io
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from gpt_oss_lite.report.chart import number
from gpt_oss_lite.report.curves import Axis, axis_over, smooth, thin
from gpt_oss_lite.report.heat_map import heat_map, quantise


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(2, 40))
def test_thinning_keeps_points_of_the_curve_its_ends_and_the_extremes_of_each_span(values, buckets):
    x, y = np.arange(len(values), dtype=np.float64), np.array(values)
    kept_x, kept_y = thin(x, y, buckets)
    assert len(kept_x) <= max(2 * buckets + 2, 2)
    assert (np.diff(kept_x) > 0).all()
    assert (y[kept_x.astype(int)] == kept_y).all()
    assert (kept_x[0], kept_x[-1]) == (x[0], x[-1])
    spans = np.minimum((x * buckets / max(x[-1], 1)).astype(int), buckets - 1)
    for span in set(spans) if len(values) > 2 * buckets else ():
        inside = y[spans == span]
        assert {inside.min(), inside.max()} <= set(kept_y) or len(inside) == 1


def test_one_spike_among_61000_points_is_drawn():
    y = np.zeros(61_000)
    y[12_345] = 9.0
    x, kept = thin(np.arange(61_000.0), y)
    assert x[kept.argmax()] == 12_345
    assert len(x) < 900


def test_smoothing_keeps_a_constant_and_a_slope_where_they_are():
    assert smooth(np.full(1000, 3.0)) == pytest.approx(3.0)
    slope = np.arange(2000.0)
    assert smooth(slope)[500:1500] == pytest.approx(slope[500:1500], abs=1e-6)  # a one-sided average lags by 14
    values, at = np.array([5.0, 1.0, 4.0, 0.0]), np.arange(4)
    weights = 0.5 ** np.abs(at[:, None] - at)  # so short a curve falls to half in one point
    assert smooth(values) == pytest.approx(weights @ values / weights.sum(axis=1))
    noise = np.random.default_rng(0).normal(size=2000)
    assert smooth(noise).std() < 0.3


@pytest.mark.parametrize(
    ("axis", "ticks"),
    [
        (Axis(0, 10), [0, 2, 4, 6, 8, 10]),
        (Axis(0, 7.995e9), [0, 2e9, 4e9, 6e9]),
        (Axis(-0.3, 0.3), [-0.2, 0, 0.2]),
        (Axis(0.99, 1.02), [0.99, 1.0, 1.01, 1.02]),
        (Axis(2.8, 12.1, log=True), [3, 4, 5, 7, 10]),
        (Axis(0.05, 40, log=True), [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20]),
        (Axis(2.80, 2.95, log=True), [2.8, 2.85, 2.9, 2.95]),
    ],
)
def test_ticks_are_round_numbers_inside_the_range(axis, ticks):
    assert axis.ticks() == pytest.approx(ticks)


def test_places_on_an_axis():
    assert Axis(1, 100, log=True).place(10.0) == pytest.approx(0.5)
    assert Axis(0, 4).place(np.array([-1.0, 1.0, 9.0])).tolist() == [0, 0.25, 1]
    assert not axis_over([np.array([0.0, 1.0])], log=True).log  # zero has no logarithm
    empty, flat = axis_over([np.array([math.nan])]), axis_over([np.full(3, 2.0)])
    assert empty.low < empty.high
    assert flat.low < 2.0 < flat.high


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (3.14159, "3.142"), (131072, "131.1 k"), (2048, "2048"), (7.995392e9, "7.995 B"), (4e-4, "0.0004"),
     (2e-5, "2.00e-5"), (1e6, "1 M"), (-0.25, "-0.25"), (math.nan, "n/a")],
)  # fmt: skip
def test_numbers_in_four_digits(value, text):
    assert number(value) == text


def pixels(heat, dark=False):
    content = base64.b64decode(heat.png(dark).removeprefix("data:image/png;base64,"))
    return np.array(Image.open(io.BytesIO(content)).convert("RGBA"))


def test_the_heat_map_has_a_row_an_expert_and_blue_for_too_little_and_orange_for_too_much():
    load = np.full((4, 2, 4), 0.25)
    load[2:, 1] = [0.0, 0.25, 0.5, 0.25]
    image = pixels(heat_map(load))
    assert image.shape == (2 * 4 + 1, 4, 4)
    assert (image[4, :, 3] == 0).all()  # between the layers the page shows
    assert (image[:4] == image[0, 0]).all()  # balanced everywhere
    idle, busy = image[5, 3].astype(int), image[7, 3].astype(int)
    assert idle[2] > idle[0] + 50
    assert busy[0] > busy[2] + 50
    assert (image[5, 0] == image[0, 0]).all()
    assert not np.array_equal(pixels(heat_map(load), dark=True), image)


def test_a_column_is_the_mean_of_its_rows_and_rows_without_figures_do_not_count():
    rng = np.random.default_rng(0)
    load = rng.dirichlet(np.ones(8), size=(1000, 3))
    heat = heat_map(load)
    first, last = heat.first_rows[7], heat.first_rows[8]
    assert (heat.cells_LEC[:, :, 7] == quantise(8 * load[first:last].mean(axis=0))).all()
    gaps = load.copy()
    gaps[first:last:2] = np.nan
    assert (heat_map(gaps).cells_LEC[:, :, 7] == quantise(8 * load[first + 1 : last : 2].mean(axis=0))).all()
    assert heat_map(np.full((5, 2, 4), np.nan)) is None
    assert heat_map(np.empty((0, 0, 0))) is None


def test_quantised_loads():
    assert quantise(np.array([math.nan, 0.0, 1.0, 3.0, 9.0])).tolist() == [0, 1, 128, 255, 255]
