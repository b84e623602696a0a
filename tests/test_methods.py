"""The method that is chosen by what is asked for."""

import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from typer.testing import CliRunner

import blips
from blips.backbones import PaiNN
from blips.cli import app
from blips.data.structures import read_structures
from blips.errors import InputError
from blips.spread.training import Schedule, fit_refinement
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


def test_forces_are_sampled_until_they_are_distilled(potential):
    before = potential.predict(rattled(2), samples="auto", tolerance=0.2)
    assert before.method == "mc"
    assert before.details["tolerance_reached"]
    assert "distil_forces" in before.details["chosen_because"]
    potential.distil_forces(rattled(6), samples=32)
    after = potential.predict(rattled(2), method="auto")
    assert after.method == "onepass"
    assert after.forces_std.shape == (7, 3)


def test_stress_and_particles_are_sampled(potential):
    copper = bulk("Cu", cubic=True)
    found = potential.predict(copper, method="auto", stress=True, tolerance=0.3)
    assert found.method == "mc"
    assert found.stress_std.shape == (1, 3, 3)
    model = blips.bayesianize(EGNN(hidden=8, layers=1))
    x, v = torch.randn(2, 3, 5, 3)
    graph = ParticleGraph.from_arrays(x, v, torch.ones(3, 5))
    assert model.predict(graph, method="auto", tolerance=0.3).method == "mc"


def test_unknown_methods_are_refused(potential):
    with pytest.raises(InputError, match="auto, conditioned, mc"):
        potential.predict(rattled(1), method="best")


@pytest.mark.parametrize("mode", ["auto", "onepass"])
def test_the_calculator_has_these_modes(potential, mode):
    potential.distil_forces(rattled(5), samples=16)
    atoms = rattled(1)[0]
    atoms.calc = blips.Calculator(potential, mode=mode)
    expected = potential.predict(atoms, method="onepass")
    assert atoms.get_potential_energy() == pytest.approx(expected.energy[0])
    assert atoms.calc.results["energy_uncertainty"] == pytest.approx(expected.energy_std[0])
    np.testing.assert_allclose(atoms.calc.results["forces_uncertainty"], expected.forces_std)


def test_commands_distil_and_predict(potential, tmp_path, monkeypatch):
    from ase.io import write

    model, taught = tmp_path / "m.safetensors", tmp_path / "taught.safetensors"
    structures, output = tmp_path / "s.extxyz", tmp_path / "out.extxyz"
    blips.save(potential, model)
    write(structures, rattled(5))
    run = CliRunner()
    sampled = ["predict", model, structures, "-o", output, "--samples", "auto"]
    result = run.invoke(app, [*map(str, sampled), "--tolerance", "0.3"])
    assert result.exit_code == 0, result.output
    assert "relative error of sigma" in result.output
    words = ["distil", model, structures, "-o", taught, "--samples", "16"]
    result = run.invoke(app, list(map(str, words)))
    assert "Spearman" in result.output
    monkeypatch.setattr(fit_refinement, "__defaults__", (Schedule(steps=2), 0))
    result = run.invoke(app, [*map(str, words), "--refine"])
    kept = blips.load(taught).force_spread.refinement is not None
    assert kept != ("not kept" in result.output)
    words = ["predict", taught, structures, "-o", output, "--method", "auto"]
    result = run.invoke(app, list(map(str, words)))
    assert "method onepass" in result.output
    assert (read_structures(output)[0].arrays["forces_uncertainty"] > 0).all()
