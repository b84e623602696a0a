"""Bootstrap intervals: exactness of the fast path, grouping, seeds and coverage."""

import numpy as np
import pytest

from blips.errors import InputError
from blips.uq import bootstrap
from blips.uq.bootstrap import Bootstrap, Interval


def grouped(n_groups=12, seed=0):
    """Values of rows in groups of one to five."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 6, n_groups)
    groups = np.repeat(np.arange(n_groups), sizes)
    return rng.normal(size=len(groups)), groups


def summed(scores, groups, n_groups):
    """Sums of scores [n, P] over each group, [S, P]."""
    return np.array([np.bincount(groups, column, n_groups) for column in scores.T]).T


def test_counts_are_draws_with_replacement(monkeypatch):
    monkeypatch.setattr(bootstrap, "_CHUNK_ELEMENTS", 35)
    chunks = list(Bootstrap(7, 403).counts())
    assert max(chunk.size for chunk in chunks) == 35
    counts = np.concatenate(chunks)
    assert counts.shape == (403, 7)
    assert np.all(counts.sum(axis=1) == 7)
    variance = 1 - 1 / 7  # of one group's count
    assert np.all(np.abs(counts.mean(axis=0) - 1) < 4 * np.sqrt(variance / 403))


def test_means_equal_the_general_bootstrap():
    values, groups = grouped()
    how = Bootstrap(12, 50, seed=3)
    fast = how.of_sums(summed(np.stack([values, values**2], axis=1), groups, 12), groups)
    slow = how.of(lambda x: np.array([x.mean(), (x**2).mean()]), values, groups=groups)
    for one, other in zip(fast, slow, strict=True):
        assert one.value == pytest.approx(other.value)
        assert (one.low, one.high) == pytest.approx((other.low, other.high))


def test_transform_acts_on_means():
    values, groups = grouped()
    how = Bootstrap(12, 50, seed=1)
    (found,) = how.of_sums(summed(values[:, None] ** 2, groups, 12), groups, np.sqrt)
    (expected,) = how.of(lambda x: float(np.sqrt(np.mean(x**2))), values, groups=groups)
    assert (found.value, found.low, found.high) == pytest.approx(
        (expected.value, expected.low, expected.high)
    )


def test_seed_decides():
    values, groups = grouped()
    first, again, other = (
        Bootstrap(12, 200, seed=seed).of(np.mean, values, groups=groups)[0] for seed in (5, 5, 6)
    )
    assert first == again
    assert first.low != other.low


def test_resampling_by_group_is_wider_when_groups_agree():
    rng = np.random.default_rng(0)
    values = np.repeat(rng.normal(size=20), 50)  # 20 structures of 50 equal atoms
    (by_group,) = Bootstrap(20, 300).of(np.mean, values, groups=np.repeat(np.arange(20), 50))
    (by_row,) = Bootstrap(1000, 300).of(np.mean, values, groups=np.arange(1000))
    ratio = (by_group.high - by_group.low) / (by_row.high - by_row.low)
    assert ratio == pytest.approx(np.sqrt(50), rel=0.25)


def test_rows_are_presorted_in_each_resample():
    values = np.sort(np.random.default_rng(0).normal(size=20))
    (ascending,) = Bootstrap(20, 10).of(
        lambda x: float(np.all(np.diff(x) >= 0)), values, groups=np.arange(20)
    )
    assert (ascending.low, ascending.high) == (1.0, 1.0)


@pytest.mark.statistical
def test_interval_of_a_mean_covers():
    rng = np.random.default_rng(0)
    hits, trials = 0, 300
    for trial in range(trials):
        how = Bootstrap(60, 300, seed=trial)
        (interval,) = how.of_sums(rng.normal(size=(60, 1)), np.arange(60))
        hits += interval.low <= 0.0 <= interval.high
    # Percentile intervals of 60 points cover about 94 %; four binomial standard errors are 5 %.
    assert hits / trials == pytest.approx(0.94, abs=0.05)


def test_a_paired_difference_uses_the_same_resamples():
    rng = np.random.default_rng(2)
    target = rng.normal(size=100)
    good, bad = target + 0.10, target + 0.15
    (difference,) = Bootstrap(100, 50).of(
        lambda a, b, t: np.abs(a - t).mean() - np.abs(b - t).mean(),
        good,
        bad,
        target,
        groups=np.arange(100),
    )
    assert (difference.low, difference.high) == pytest.approx((-0.05, -0.05))


def test_undefined_resamples_are_left_out():
    sums = np.array([[2.0], [0.0]])  # the second group has no rows
    (interval,) = Bootstrap(2, 50).of_sums(sums, np.array([0]))
    assert (interval.value, interval.low, interval.high) == (2.0, 2.0, 2.0)
    (never,) = Bootstrap(3, 5).of(lambda x: float("nan"), np.ones(3), groups=np.arange(3))
    assert (never.low, never.high) == (None, None)


@pytest.mark.parametrize("how", [Bootstrap(1, 100), Bootstrap(4, 0)])
def test_without_resamples_there_are_values_alone(how):
    groups = np.zeros(4, dtype=int)
    assert how.of(np.mean, np.arange(4.0), groups=groups) == [Interval(1.5)]
    assert how.of_sums(summed(np.arange(4.0)[:, None], groups, 4), groups) == [Interval(1.5)]


def test_percentiles_leave_equal_tails():
    resampled = iter(np.random.default_rng(0).permutation(np.linspace(0.0, 1.0, 1001)))
    (interval,) = Bootstrap(2, 1000).of(lambda x: next(resampled), np.ones(2), groups=np.arange(2))
    assert (interval.low, interval.high) == pytest.approx((0.025, 0.975), abs=2e-3)


def test_interval_as_text():
    assert str(Interval(1.23456)) == "1.235"
    assert str(Interval(1.0, 0.5, 2.0)) == "1 [0.5, 2]"
    assert str(Interval(1.0, None, 2.0)) == str(Interval(1.0, 0.5)) == "1"


def test_a_negative_number_of_resamples_is_refused():
    with pytest.raises(InputError, match="n_resamples"):
        Bootstrap(4, -1)


def test_resamples_of_a_single_row_count():
    """Of three groups with one, two and no rows, a resample may have one row."""
    groups, scores = np.array([0, 1, 1]), np.array([1.0, 5.0, 9.0])
    for seed in range(3):
        boot = Bootstrap(3, 400, seed=seed)
        (expected,) = boot.of(lambda x: x.mean() if len(x) else np.nan, scores, groups=groups)
        assert boot.of_sums(summed(scores[:, None], groups, 3), groups) == [expected]


def test_more_groups_than_fit_are_resampled_one_at_a_time(monkeypatch):
    monkeypatch.setattr(bootstrap, "_CHUNK_ELEMENTS", 35)
    assert [chunk.shape for chunk in Bootstrap(100, 3).counts()] == [(1, 100)] * 3


def test_a_thousand_resamples_for_95_percent_unless_asked_otherwise():
    assert Bootstrap(3) == Bootstrap(3, n_resamples=1000, seed=0)
    assert bootstrap.LEVEL == 0.95
    assert Bootstrap(2, 1).active
