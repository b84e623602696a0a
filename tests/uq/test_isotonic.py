"""The isotonic calibrator: its fit, its map, and what it mends."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.optimize import isotonic_regression

from blips.errors import InputError
from blips.uq import IsotonicCalibrator, ScaleCalibrator, metrics, spearman
from blips.uq.calibration.isotonic import isotonic_blocks


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
def test_isotonic_mends_a_distorted_sigma(power, synthetic):
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
    std = np.round(std, 2) + 0.01  # many equal sigmas
    calibrator = IsotonicCalibrator.fit(mean, std, target)
    unit = 23.06
    other_unit = IsotonicCalibrator.fit(unit * mean, unit * std, unit * target)
    np.testing.assert_allclose(other_unit.apply(unit * std), unit * calibrator.apply(std))
    order = np.random.default_rng(0).permutation(500)
    shuffled = IsotonicCalibrator.fit(mean[order], std[order], target[order])
    np.testing.assert_allclose(shuffled.apply(std), calibrator.apply(std))


def test_isotonic_of_a_constant_sigma_is_a_scale(synthetic):
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
