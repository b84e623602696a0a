"""Ranking metrics against counting, other libraries, and the properties they must have."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats
from torchmetrics.functional.classification import binary_auroc
from torchmetrics.functional.regression import spearman_corrcoef

from blips.errors import InputError
from blips.uq import metrics


@st.composite
def rankings(draw, min_size=2, max_size=40):
    n = draw(st.integers(min_size, max_size))
    values = st.integers(0, 8).map(float)  # many ties
    return tuple(draw(hnp.arrays(float, n, elements=values)) for _ in range(2))


def test_spearman_matches_torchmetrics_and_ignores_the_square():
    rng = np.random.default_rng(3)
    std, error = rng.uniform(size=(2, 40))
    expected = spearman_corrcoef(torch.tensor(std), torch.tensor(error)).item()
    assert metrics.spearman(std, error) == pytest.approx(expected, abs=1e-6)
    assert metrics.spearman(std**2, error**2) == pytest.approx(expected, abs=1e-6)


def test_spearman_of_two_items_and_of_constants():
    assert metrics.spearman([1.0, 2.0], [3.0, 4.0]) == pytest.approx(1.0)
    assert metrics.spearman([1.0, 2.0], [4.0, 3.0]) == pytest.approx(-1.0)
    assert metrics.spearman([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) == 0.0
    assert metrics.spearman([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]) == 0.0


def scipy_spearman(a, b):
    return 0.0 if np.ptp(a) == 0.0 or np.ptp(b) == 0.0 else stats.spearmanr(a, b)[0]


@given(rankings())
def test_spearman_matches_scipy_with_ties(data):
    assert metrics.spearman(*data) == pytest.approx(scipy_spearman(*data), abs=1e-12)


@given(rankings(), st.integers(0, 2**31))
def test_ranks_of_the_whole_serve_every_resample(data, seed):
    rows = np.random.default_rng(seed).integers(len(data[0]), size=len(data[0]))
    ranks = [metrics.dense_ranks(array)[rows] for array in data]
    expected = scipy_spearman(*(array[rows] for array in data))
    assert metrics.rank_correlation(*ranks) == pytest.approx(expected, abs=1e-12)


def partial(x, y, z):
    """The rank correlation of x and y given z."""
    pairs = ((x, y), (x, z), (y, z))
    return metrics.partial_correlation(*(metrics.spearman(*pair) for pair in pairs))


def test_partial_correlation_is_that_of_residuals():
    """The partial rank correlation is Pearson's of what linear fits on the ranks of z leave."""
    rng = np.random.default_rng(7)
    z = rng.uniform(size=200)
    x, y = z + 0.5 * rng.uniform(size=200), z + rng.uniform(size=200)
    ranks = [stats.rankdata(values) for values in (x, y, z)]
    left = [rank - np.polyval(np.polyfit(ranks[2], rank, 1), ranks[2]) for rank in ranks[:2]]
    expected = np.corrcoef(*left)[0, 1]
    assert partial(x, y, z) == pytest.approx(expected, abs=1e-12)


def test_what_a_std_adds_to_the_size_of_the_force():
    rng = np.random.default_rng(1)
    force, own = rng.uniform(1.0, 2.0, size=(2, 20_000))
    error = force * own
    assert partial(force**2, error, force) == 0.0  # the std is the force: nothing
    # The std knows the other factor alone: it explains what the force leaves.
    assert partial(own, error, force) > 0.9
    # A std that is noise beside the force adds nothing: four standard errors.
    noise = rng.uniform(size=20_000)
    assert abs(partial(force + noise, error, force)) < 4 / np.sqrt(20_000)
    # Closed form: rho(x, y) = 1/2 and x, y independent of z leaves 1/2.
    assert metrics.partial_correlation(0.5, 0.0, 0.0) == 0.5
    assert metrics.partial_correlation(0.5, 0.5, 0.5) == pytest.approx(1 / 3)


def test_spearman_without_ties_matches_scipy_and_stays_within_one():
    rng = np.random.default_rng(5)
    variance, squared_error = rng.lognormal(size=(2, 3001))
    expected = stats.spearmanr(variance, squared_error)[0]
    assert metrics.spearman(variance, squared_error) == pytest.approx(expected, abs=1e-12)
    assert metrics.spearman(variance, variance**2) == 1.0
    assert metrics.spearman(variance, 1.0 / variance) == -1.0


@given(rankings(), st.integers(0, 8))
def test_auroc_matches_counting_of_pairs(data, threshold):
    score, error = data
    above, below = score[error > threshold], score[error <= threshold]
    expected = 0.5
    if len(above) and len(below):
        pairs = above[:, None] - below
        expected = np.mean((pairs > 0) + 0.5 * (pairs == 0))
    assert metrics.auroc(score, error, threshold) == pytest.approx(expected)


def test_auroc_matches_torchmetrics():
    rng = np.random.default_rng(4)
    score, error = rng.uniform(size=(2, 60))
    event = torch.tensor((error > 0.8).astype(int))
    expected = binary_auroc(torch.tensor(score), event).item()
    assert metrics.auroc(score, error, 0.8) == pytest.approx(expected, abs=1e-6)


def test_rejection_curve_by_hand():
    curve = metrics.rejection_curve([1.0, 3.0, 2.0], [1.0, 2.0, 6.0])
    np.testing.assert_allclose(curve.fraction, [0, 1 / 3, 2 / 3])
    np.testing.assert_allclose(curve.error, [3.0, 3.5, 1.0])
    np.testing.assert_allclose(curve.oracle, [3.0, 1.5, 1.0])
    assert curve.random == pytest.approx(3.0)
    assert curve.auc == pytest.approx(2.5)
    assert curve.auc_normalised == pytest.approx((2.5 - 5.5 / 3) / (3.0 - 5.5 / 3))
    small = metrics.rejection_curve([1.0, 3.0, 2.0], [1e-3, 2e-3, 6e-3])  # another unit
    assert small.auc_normalised == pytest.approx(curve.auc_normalised)


@given(rankings())
def test_rejection_bounds(data):
    score, error = data
    curve = metrics.rejection_curve(score, error)
    assert np.all(curve.oracle <= curve.error + 1e-9)
    constant = metrics.rejection_curve(np.ones_like(score), error)
    np.testing.assert_allclose(constant.error, error.mean())
    assert constant.auc_normalised == pytest.approx(1.0)
    perfect = metrics.rejection_curve(error, error).auc_normalised
    assert perfect == pytest.approx(0.0 if np.ptp(error) > 0 else 1.0, abs=1e-9)
    worst = metrics.rejection_curve(error.max() - error, error).auc_normalised
    assert worst >= 1.0 - 1e-9


@given(rankings(min_size=3), st.floats(0.1, 10.0), st.randoms(use_true_random=False))
def test_ranking_ignores_scale_and_order(data, scale, random):
    order = list(range(len(data[0])))
    random.shuffle(order)
    other = scale * data[0][order], data[1][order]
    assert metrics.spearman(*other) == pytest.approx(metrics.spearman(*data), abs=1e-9)
    assert metrics.auroc(*other, 4.0) == pytest.approx(metrics.auroc(*data, 4.0))
    same = metrics.rejection_curve(*data).auc_normalised
    assert metrics.rejection_curve(*other).auc_normalised == pytest.approx(same, abs=1e-9)


@pytest.mark.parametrize(
    "metric", [metrics.spearman, metrics.rejection_curve, lambda a, b: metrics.auroc(a, b, 0.5)]
)
def test_bad_rankings_are_refused(metric):
    with pytest.raises(InputError, match="one value per item"):
        metric(np.ones((2, 3)), np.ones((2, 3)))
    with pytest.raises(InputError, match="negative"):
        metric([1.0, 2.0], [1.0, -1.0])
    with pytest.raises(InputError, match="shapes differ"):
        metric([1.0, 2.0], [1.0])
    with pytest.raises(InputError, match="empty"):
        metric([], [])


def test_one_item_has_no_rank_correlation():
    with pytest.raises(InputError, match="items is 1; expected 2 or more"):
        metrics.spearman([1.0], [1.0])


def test_partial_correlations_that_no_data_have_are_cut():
    assert metrics.partial_correlation(0.9, 0.9, -0.9) == 1.0
    assert metrics.partial_correlation(-0.9, 0.9, 0.9) == -1.0
    assert metrics.partial_correlation(0.5, 1.0, 0.3) == 0.0


def test_errors_at_the_threshold_are_small_and_units_are_free():
    std, error = np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.1, 0.2, 0.2, 0.4])
    assert metrics.auroc(std, error, 0.2) == 1.0
    assert metrics.auroc(std, error, 0.4) == 0.5
    one, other = (metrics.rejection_curve(std, unit * error) for unit in (1.0, 1e-6))
    assert other.auc_normalised == pytest.approx(one.auc_normalised)
    assert one.auc_normalised < 0.2
