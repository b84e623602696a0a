"""What all calibrators have in common: saving, shapes, certainty, refusals."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from blips.errors import InputError
from blips.uq.calibrate import ConformalCalibrator, ScaleCalibrator, calibrator_from_dict

CALIBRATORS = (ScaleCalibrator, ConformalCalibrator)
positive = st.floats(1e-3, 1e3, allow_subnormal=False)


@pytest.mark.parametrize("cls", CALIBRATORS)
def test_json_round_trip(cls, synthetic):
    calibrator = cls.fit(*synthetic(n=300))
    saved = json.loads(json.dumps(calibrator.to_dict(), allow_nan=False))
    assert calibrator_from_dict(saved) == calibrator


def test_damaged_calibrators_are_refused():
    with pytest.raises(InputError, match="scale factor"):
        ScaleCalibrator(factor=-1.0)
    with pytest.raises(InputError, match="ascending"):
        ConformalCalibrator(factor=1.0, scores=(2.0, 1.0))
    with pytest.raises(InputError, match="non-negative"):
        ConformalCalibrator(factor=1.0, scores=(-1.0, 1.0))


@pytest.mark.parametrize("cls", CALIBRATORS)
def test_shape_is_kept_and_components_are_pooled(cls, synthetic):
    mean, std, target = (array.reshape(-1, 3) for array in synthetic(n=300))
    calibrator = cls.fit(mean, std, target)
    assert calibrator.apply(std).shape == (100, 3)
    assert calibrator == cls.fit(mean.ravel(), std.ravel(), target.ravel())


@pytest.mark.parametrize("cls", CALIBRATORS)
def test_bad_std_is_refused(cls, synthetic):
    data = synthetic(n=300)
    calibrator = cls.fit(*data)
    for bad in ([-1.0], [np.nan], [np.inf], []):
        with pytest.raises(InputError, match="std"):
            calibrator.apply(bad)
    with pytest.raises(InputError, match="shapes differ"):
        cls.fit(data[0], data[1][:-1], data[2])
    certain = np.where(np.arange(300) == 7, 0.0, data[1])
    with pytest.raises(InputError, match="zero or negative"):
        cls.fit(data[0], certain, data[2])


@pytest.mark.parametrize("cls", CALIBRATORS)
def test_certainty_stays_certain(cls, synthetic):
    calibrator = cls.fit(*synthetic(n=300, distort=lambda std: 0.5 * std))
    std = np.array([[0.1, 0.2, 0.0], [0.3, 0.0, 1e-300]])  # planar molecules have such forces
    applied = calibrator.apply(std)
    np.testing.assert_array_equal(applied == 0.0, std == 0.0)
    np.testing.assert_array_equal(applied[std > 0.0], calibrator.apply(std[std > 0.0]))
    assert calibrator.apply(0.0) == 0.0


@given(hnp.arrays(float, 20, elements=positive), positive)
def test_scale_and_conformal_are_equivariant_to_the_scale_of_std(std, scale):
    rng = np.random.default_rng(0)
    target = std * rng.normal(size=20)
    for cls in (ScaleCalibrator, ConformalCalibrator):
        before = cls.fit(np.zeros(20), std, target).apply(std)
        after = cls.fit(np.zeros(20), scale * std, target).apply(scale * std)
        np.testing.assert_allclose(after, before, rtol=1e-9)
