"""Conditioned potentials that the tests of a module share."""

import pytest

import blips
from inference.conditioning import conditioned


@pytest.fixture(scope="module", params=["painn", "schnet"])
def potential(request) -> blips.BayesianPotential:
    """Not to be changed."""
    return conditioned(request.param)


@pytest.fixture(scope="module")
def painn() -> blips.BayesianPotential:
    """Not to be changed."""
    return conditioned("painn")
