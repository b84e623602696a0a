"""The one-pass energy variance of whole models."""

import pytest
import torch
from ase.build import bulk, molecule

import blips
from blips.backbones import PaiNN, SchNet
from blips.errors import InputError


@pytest.fixture(scope="module", params=[PaiNN, SchNet])
def potential(request):
    torch.manual_seed(0)
    backbone = request.param(cutoff=4.0, features=16, blocks=2)
    return blips.bayesianize(
        backbone, bounds=(1e-6, 0.1), initial=1e-4, prior_dropout=0.05
    ).double()


@pytest.fixture(scope="module")
def structures():
    found = []
    for k in range(8):
        atoms = (molecule("NH3"), bulk("Cu", cubic=True))[k % 2].copy()
        atoms.rattle(0.02 + 0.03 * k, seed=k)
        found.append(atoms)
    return found


@pytest.mark.statistical
def test_it_is_the_variance_of_many_samples_when_the_noise_is_small(potential, structures):
    sampled = potential.predict(structures, samples=600, method="mc", forces=False).energy_std
    found = potential.one_pass(structures, forces=False)
    assert found.energy_var.sqrt().numpy() == pytest.approx(sampled, rel=0.15)


def test_outputs_are_those_of_the_posterior_means(potential, structures):
    expected = potential.predict(structures, method="map")
    found = potential.predict(structures, method="onepass")
    assert found.energy == pytest.approx(expected.energy, abs=1e-10)
    assert found.forces == pytest.approx(expected.forces, abs=1e-10)
    assert (found.energy_std > 0).all()
    assert found.forces_std is None
    assert found.method == "onepass"


def test_shares_of_edges_and_atoms_add_up(potential, structures):
    found = potential.one_pass(structures)
    total = sum(float(shares.sum()) for shares in found.row_var.values())
    assert total == pytest.approx(float(found.energy_var.sum()))
    assert total == pytest.approx(float(found.atom_var.sum()))
    assert set(found.row_var) == {"edge", "node"}
    one = potential.one_pass(structures[3])
    assert float(one.energy_var[0]) == pytest.approx(float(found.energy_var[3]))


def test_stress_comes_along(potential):
    copper = bulk("Cu", cubic=True)
    expected = potential.predict(copper, method="map", stress=True).stress
    found = potential.predict(copper, method="onepass", stress=True).stress
    assert found == pytest.approx(expected, abs=1e-12)


def test_direct_models_are_refused_with_the_remedy():
    from studies.nbody import EGNN, ParticleGraph
    from studies.nbody.checks import random_particles

    torch.manual_seed(0)
    potential = blips.bayesianize(EGNN(hidden=8, layers=1))
    with pytest.raises(InputError, match='method="mc"'):
        potential.predict(ParticleGraph.from_arrays(*random_particles(2)), method="onepass")
