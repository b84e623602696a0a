"""Ratio, scale and floor, fitted on errors whose distribution is known."""

import numpy as np
import pytest
from scipy.stats import norm

from blips.errors import InputError
from blips.inference import scale as limits
from blips.inference.posterior import Scale
from blips.inference.scale import (
    LEAST_FLOOR,
    RELATIVE_RATIOS,
    choose_ratio,
    fit_factor,
    fit_floor,
    fit_scale_and_floor,
    fit_scale_and_misfit,
)

RATIOS = 10.0 ** np.arange(-4.0, 4.5, 0.5)


def simulated(scale: float, floor: float, count: int = 4000, seed: int = 0):
    """Variances for a scale of 1 over four decades, and errors."""
    rng = np.random.default_rng(seed)
    var = 10.0 ** rng.uniform(-3, 1, count)
    return var, rng.normal(scale=np.sqrt(scale**2 * var + floor**2))


def mean_nll(var: np.ndarray, error: np.ndarray) -> float:
    return float(np.mean(0.5 * (np.log(2 * np.pi * var) + error**2 / var)))


# ---- scale and floor ----


@pytest.mark.statistical
@pytest.mark.parametrize(("scale", "floor"), [(2.0, 0.5), (0.01, 0.01), (300.0, 100.0)])
def test_known_scale_and_floor_are_recovered(scale, floor):
    """4000 errors: within 10 %, and the floor within a step of its grid (15 %)."""
    fit = fit_scale_and_floor(*simulated(scale, floor))
    assert fit.scale == pytest.approx(scale, rel=0.1)
    assert fit.floor == pytest.approx(floor, rel=0.15)


@pytest.mark.statistical
def test_where_there_is_no_floor_it_is_the_least():
    var, error = simulated(2.0, 0.0)
    fit = fit_scale_and_floor(var, error)
    assert fit.scale == pytest.approx(2.0, rel=0.05)
    assert fit.floor <= max(1.001 * LEAST_FLOOR * np.sqrt(np.mean(error**2)), 0.05)


@pytest.mark.statistical
def test_where_variances_say_nothing_the_floor_is_all():
    var, error = simulated(1e-6, 0.7)
    fit = fit_scale_and_floor(var, error)
    assert np.sqrt(fit.scale**2 * np.median(var) + fit.floor**2) == pytest.approx(0.7, rel=0.05)


def test_the_likelihood_is_that_of_the_errors_and_the_largest():
    var, error = simulated(2.0, 0.5, count=200)
    fit = fit_scale_and_floor(var, error)
    assert fit.nll == pytest.approx(mean_nll(fit.scale**2 * var + fit.floor**2, error))
    for scale in (0.5, 0.8, 1.25, 2.0):
        for floor in (0.0, 0.3, 3.0):
            total = (scale * fit.scale) ** 2 * var + (floor * fit.floor) ** 2
            assert mean_nll(total, error) > fit.nll


def test_units_of_errors_and_variances_are_free():
    var, error = simulated(2.0, 0.5, count=200)
    plain, errors, variances = (
        fit_scale_and_floor(a * var, b * error) for a, b in ((1, 1), (1, 10), (100, 1))
    )
    assert (errors.scale, errors.floor) == pytest.approx((10 * plain.scale, 10 * plain.floor))
    assert (variances.scale, variances.floor) == pytest.approx((plain.scale / 10, plain.floor))


@pytest.mark.statistical
def test_a_misfit_in_proportion_to_the_force_is_recovered():
    """4000 errors: within a step of the grid (15 %)."""
    rng = np.random.default_rng(3)
    var, force = 10.0 ** rng.uniform(-3, 1, 4000), rng.normal(scale=5.0, size=4000)
    error = rng.normal(scale=np.sqrt(4.0 * var + 0.3**2 + (0.2 * force) ** 2))
    fit = fit_scale_and_misfit(var, error, force, structures=100)
    assert fit.scale == pytest.approx(2.0, rel=0.15)
    assert fit.relative == pytest.approx(0.2, rel=0.15)
    total = fit.scale**2 * var + fit.floor**2 + (fit.relative * force) ** 2
    assert fit.nll == pytest.approx(mean_nll(total, error), rel=1e-3)


@pytest.mark.statistical
@pytest.mark.parametrize("seed", range(5))
def test_errors_that_do_not_grow_with_the_force_have_no_relative_misfit(seed):
    var, error = simulated(2.0, 0.5, count=300, seed=seed)
    force = np.random.default_rng(seed + 50).normal(size=300)
    assert fit_scale_and_misfit(var, error, force, structures=14) == fit_scale_and_floor(var, error)


def test_a_few_structures_are_no_reason_for_a_relative_misfit():
    rng = np.random.default_rng(3)
    var, force = 10.0 ** rng.uniform(-3, 1, 300), rng.normal(scale=1.0, size=300)
    error = rng.normal(scale=np.sqrt(4.0 * var + 0.3**2 + (0.3 * force) ** 2))
    many, few = (fit_scale_and_misfit(var, error, force, structures=n) for n in (1000, 1))
    assert many.relative > 0
    assert few.relative == 0


def test_errors_without_variance_are_not_certain():
    """Rounding leaves a variance of zero where the data pin a force down."""
    var, error = simulated(2.0, 0.5, count=200)
    var[:20] = 0.0
    fit = fit_scale_and_floor(var, error)
    assert np.isfinite(fit).all()
    assert fit.floor > 0.1


def test_the_floor_is_never_nothing():
    var = np.full(50, 0.3)
    fit = fit_scale_and_floor(var, np.random.default_rng(0).normal(size=50))
    assert fit.floor > 0


@pytest.mark.parametrize("errors", [np.zeros(5), np.zeros(0)], ids=["zero", "none"])
def test_errors_that_say_nothing_are_refused(errors):
    with pytest.raises(InputError, match="validation"):
        fit_scale_and_floor(np.ones(len(errors)), errors)


# ---- ratio ----


def test_a_flat_likelihood_gives_the_middle_of_the_ratios():
    assert choose_ratio(RATIOS, np.full(len(RATIOS), 3.2), 10) == pytest.approx(1.0)


def test_a_sharp_likelihood_gives_its_minimum():
    nll = (np.log10(RATIOS) - 2.0) ** 2
    assert choose_ratio(RATIOS, nll, 1000) == pytest.approx(100.0, rel=0.01)


def test_a_flat_part_gives_its_middle():
    nll = np.where((RATIOS > 0.9) & (RATIOS < 1.1e3), 0.0, 1.0)
    assert choose_ratio(RATIOS, nll, 1000) == pytest.approx(10**1.5, rel=0.01)


def test_few_structures_decide_less_than_many():
    nll = 0.05 * (np.log10(RATIOS) - 3.0) ** 2
    few, many = (choose_ratio(RATIOS, nll, count) for count in (1, 1000))
    assert 1.0 < few < 100.0 < many < 1001.0


def test_only_differences_of_likelihoods_count():
    nll = 0.01 * (np.log10(RATIOS) - 3.0) ** 2
    expected = choose_ratio(RATIOS, nll, 10)
    for shift in (-1e4, 1e4):
        assert choose_ratio(RATIOS, nll + shift, 10) == pytest.approx(expected)


def test_ratios_that_explain_nothing_do_not_count():
    nll = np.where(RATIOS < 1.0, np.inf, 0.0)
    assert choose_ratio(RATIOS, nll, 10) == pytest.approx(100.0)


def test_the_grid_ends_where_data_are_known_to_a_hundredth():
    assert RELATIVE_RATIOS[0] == pytest.approx(1e-10)
    assert RELATIVE_RATIOS[-1] == pytest.approx(1e-4)


# ---- energies ----


@pytest.mark.statistical
def test_the_factor_is_recovered():
    """Within 5 standard errors of 1000 errors."""
    rng = np.random.default_rng(0)
    var = 10.0 ** rng.uniform(-3, 1, 1000)
    error = 2.5 * np.sqrt(var) * rng.normal(size=1000)
    assert fit_factor(var, error) == pytest.approx(2.5, rel=5 / np.sqrt(2000))


@pytest.mark.parametrize(
    ("size", "factor"), [(1e-6, 0.01), (0.5, 0.75), (0.9, 1.0), (1.2, 1.2), (100.0, 4.0)]
)
def test_the_factor_stays_within_its_bounds(size, factor):
    assert fit_factor(np.ones(20), np.full(20, size)) == pytest.approx(factor)


def test_energies_without_variance_do_not_decide_the_factor():
    var, error = np.array([0.0, 1.0, 1.0]), np.array([1e9, 2.0, 2.0])
    assert fit_factor(var, error) == pytest.approx(2.0)
    assert fit_factor(np.zeros(3), error) == 1.0


@pytest.mark.statistical
@pytest.mark.parametrize("floor", [0.05, 2.0])
def test_the_floor_of_energies_is_recovered_for_each_atom(floor):
    """2000 errors: within a step of the grid (12 %)."""
    rng = np.random.default_rng(0)
    size = rng.integers(2, 50, 2000).astype(float)
    var = 10.0 ** rng.uniform(-3, 1, 2000)
    error = rng.normal(scale=np.sqrt(var + (floor * size) ** 2))
    assert fit_floor(var, error, size) == pytest.approx(floor, rel=0.12)


def test_the_floor_of_energies_is_never_nothing():
    var, error, size = np.full(9, 100.0), np.full(9, 0.1), np.ones(9)
    assert fit_floor(var, error, size) == pytest.approx(0.002)


def test_energies_without_errors_are_refused():
    with pytest.raises(InputError, match="all validation errors are zero"):
        fit_floor(np.ones(3), np.zeros(3), np.ones(3))


# ---- what they make ----


@pytest.mark.parametrize(
    "changes",
    [
        {"ratio": 0.0},
        {"scale": float("nan")},
        {"scale": -1.0},
        {"floor": {"forces": 0.0}},
        {"floor": {"charge": 1.0}},
        {"energy_factor": float("inf")},
    ],
    ids=str,
)
def test_numbers_that_make_no_error_bar_are_refused(changes):
    with pytest.raises(InputError, match="no scale of a posterior"):
        Scale(**{"ratio": 1.0, "scale": 1.0, "floor": {"forces": 0.1}, **changes})


def test_the_floor_of_energies_is_found_to_a_step_of_the_grid():
    """Errors of one size a and variances a^2 (1 - x^2) leave the floor a x."""
    for steps in range(1, 12):
        share = 10.0 ** (-0.05 * steps)
        error, size = np.full(50, 3.0), np.full(50, 2.0)
        found = fit_floor((1.0 - share**2) * error**2, error, size)
        assert found == pytest.approx(1.5 * share, rel=1e-6)


def test_the_relative_misfit_is_found_to_a_step_of_the_grid():
    """Normal quantiles instead of noise, at a value that only the finer of two grids has."""
    z = norm.ppf((np.arange(400) + 0.5) / 400)
    force, var, z = (x.ravel() for x in np.meshgrid([1.0, 3.0, 9.0, 27.0, 81.0], [0.1, 1, 10], z))
    kappa = 10.0**0.25 / 81.0  # times the median of the variances over that of F^2
    error = z * np.sqrt(var + kappa * force**2)
    fit = fit_scale_and_misfit(var, error, force, structures=100)
    assert fit.relative / fit.scale == pytest.approx(kappa**0.5, rel=1e-3)


def test_energies_have_the_factor_one_unless_labels_say_otherwise():
    assert Scale(1.0, 1.0, {"forces": 1.0, "energy": 1.0}).energy_factor == 1.0


SPREAD = np.array([0.01, 0.1, 1.0, 10.0, 100.0])  # variances with a median of 1


@pytest.mark.parametrize("exponent", [-1.0, -0.125, 0.0, 0.375, 2.0, 3.875, 4.0])
def test_the_floor_is_found_to_a_step_of_its_grid(exponent):
    """Errors of exactly the size that is expected make a likelihood with its maximum there."""
    floor_square = 10.0**exponent
    fit = fit_scale_and_floor(SPREAD, 3.0 * np.sqrt(SPREAD + floor_square))
    assert fit.scale == pytest.approx(3.0, rel=1e-6)
    assert fit.floor == pytest.approx(3.0 * np.sqrt(floor_square), rel=1e-6)


def test_the_floor_ends_at_a_hundred_times_the_scale_and_begins_at_a_fiftieth_of_the_error():
    fit = fit_scale_and_floor(SPREAD, np.full(5, 1e6))
    assert fit.floor / fit.scale == pytest.approx(100.0, rel=1e-6)
    error = 3.0 * np.sqrt(SPREAD)
    least = fit_scale_and_floor(SPREAD, error)
    assert least.scale == pytest.approx(3.0, rel=1e-6)
    assert least.floor == pytest.approx(0.02 * np.sqrt(np.mean(error**2)), rel=1e-6)


@pytest.mark.parametrize("exponent", [-1.0, 0.25, 1.0, 3.0])
def test_the_relative_misfit_is_found_on_the_whole_of_its_grid(exponent):
    var, force = (x.ravel() for x in np.meshgrid(SPREAD, [300.0, 1000.0, 9000.0]))
    kappa = 10.0**exponent / 1000.0**2  # of a median variance of 1
    error = np.sqrt(var + kappa * force**2)
    fit = fit_scale_and_misfit(var, error, force, structures=10**9)
    assert fit.scale == pytest.approx(1.0, rel=1e-6)
    assert fit.relative == pytest.approx(np.sqrt(kappa), rel=1e-6)
    beyond = fit_scale_and_misfit(var, np.sqrt(var + 0.1 * force**2), force, structures=10**9)
    assert beyond.relative / beyond.scale == pytest.approx(np.sqrt(1e-3), rel=1e-6)


def test_a_relative_misfit_is_at_most_a_half_and_worth_a_factor_e():
    var, force = (x.ravel() for x in np.meshgrid(SPREAD, [1.0, 10.0, 100.0]))
    error = np.sqrt(var + (0.8 * force) ** 2)
    assert 0.3 < fit_scale_and_misfit(var, error, force, structures=10**9).relative <= 0.5
    error = np.sqrt(var + (0.03 * force) ** 2)
    gained = fit_scale_and_floor(var, error).nll
    gained -= fit_scale_and_misfit(var, error, force, structures=10**9).nll
    for share, found in ((0.8, False), (1.2, True)):
        fit = fit_scale_and_misfit(var, error, force, structures=share / gained)
        assert (fit.relative > 0) == found


def test_limits_of_what_labels_may_decide():
    assert limits.VALID_ROWS == 24
    assert (limits.LARGEST_FACTOR, limits.LEAST_FACTOR, limits.SAFETY) == (4.0, 0.01, 1.5)
    assert (limits.LEAST_FLOOR, limits.LARGEST_RELATIVE) == (0.02, 0.5)
    np.testing.assert_allclose(RELATIVE_RATIOS, 10.0 ** np.linspace(-10, -4, 13))


@pytest.mark.parametrize("name", ["relative", "typical"])
@pytest.mark.parametrize("value", [-0.1, float("inf"), float("nan")])
def test_misfits_are_nothing_or_a_positive_number(name, value):
    with pytest.raises(InputError, match=name):
        Scale(1.0, 1.0, {"forces": 0.1}, **{name: value})
    plain = Scale(1.0, 1.0, {"forces": 0.1})
    assert (plain.relative, plain.typical, plain.energy_factor) == (0.0, 0.0, 1.0)
