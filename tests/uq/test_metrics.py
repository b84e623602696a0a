"""Metrics against closed forms, other libraries, and the properties they must have."""

import numpy as np
import pytest
import scoringrules
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from blips.errors import InputError
from blips.uq import metrics

FINITE = st.floats(-1e3, 1e3, allow_subnormal=False)
POSITIVE = st.floats(1e-3, 1e3, allow_subnormal=False)


@st.composite
def predictions(draw, min_size=2, max_size=40):
    n = draw(st.integers(min_size, max_size))
    mean, target = (draw(hnp.arrays(float, n, elements=FINITE)) for _ in range(2))
    return mean, draw(hnp.arrays(float, n, elements=POSITIVE)), target


def calibrated(n, seed=0, width=0.7):
    rng = np.random.default_rng(seed)
    mean, std = rng.normal(size=n), np.exp(rng.normal(-1.0, width, n))
    return mean, std, mean + std * rng.normal(size=n)


# --------------------------------------------------------------------------------- proper scores
def test_nll_and_crps_match_scipy_and_scoringrules():
    mean, std, target = calibrated(50)
    z = (target - mean) / std
    log_density = stats.norm.logpdf(target, mean, std)
    np.testing.assert_allclose(metrics.gaussian_nll(z, std), -log_density)
    crps = scoringrules.crps_normal(target, mean, std)
    np.testing.assert_allclose(metrics.gaussian_crps(z, std), crps)


def test_crps_matches_its_integral():
    grid = np.linspace(-20, 20, 400_001)
    step = (stats.norm.cdf(grid, 0.3, 0.8) - (grid >= 1.1)) ** 2
    integral = np.sum(0.5 * (step[1:] + step[:-1]) * np.diff(grid))
    assert metrics.gaussian_crps(np.array(1.0), np.array(0.8)) == pytest.approx(integral, rel=1e-3)


@given(predictions(), st.integers(-4, 4).map(lambda power: 2.0**power))  # exact in floats
def test_a_change_of_unit_changes_no_calibration_metric(data, unit):
    scaled = [unit * array for array in data]
    assert metrics.ece(*scaled) == metrics.ece(*data)
    assert metrics.ence(*scaled, n_bins=2) == pytest.approx(metrics.ence(*data, n_bins=2))


@given(predictions(), st.randoms(use_true_random=False))
def test_order_of_the_data_does_not_matter(data, random):
    order = list(range(len(data[0])))
    random.shuffle(order)
    shuffled = [array[order] for array in data]
    assert metrics.ece(*shuffled) == pytest.approx(metrics.ece(*data), rel=1e-9, abs=1e-12)
    assert metrics.coverage(*shuffled) == pytest.approx(metrics.coverage(*data))
    assert metrics.ence(*shuffled, n_bins=2) == pytest.approx(metrics.ence(*data, n_bins=2))


# ----------------------------------------------------------------------------------- calibration
def test_calibrated_predictions_are_found_calibrated():
    n = 20_000
    mean, std, target = calibrated(n)
    assert metrics.ece(mean, std, target) < 0.02
    for level in metrics.COVERAGE_LEVELS:
        binomial = np.sqrt(level * (1 - level) / n)
        assert metrics.coverage(mean, std, target, level) == pytest.approx(level, abs=4 * binomial)


def test_ece_closed_forms():
    n = 1000
    zero, one = np.zeros(n), np.ones(n)
    huge_std = metrics.ece(zero, 1e9 * one, one)  # all z just above 0: p_obs = [p > 1/2]
    assert huge_std == pytest.approx(0.25, abs=0.006)
    one_sided = metrics.ece(zero, 1e-9 * one, one)  # p_obs = 0 up to p = 1
    assert one_sided == pytest.approx(0.5, abs=0.006)
    two_sided = metrics.ece(zero, 1e-9 * one, np.where(np.arange(n) % 2, 1.0, -1.0))
    assert two_sided == pytest.approx(0.25, abs=0.006)


def test_ece_of_a_wrong_scale_matches_its_integral():
    scale = 0.4  # predicted std is 0.4 of the true one: p_obs = Phi(0.4 * Phi^-1(p))
    p = np.linspace(0, 1, 20_001)[1:-1]
    expected = np.mean(np.abs(p - stats.norm.cdf(scale * stats.norm.ppf(p))))
    quantiles = stats.norm.ppf((np.arange(5000) + 0.5) / 5000)
    found = metrics.ece(np.zeros(5000), scale * np.ones(5000), quantiles)
    assert found == pytest.approx(expected, abs=0.002)


@given(predictions(min_size=1))
def test_ece_is_between_zero_and_one_half(data):
    p, p_obs = metrics.reliability_curve(*data)
    assert 0.0 <= metrics.ece(*data) <= 0.5
    assert (p_obs[0], p_obs[-1]) == (0.0, 1.0)
    assert np.all(np.diff(p_obs) >= 0.0)
    z = (data[2] - data[0]) / data[1]
    counted = [np.mean(z <= stats.norm.ppf(level)) for level in p]
    np.testing.assert_allclose(p_obs, counted, atol=1e-12)


def test_ece_survives_extreme_errors():
    mean, std = np.zeros(4), np.full(4, 1e-3)
    assert np.isfinite(metrics.ece(mean, std, np.array([-1e3, 1e3, -1e3, 1e3])))


def test_coverage_counts_and_rejects_impossible_levels():
    z = np.array([0.0, 0.9, -1.1, 1.7, -3.0])
    zero, one = np.zeros(5), np.ones(5)
    found = [metrics.coverage(zero, one, z, level) for level in (0.68, 0.90, 0.95)]
    np.testing.assert_allclose(found, [0.4, 0.6, 0.8])
    with pytest.raises(InputError, match="level is nan"):
        metrics.coverage(zero, one, z, np.nan)


def test_ence_by_hand():
    std, error = np.array([1.0, 1.0, 2.0, 2.0]), np.array([1.0, -1.0, 4.0, 4.0])
    rms_std, rmse = metrics.binned_errors(np.zeros(4), std, error, n_bins=2)
    np.testing.assert_allclose(rms_std, [1.0, 2.0])
    np.testing.assert_allclose(rmse, [1.0, 4.0])
    assert metrics.ence(np.zeros(4), std, error, n_bins=2) == pytest.approx(0.5)
    for impossible in (0, 5):
        with pytest.raises(InputError, match="n_bins"):
            metrics.ence(np.zeros(4), std, error, n_bins=impossible)
    (whole_std,), (whole,) = metrics.binned_errors(np.zeros(4), std, error, n_bins=1)
    assert (whole_std, whole) == pytest.approx((np.sqrt(2.5), np.sqrt(34 / 4)))


def test_bins_of_unequal_numbers_differ_by_one_and_keep_every_item():
    std = np.arange(1.0, 12.0)
    bins = [std[:3], std[3:7], std[7:]]
    rms_std, rmse = metrics.binned_errors(np.zeros(11), std, 2 * std, n_bins=3)
    np.testing.assert_allclose(rms_std, [np.sqrt(np.mean(own**2)) for own in bins])
    np.testing.assert_allclose(rmse, 2 * rms_std)


def test_a_target_on_the_edge_of_its_interval_is_covered():
    edge = stats.norm.ppf(0.95)
    assert metrics.coverage([0.0, 0.0], [1.0, 1.0], [edge, -edge], 0.9) == 1.0


def test_ence_shares_errors_between_equal_stds():
    error = np.array([3.0, 0.0, 0.0, 1.0])
    rmse = metrics.binned_errors(np.zeros(4), np.ones(4), error, n_bins=2)[1]
    np.testing.assert_allclose(rmse, np.sqrt([2.5, 2.5]))


@pytest.mark.statistical
def test_ence_floor_of_a_calibrated_model():
    n, n_bins = 2000, 10
    values = [metrics.ence(*calibrated(n, seed), n_bins=n_bins) for seed in range(100)]
    standard_error = np.std(values) / np.sqrt(len(values))
    assert np.mean(values) == pytest.approx(np.sqrt(n_bins / (np.pi * n)), abs=5 * standard_error)


# ------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize("metric", [metrics.ece, metrics.coverage, metrics.ence])
@pytest.mark.parametrize(
    ("std", "message"),
    [
        ([1.0, 0.0], "zero or negative"),
        ([1.0, -1.0], "zero or negative"),
        ([1.0, np.nan], "NaN or infinite"),
        ([1.0, np.inf], "NaN or infinite"),
        ([1.0], "shapes differ"),
        ([], "empty"),
        (["a", "b"], "real numbers"),
    ],
)
def test_bad_std_is_refused(metric, std, message):
    with pytest.raises(InputError, match=message):
        metric([0.0, 0.0], std, [1.0, 1.0])


def test_bad_values_are_refused():
    with pytest.raises(InputError, match="shapes differ"):
        metrics.ece(np.zeros(3), np.ones(3), np.zeros((3, 1)))  # would broadcast to 3 x 3
    with pytest.raises(InputError, match="empty"):
        metrics.ece([], [], [])
    with pytest.raises(InputError, match=r"\.detach"):
        metrics.ece(torch.zeros(2, requires_grad=True), [1.0, 1.0], [0.0, 0.0])


def test_bins_are_ten_and_levels_are_those_of_the_paper_by_default():
    data = calibrated(500)
    assert metrics.ence(*data) == metrics.ence(*data, n_bins=10) != metrics.ence(*data, n_bins=11)
    assert [len(side) for side in metrics.binned_errors(*data)] == [10, 10]
    assert metrics.COVERAGE_LEVELS == (0.68, 0.90, 0.95)
    assert metrics.coverage(*data) == metrics.coverage(*data, 0.9)
    np.testing.assert_allclose(metrics.ECE_LEVELS, np.arange(101) / 100)


@pytest.mark.parametrize("level", [0.0, 1.0, 1.5, -0.1])
def test_levels_are_probabilities(level):
    with pytest.raises(InputError, match="above 0 and below 1"):
        metrics.coverage([0.0], [1.0], [0.0], level)
