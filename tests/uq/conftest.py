"""Data shared by the tests of uncertainty quantification."""

import numpy as np
import pytest


def _synthetic(n=4000, seed=0, distort=lambda std: std):
    rng = np.random.default_rng(seed)
    mean, std = rng.normal(size=n), np.exp(rng.normal(-2.0, 0.8, n))
    return mean, distort(std), mean + std * rng.normal(size=n)


@pytest.fixture(scope="session")
def synthetic():
    """Function for (mean, std, target) with errors of known std and a distorted std."""
    return _synthetic
