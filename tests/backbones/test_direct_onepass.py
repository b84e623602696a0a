"""Error bars of models that predict forces directly, without sampling."""

import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from scipy.stats import spearmanr

import blips
from blips.backbones import PaiNN
from blips.errors import InputError
from blips.spread import ForceSpread
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
@pytest.mark.parametrize("method", ["onepass", "propagate"])
def test_energies_and_forces_have_deviations(orb, structures, method):
    orb.distil_forces(structures, samples=48, displacements=[0.05])
    sampled = orb.predict(structures, samples=200, seed=4)
    found = orb.predict(structures, method=method)
    expected = orb.predict(structures, method="map")
    np.testing.assert_allclose(found.energy, expected.energy, rtol=1e-5)
    np.testing.assert_allclose(found.forces, expected.forces, atol=1e-5)
    per_atom, sampled_per_atom = (p.forces_std.mean(axis=1) for p in (found, sampled))
    rho = spearmanr(per_atom, sampled_per_atom).statistic
    if method == "onepass":
        assert found.energy_std == pytest.approx(sampled.energy_std, rel=0.25)
        assert rho > 0.85
    else:  # a rough estimate
        assert rho > 0.5


@pytest.mark.statistical
def test_axes_of_a_model_without_symmetry_differ(orb, structures):
    with torch.no_grad():  # forces along z know more than those along x and y
        last = [m for m in orb.backbone.model.heads["forces"].modules() if hasattr(m, "weight")][-1]
        kept = last.weight.clone()
        last.weight[2] *= 0.3
    spread = orb.distil_forces(structures, samples=48, displacements=[0.05])
    sampled = orb.predict(structures, samples=200, seed=4).forces_std
    found = orb.predict(structures, method="onepass").forces_std
    with torch.no_grad():
        last.weight.copy_(kept)
    assert spread.axes
    ratio = found[:, 2].mean() / found[:, 0].mean()
    assert ratio == pytest.approx(sampled[:, 2].mean() / sampled[:, 0].mean(), rel=0.15)
    assert ratio < 0.8
    assert ForceSpread.from_dict(spread.to_dict()) == spread


def test_conservative_models_cannot_be_propagated():
    torch.manual_seed(0)
    potential = blips.bayesianize(PaiNN(cutoff=3.0, features=8, blocks=1))
    with pytest.raises(InputError, match="derivatives"):
        potential.predict(molecule("H2O"), method="propagate")
