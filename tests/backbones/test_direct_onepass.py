"""Error bars of energies of models that predict forces directly, without sampling."""

import numpy as np
import pytest
import torch
from ase.build import bulk, molecule

import blips
from helpers import quartz, small_orb

# The package hands torch tensors to functions of ASE that expect arrays.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(scope="module")
def orb() -> blips.BayesianPotential:
    pytest.importorskip("orb_models")
    potential = blips.bayesianize(
        small_orb("orb-direct"), initial=3e-3, bounds=(1e-5, 0.11), prior_dropout=0.01
    )
    with torch.no_grad():  # coefficients that differ between rows, as trained ones do
        for parameter in potential.encoder.parameters():
            parameter.mul_(3.0 if parameter.ndim == 2 else 1.0)
    return potential


@pytest.fixture(scope="module")
def structures():
    found = [quartz(0.1), molecule("NH3"), bulk("Cu", cubic=True), molecule("CH3OH")]
    for k, atoms in enumerate(found):
        atoms.rattle(0.05, seed=k)
    return found


@pytest.mark.statistical
def test_energies_have_deviations_and_forces_have_none(orb, structures):
    sampled = orb.predict(structures, samples=200, seed=4)
    found = orb.predict(structures, method="onepass")
    expected = orb.predict(structures, method="map")
    np.testing.assert_allclose(found.energy, expected.energy, rtol=1e-5)
    np.testing.assert_allclose(found.forces, expected.forces, atol=1e-5)
    assert found.energy_std == pytest.approx(sampled.energy_std, rel=0.25)
    assert found.forces_std is None
