"""Bootstrap intervals: exactness of the fast path, grouping, seeds and coverage."""

import numpy as np
import pytest

from blips.errors import InputError
from blips.uq import bootstrap, metrics
from blips.uq.bootstrap import bootstrap_interval, bootstrap_intervals, bootstrap_means


def grouped(n_groups=12, seed=0):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 6, n_groups)
    groups = np.repeat(np.arange(n_groups), sizes)
    return rng.normal(size=len(groups)), groups, sizes


def test_counts_are_draws_with_replacement(monkeypatch):
    monkeypatch.setattr(bootstrap, "_CHUNK_ELEMENTS", 35)
    counts = np.concatenate(list(bootstrap.resample_counts(7, 400, seed=0)))
    assert counts.shape == (400, 7)
    assert np.all(counts.sum(axis=1) == 7)
    variance = 1 - 1 / 7  # of one group's count
    assert np.all(np.abs(counts.mean(axis=0) - 1) < 4 * np.sqrt(variance / 400))


def test_means_equal_the_general_bootstrap():
    values, groups, sizes = grouped()
    sums = np.stack([np.bincount(groups, values), np.bincount(groups, values**2)], axis=1)
    fast = bootstrap_means(sums, sizes, n_bootstrap=50, seed=3)
    slow = bootstrap_intervals(
        lambda x: np.array([x.mean(), (x**2).mean()]), values, groups=groups, n_bootstrap=50, seed=3
    )
    for one, other in zip(fast, slow, strict=True):
        assert one.value == pytest.approx(other.value)
        assert (one.low, one.high) == pytest.approx((other.low, other.high))


def test_transform_acts_on_means():
    values, groups, sizes = grouped()
    sums = np.bincount(groups, values**2)[:, None]
    (found,) = bootstrap_means(sums, sizes, np.sqrt, n_bootstrap=50, seed=1)
    expected = bootstrap_interval(
        lambda x: float(np.sqrt(np.mean(x**2))), values, groups=groups, n_bootstrap=50, seed=1
    )
    assert (found.value, found.low, found.high) == pytest.approx(
        (expected.value, expected.low, expected.high)
    )


def test_seed_decides():
    values, groups, _ = grouped()
    first, again = (bootstrap_interval(np.mean, values, groups=groups, seed=5) for _ in range(2))
    other = bootstrap_interval(np.mean, values, groups=groups, seed=6)
    assert first == again
    assert first.low != other.low


def test_resampling_by_group_is_wider_when_groups_agree():
    rng = np.random.default_rng(0)
    values = np.repeat(rng.normal(size=20), 50)  # 20 structures of 50 equal atoms
    groups = np.repeat(np.arange(20), 50)
    by_group = bootstrap_interval(np.mean, values, groups=groups, n_bootstrap=300)
    by_row = bootstrap_interval(np.mean, values, n_bootstrap=300)
    ratio = (by_group.high - by_group.low) / (by_row.high - by_row.low)
    assert ratio == pytest.approx(np.sqrt(50), rel=0.25)


def test_labels_of_groups_may_be_anything():
    values, groups, _ = grouped()
    names = np.array([f"s{g:02d}" for g in groups])
    with_names = bootstrap_interval(np.mean, values, groups=names, n_bootstrap=20)
    assert with_names == bootstrap_interval(np.mean, values, groups=groups, n_bootstrap=20)


def test_rows_are_presorted_in_each_resample():
    values = np.sort(np.random.default_rng(0).normal(size=20))
    ascending = bootstrap_interval(lambda x: float(np.all(np.diff(x) >= 0)), values, n_bootstrap=10)
    assert (ascending.low, ascending.high) == (1.0, 1.0)


@pytest.mark.statistical
def test_interval_of_a_mean_covers():
    rng = np.random.default_rng(0)
    hits, trials = 0, 300
    for trial in range(trials):
        interval = bootstrap_means(
            rng.normal(size=(60, 1)), np.ones(60), n_bootstrap=300, seed=trial
        )[0]
        hits += interval.low <= 0.0 <= interval.high
    # Percentile intervals of 60 points cover about 94 %; four binomial standard errors are 5 %.
    assert hits / trials == pytest.approx(0.94, abs=0.05)


def test_a_paired_difference_uses_the_same_resamples():
    rng = np.random.default_rng(2)
    target = rng.normal(size=100)
    good, bad = target + 0.10, target + 0.15
    difference = bootstrap_interval(
        lambda a, b, t: metrics.mae(a, t) - metrics.mae(b, t), good, bad, target, n_bootstrap=50
    )
    assert (difference.low, difference.high) == pytest.approx((-0.05, -0.05))


def test_undefined_resamples_are_left_out():
    sums, sizes = np.array([[2.0], [0.0]]), np.array([1.0, 0.0])  # the second group has no rows
    (interval,) = bootstrap_means(sums, sizes, n_bootstrap=50)
    assert (interval.value, interval.low, interval.high) == (2.0, 2.0, 2.0)
    never = bootstrap_interval(lambda x: float("nan"), np.ones(3), n_bootstrap=5)
    assert (never.low, never.high) == (None, None)


def test_percentiles_leave_equal_tails():
    resampled = np.random.default_rng(0).permutation(np.linspace(0.0, 1.0, 1001))[:, None]
    (interval,) = bootstrap.percentile_interval(np.array([0.5]), resampled, level=0.9)
    assert (interval.low, interval.high) == pytest.approx((0.05, 0.95))


def test_interval_as_text():
    assert str(bootstrap.Interval(1.23456)) == "1.235"
    assert str(bootstrap.Interval(1.0, 0.5, 2.0)) == "1 [0.5, 2]"


def test_bad_input_is_refused():
    one = np.ones(4)
    with pytest.raises(InputError, match="no data"):
        bootstrap_interval(np.mean)
    with pytest.raises(InputError, match="first axis"):
        bootstrap_interval(metrics.mae, one, np.ones(3))
    with pytest.raises(InputError, match="first axis"):
        bootstrap_interval(np.mean, [])
    with pytest.raises(InputError, match="one label per row"):
        bootstrap_interval(np.mean, one, groups=[0, 1])
    with pytest.raises(InputError, match="at least two"):
        bootstrap_interval(np.mean, one, groups=[0, 0, 0, 0])
    with pytest.raises(InputError, match="n_bootstrap"):
        bootstrap_interval(np.mean, one, n_bootstrap=0)
    with pytest.raises(InputError, match="level"):
        bootstrap_interval(np.mean, one, level=95)
    with pytest.raises(InputError, match="bootstrap_intervals"):
        bootstrap_interval(lambda x: x[:2], one, n_bootstrap=2)
    with pytest.raises(InputError, match="group_sums"):
        bootstrap_means(np.ones((3, 1)), np.ones(2))
