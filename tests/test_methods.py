"""The method that is chosen by what is asked for."""

import pytest
import torch
from ase.build import bulk, molecule
from typer.testing import CliRunner

import blips
from blips.backbones import PaiNN
from blips.cli import app
from blips.data.structures import read_structures
from blips.errors import InputError
from studies.nbody import EGNN, ParticleGraph


def rattled(count):
    found = [molecule(("NH3", "H2O")[k % 2]) for k in range(count)]
    for k, atoms in enumerate(found):
        atoms.rattle(0.1, seed=k)
    return found


@pytest.fixture
def potential() -> blips.BayesianPotential:
    torch.manual_seed(0)
    return blips.bayesianize(PaiNN(cutoff=3.0, features=8, blocks=1, num_basis=4), initial=0.01)


def test_energies_alone_take_one_pass(potential):
    found = potential.predict(rattled(2), method="auto", forces=False)
    assert found.method == "onepass"
    assert found.forces is None
    assert (found.energy_std > 0).all()


def test_forces_are_sampled(potential):
    found = potential.predict(rattled(2), samples="auto", tolerance=0.2)
    assert found.method == "mc"
    assert max(found.details["std_relative_error"].values()) <= 0.2
    assert "not conditioned" in found.details["chosen_because"]


def test_stress_and_particles_are_sampled(potential):
    copper = bulk("Cu", cubic=True)
    found = potential.predict(copper, method="auto", stress=True, tolerance=0.3)
    assert found.method == "mc"
    assert found.stress_std.shape == (1, 3, 3)
    model = blips.bayesianize(EGNN(hidden=8, layers=1))
    x, v = torch.randn(2, 3, 5, 3)
    graph = ParticleGraph.from_arrays(x, v, torch.ones(3, 5))
    assert model.predict(graph, method="auto", tolerance=0.3).method == "mc"


@pytest.mark.parametrize("method", ["propagate", "best"])
def test_unknown_methods_are_refused(potential, method):
    with pytest.raises(InputError, match="auto, conditioned, mc, frozen, onepass, map"):
        potential.predict(rattled(1), method=method)


def test_the_command_samples_as_many_as_needed(potential, tmp_path):
    from ase.io import write

    model, structures, output = (tmp_path / name for name in ("m.safetensors", "s.xyz", "o.extxyz"))
    blips.save(potential, model)
    write(structures, rattled(3), format="extxyz")
    words = ["predict", model, structures, "-o", output, "--samples", "auto"]
    result = CliRunner().invoke(app, [*map(str, words)])
    assert result.exit_code == 0, result.output
    assert "relative error of std" in result.output
    assert (read_structures(output)[0].arrays["forces_uncertainty"] > 0).all()
