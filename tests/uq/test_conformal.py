"""The conformal calibrator: its quantiles and its promise of coverage."""

import numpy as np
import pytest

from blips.errors import InputError
from blips.uq.calibrate import ONE_STD, ConformalCalibrator


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
    error = 5.0 * std * rng.standard_t(2, size=(draws, n + 1))  # heavy tails, std far too small
    hits = 0
    for row_std, row_error in zip(std, error, strict=True):
        calibrator = ConformalCalibrator.fit(np.zeros(n), row_std[:n], row_error[:n])
        hits += abs(row_error[n]) <= calibrator.quantile(level) * row_std[n]
    coverage, four_errors = hits / draws, 4 * np.sqrt(level * (1 - level) / draws)
    assert coverage >= level - four_errors
    assert coverage <= level + 1 / (n + 1) + four_errors


def test_conformal_std_covers_as_one_std(synthetic):
    calibrator = ConformalCalibrator.fit(*synthetic(distort=lambda std: std / 4))
    mean, std, target = synthetic(seed=9, distort=lambda std: std / 4)
    applied = calibrator.apply(std)
    inside = np.mean(np.abs(target - mean) <= applied)
    # Both sets have 4000 points, so the variances of both add.
    four_errors = 4 * np.sqrt(2 * ONE_STD * (1 - ONE_STD) / 4000)
    assert inside == pytest.approx(ONE_STD, abs=four_errors)
    np.testing.assert_allclose(applied, calibrator.quantile(ONE_STD) * std)


def test_conformal_refuses_bad_input(synthetic):
    data = synthetic(n=30)
    calibrator = ConformalCalibrator.fit(*data)
    for level in (0.0, 1.0, 95):
        with pytest.raises(InputError, match="level"):
            calibrator.quantile(level)
    with pytest.raises(InputError, match="errors are neither all zero"):
        ConformalCalibrator.fit(data[0], data[1], data[0])


def test_intervals_are_of_ninety_percent_unless_asked_otherwise():
    calibrator = ConformalCalibrator.fit(np.zeros(99), np.ones(99), np.arange(1.0, 100.0))
    assert calibrator.quantile() == 90.0
    np.testing.assert_allclose(calibrator.apply([2.0]), [2 * 69.0])  # ceil(100 * 0.6827)
