"""The scale calibrator: what it recovers and what it minimises."""

import numpy as np
import pytest
from scipy.stats import norm

from blips.errors import InputError
from blips.uq.calibrate import ScaleCalibrator


@pytest.mark.parametrize("factor", [0.2, 1.0, 3.0])
def test_scale_recovers_a_known_factor(factor, synthetic):
    calibrator = ScaleCalibrator.fit(*synthetic(distort=lambda std: std / factor))
    assert calibrator.factor == pytest.approx(factor, rel=4 / np.sqrt(2 * 4000))


def test_scale_is_the_minimum_of_the_nll(synthetic):
    mean, std, target = synthetic(n=100, distort=lambda std: 0.3 * std)
    best = ScaleCalibrator.fit(mean, std, target).apply(std)
    most = norm.logpdf(target, mean, best).mean()
    for nudge in (0.98, 1.02):
        assert norm.logpdf(target, mean, nudge * best).mean() < most
    assert np.mean(((target - mean) / best) ** 2) == pytest.approx(1.0)


def test_scale_refuses_perfect_predictions():
    with pytest.raises(InputError, match="scale factor"):
        ScaleCalibrator.fit([1.0, 2.0], [1.0, 1.0], [1.0, 2.0])
