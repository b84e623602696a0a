"""The isotonic calibrator: its fit, its map, and what it mends."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression
from scipy.stats import norm

from blips.errors import InputError
from blips.uq import IsotonicCalibrator, ScaleCalibrator, metrics
from blips.uq.metrics import spearman


@given(st.integers(1, 12), st.integers(0, 2**31))
def test_knots_are_the_isotonic_regression_of_squared_errors(n_bins, seed):
    rng = np.random.default_rng(seed)
    std, error = np.sort(rng.uniform(1.0, 2.0, 2 * n_bins)), rng.integers(1, 4, 2 * n_bins)
    calibrator = IsotonicCalibrator.fit(np.zeros(2 * n_bins), std, error, min_count=2)
    fitted = isotonic_regression(np.mean(error.reshape(-1, 2) ** 2, axis=1)).x
    np.testing.assert_allclose(calibrator.std_out, np.sqrt(np.unique(fitted.round(12))))


@pytest.mark.parametrize("power", [0.5, 2.0])
def test_isotonic_mends_a_distorted_std(power, synthetic):
    def distort(std):
        return 0.7 * std**power

    calibrator = IsotonicCalibrator.fit(*synthetic(seed=1, distort=distort))
    mean, std, target = synthetic(seed=2, distort=distort)
    truth = synthetic(seed=2)[1]
    scaled = ScaleCalibrator.fit(*synthetic(seed=1, distort=distort)).apply(std)
    mended = calibrator.apply(std)
    nll = {
        name: -norm.logpdf(target, mean, one).mean()
        for name, one in (("raw", std), ("scale", scaled), ("iso", mended), ("truth", truth))
    }
    assert nll["iso"] < nll["scale"] - 0.1
    assert nll["iso"] < nll["raw"] - 0.1
    assert nll["iso"] < nll["truth"] + 0.03
    assert metrics.ence(mean, mended, target) < 0.1


def test_isotonic_is_strictly_increasing_and_proportional_outside(synthetic):
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
    rho = spearman(std, error)
    assert spearman(calibrator.apply(std), error) == pytest.approx(rho, abs=1e-12)


def test_isotonic_does_not_depend_on_units_or_order(synthetic):
    mean, std, target = synthetic(n=500)
    std = np.round(std, 2) + 0.01  # many equal values
    calibrator = IsotonicCalibrator.fit(mean, std, target)
    unit = 23.06
    other_unit = IsotonicCalibrator.fit(unit * mean, unit * std, unit * target)
    np.testing.assert_allclose(other_unit.apply(unit * std), unit * calibrator.apply(std))
    order = np.random.default_rng(0).permutation(500)
    shuffled = IsotonicCalibrator.fit(mean[order], std[order], target[order])
    np.testing.assert_allclose(shuffled.apply(std), calibrator.apply(std))


def test_isotonic_of_a_constant_std_is_a_scale(synthetic):
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


def test_isotonic_needs_enough_data(synthetic):
    with pytest.raises(InputError, match="ScaleCalibrator"):
        IsotonicCalibrator.fit(*synthetic(n=49))
    assert len(IsotonicCalibrator.fit(*synthetic(n=49), min_count=10).std_in) <= 4


def test_bins_whose_std_agrees_to_rounding_are_one():
    std = np.repeat([1.0, 1.0 + 2e-16 * 2], 50)
    error = np.repeat([1.0, 2.0], 50)
    found = IsotonicCalibrator.fit(error, std, np.zeros(100))
    assert found.std_out == pytest.approx([np.sqrt(2.5)])
