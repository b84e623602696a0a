"""Calibrators: what they recover, what they promise, how they are saved."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.optimize import isotonic_regression

from blips.errors import InputError
from blips.uq import metrics
from blips.uq.calibration import (
    ONE_SIGMA,
    ConformalCalibrator,
    IsotonicCalibrator,
    ScaleCalibrator,
    calibrator_from_dict,
    isotonic_blocks,
)

CALIBRATORS = (ScaleCalibrator, IsotonicCalibrator, ConformalCalibrator)
positive = st.floats(1e-3, 1e3, allow_subnormal=False)


def synthetic(n=4000, seed=0, distort=lambda std: std):
    """Errors of known sigma; the model reports a distorted one."""
    rng = np.random.default_rng(seed)
    mean, std = rng.normal(size=n), np.exp(rng.normal(-2.0, 0.8, n))
    return mean, distort(std), mean + std * rng.normal(size=n)


# ----------------------------------------------------------------------------------------- scale
@pytest.mark.parametrize("factor", [0.2, 1.0, 3.0])
def test_scale_recovers_a_known_factor(factor):
    calibrator = ScaleCalibrator.fit(*synthetic(distort=lambda std: std / factor))
    assert calibrator.factor == pytest.approx(factor, rel=4 / np.sqrt(2 * 4000))


def test_scale_is_the_minimum_of_the_nll():
    mean, std, target = synthetic(n=100, distort=lambda std: 0.3 * std)
    best = ScaleCalibrator.fit(mean, std, target).apply(std)
    least = metrics.gaussian_nll(mean, best, target)
    for nudge in (0.98, 1.02):
        assert metrics.gaussian_nll(mean, nudge * best, target) > least
    assert metrics.zms(mean, best, target) == pytest.approx(1.0)


def test_scale_refuses_perfect_predictions():
    with pytest.raises(InputError, match="scale factor"):
        ScaleCalibrator.fit([1.0, 2.0], [1.0, 1.0], [1.0, 2.0])


# -------------------------------------------------------------------------------------- isotonic
@given(hnp.arrays(float, st.integers(1, 30), elements=st.integers(0, 9).map(float)), st.data())
def test_pooling_matches_scipy(y, data):
    weight = data.draw(hnp.arrays(float, len(y), elements=st.floats(0.5, 5.0)))
    x = np.arange(1.0, len(y) + 1)
    block_x, block_y, block_weight = isotonic_blocks(x, y, weight)
    assert np.all(np.diff(block_x) > 0)
    assert np.all(np.diff(block_y) > 0)
    cumulated = np.searchsorted(np.cumsum(block_weight), np.cumsum(weight) - 0.25)
    np.testing.assert_allclose(
        block_y[cumulated], isotonic_regression(y, weights=weight).x, atol=1e-9
    )


@pytest.mark.parametrize("power", [0.5, 2.0])
def test_isotonic_mends_a_distorted_sigma(power):
    def distort(std):
        return 0.7 * std**power

    calibrator = IsotonicCalibrator.fit(*synthetic(seed=1, distort=distort))
    mean, std, target = synthetic(seed=2, distort=distort)
    truth = synthetic(seed=2)[1]
    scaled = ScaleCalibrator.fit(*synthetic(seed=1, distort=distort)).apply(std)
    mended = calibrator.apply(std)
    nll = {
        name: metrics.gaussian_nll(mean, sigma, target)
        for name, sigma in (("raw", std), ("scale", scaled), ("iso", mended), ("truth", truth))
    }
    assert nll["iso"] < nll["scale"] - 0.1
    assert nll["iso"] < nll["raw"] - 0.1
    assert nll["iso"] < nll["truth"] + 0.03
    assert metrics.ence(mean, mended, target) < 0.1


def test_isotonic_is_strictly_increasing_and_proportional_outside():
    mean, std, target = synthetic(distort=lambda std: std**2)
    calibrator = IsotonicCalibrator.fit(mean, std, target)
    grid = np.geomspace(1e-9, 1e9, 4001)
    mapped = calibrator.apply(grid)
    assert np.all(mapped > 0)
    assert np.all(np.diff(mapped) > 0)
    low, high = calibrator.std_in[0], calibrator.std_in[-1]
    for inner, outer in ((low, low / 1000), (high, high * 1000)):
        ratio = calibrator.apply([outer, inner]) / [outer, inner]
        assert ratio[0] == pytest.approx(ratio[1])
    np.testing.assert_allclose(calibrator.apply(calibrator.std_in), calibrator.std_out)
    error = np.abs(target - mean)
    rho = metrics.spearman(std, error)
    assert metrics.spearman(calibrator.apply(std), error) == pytest.approx(rho, abs=1e-12)


def test_isotonic_does_not_depend_on_units_or_order():
    mean, std, target = synthetic(n=500)
    std = np.round(std, 2) + 0.01  # many equal sigmas
    calibrator = IsotonicCalibrator.fit(mean, std, target)
    unit = 23.06
    other_unit = IsotonicCalibrator.fit(unit * mean, unit * std, unit * target)
    np.testing.assert_allclose(other_unit.apply(unit * std), unit * calibrator.apply(std))
    order = np.random.default_rng(0).permutation(500)
    shuffled = IsotonicCalibrator.fit(mean[order], std[order], target[order])
    np.testing.assert_allclose(shuffled.apply(std), calibrator.apply(std))


def test_isotonic_of_a_constant_sigma_is_a_scale():
    mean, _, target = synthetic(n=500)
    std = np.full(500, 0.3)
    isotonic = IsotonicCalibrator.fit(mean, std, target)
    scale = ScaleCalibrator.fit(mean, std, target)
    assert len(isotonic.std_in) == 1
    np.testing.assert_allclose(isotonic.apply([0.01, 5.0]), scale.apply([0.01, 5.0]))


def test_isotonic_never_reaches_zero():
    std = np.repeat([0.1, 1.0], 50)
    target = np.where(std < 0.5, 0.0, 1.0)  # certain ones are exactly right
    calibrator = IsotonicCalibrator.fit(np.zeros(100), std, target)
    assert calibrator.std_out == pytest.approx([np.sqrt(0.5)])
    assert np.all(calibrator.apply(std) > 0)
    with pytest.raises(InputError, match="all held-out errors are zero"):
        IsotonicCalibrator.fit(np.zeros(100), std, np.zeros(100))


def test_isotonic_needs_enough_data():
    with pytest.raises(InputError, match="ScaleCalibrator"):
        IsotonicCalibrator.fit(*synthetic(n=49))
    assert len(IsotonicCalibrator.fit(*synthetic(n=49), min_count=10).std_in) <= 4


# ------------------------------------------------------------------------------------- conformal
def test_conformal_quantile_is_the_right_order_statistic():
    scores = np.arange(1.0, 20.0)  # n = 19
    calibrator = ConformalCalibrator.fit(np.zeros(19), np.ones(19), scores[::-1])
    assert calibrator.quantile(0.5) == 10.0  # ceil(20 * 0.5)
    assert calibrator.quantile(0.51) == 11.0
    assert calibrator.quantile(0.9) == 18.0
    assert calibrator.quantile(0.95) == 19.0
    assert calibrator.quantile(1e-6) == 1.0
    with pytest.raises(InputError, match="at least 24 are needed"):
        calibrator.quantile(0.96)


@pytest.mark.statistical
@pytest.mark.parametrize(("n", "level"), [(19, 0.9), (49, 0.68), (40, 0.95)])
def test_conformal_marginal_coverage(n, level):
    rng = np.random.default_rng(n)
    draws = 8_000
    std = np.exp(rng.normal(size=(draws, n + 1)))
    error = 5.0 * std * rng.standard_t(2, size=(draws, n + 1))  # heavy tails, sigma far too small
    hits = 0
    for row_std, row_error in zip(std, error, strict=True):
        calibrator = ConformalCalibrator.fit(np.zeros(n), row_std[:n], row_error[:n])
        low, high = calibrator.interval([0.0], row_std[n:], level)
        hits += low[0] <= row_error[n] <= high[0]
    coverage, four_errors = hits / draws, 4 * np.sqrt(level * (1 - level) / draws)
    assert coverage >= level - four_errors
    assert coverage <= level + 1 / (n + 1) + four_errors


@pytest.mark.statistical
def test_conformal_covers_whole_structures():
    rng = np.random.default_rng(0)
    level, n, draws, hits = 0.8, 30, 2000, 0
    groups = np.repeat(np.arange(n + 1), 4)
    held_out = groups < n
    for _ in range(draws):
        common = rng.normal(size=(n + 1, 1, 1))  # atoms of a structure err together
        error = (common + 0.5 * rng.normal(size=(n + 1, 4, 3))).reshape(-1, 3)
        std = np.ones_like(error)
        calibrator = ConformalCalibrator.fit(
            0 * error[held_out], std[held_out], error[held_out], groups=groups[held_out]
        )
        low, high = calibrator.interval(0 * error[~held_out], std[~held_out], level)
        hits += np.all((low <= error[~held_out]) & (error[~held_out] <= high))
    assert calibrator.simultaneous
    assert len(calibrator.scores) == n
    four_errors = 4 * np.sqrt(level * (1 - level) / draws)
    assert level - four_errors <= hits / draws <= level + 1 / (n + 1) + four_errors


def test_conformal_sigma_covers_as_one_sigma():
    calibrator = ConformalCalibrator.fit(*synthetic(distort=lambda std: std / 4))
    mean, std, target = synthetic(seed=9, distort=lambda std: std / 4)
    sigma = calibrator.apply(std)
    inside = np.mean(np.abs(target - mean) <= sigma)
    # Both sets have 4000 points, so the variances of both add.
    four_errors = 4 * np.sqrt(2 * ONE_SIGMA * (1 - ONE_SIGMA) / 4000)
    assert inside == pytest.approx(ONE_SIGMA, abs=four_errors)
    np.testing.assert_allclose(calibrator.apply(std, 0.9), calibrator.quantile(0.9) * std)


def test_conformal_refuses_bad_input():
    data = synthetic(n=30)
    calibrator = ConformalCalibrator.fit(*data)
    for level in (0.0, 1.0, 95):
        with pytest.raises(InputError, match="level"):
            calibrator.quantile(level)
    with pytest.raises(InputError, match="one label per row"):
        ConformalCalibrator.fit(*data, groups=[0, 1])
    with pytest.raises(InputError, match="shapes differ"):
        calibrator.interval([0.0, 1.0], [1.0])
    exact = ConformalCalibrator.fit(data[0], data[1], data[0])
    with pytest.raises(InputError, match="quantile"):
        exact.apply(data[1])


# --------------------------------------------------------------------------------- common ground
@pytest.mark.parametrize("cls", CALIBRATORS)
def test_json_round_trip(cls):
    calibrator = cls.fit(*synthetic(n=300))
    saved = json.loads(json.dumps(calibrator.to_dict(), allow_nan=False))
    assert cls.from_dict(saved) == calibrator
    assert calibrator_from_dict(saved) == calibrator
    for other in CALIBRATORS:
        if other is not cls:
            with pytest.raises(InputError, match="kind"):
                other.from_dict(saved)
    with pytest.raises(InputError, match="damaged"):
        cls.from_dict({"kind": cls.kind})


def test_damaged_calibrators_are_refused():
    with pytest.raises(InputError, match="unknown kind"):
        calibrator_from_dict({"kind": "temperature"})
    with pytest.raises(InputError, match="scale factor"):
        ScaleCalibrator(factor=-1.0)
    with pytest.raises(InputError, match="ascend"):
        IsotonicCalibrator(std_in=(1.0, 0.5), std_out=(1.0, 2.0))
    with pytest.raises(InputError, match="ascending"):
        ConformalCalibrator(scores=(2.0, 1.0))


@pytest.mark.parametrize("cls", CALIBRATORS)
def test_shape_is_kept_and_components_are_pooled(cls):
    mean, std, target = (array.reshape(-1, 3) for array in synthetic(n=300))
    calibrator = cls.fit(mean, std, target)
    assert calibrator.apply(std).shape == (100, 3)
    assert calibrator == cls.fit(mean.ravel(), std.ravel(), target.ravel())


@pytest.mark.parametrize("cls", CALIBRATORS)
def test_bad_sigma_is_refused(cls):
    data = synthetic(n=300)
    calibrator = cls.fit(*data)
    for bad in ([0.0], [-1.0], [np.nan], []):
        with pytest.raises(InputError, match="std"):
            calibrator.apply(bad)
    with pytest.raises(InputError, match="shapes differ"):
        cls.fit(data[0], data[1][:-1], data[2])


@given(hnp.arrays(float, 20, elements=positive), positive)
def test_scale_and_conformal_are_equivariant_to_the_scale_of_sigma(std, scale):
    rng = np.random.default_rng(0)
    target = std * rng.normal(size=20)
    for cls in (ScaleCalibrator, ConformalCalibrator):
        before = cls.fit(np.zeros(20), std, target).apply(std)
        after = cls.fit(np.zeros(20), scale * std, target).apply(scale * std)
        np.testing.assert_allclose(after, before, rtol=1e-9)
