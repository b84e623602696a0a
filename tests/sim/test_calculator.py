"""The ASE calculator, used as ASE's own tools use it."""

import copy
import pickle

import ase.io
import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.fd import calculate_numerical_forces
from ase.md.langevin import Langevin
from ase.mep import NEB
from ase.optimize import BFGS, FIRE
from ase.phonons import Phonons
from ase.stress import full_3x3_to_voigt_6_stress

import blips
from blips.backbones import PaiNN
from blips.errors import InputError
from blips.sim.calculator import snapshot


@pytest.fixture(scope="module")
def potential():
    torch.manual_seed(0)
    return blips.bayesianize(PaiNN(cutoff=4.0, features=16, blocks=2), bounds=(1e-5, 0.1)).double()


def rattled(atoms, std=0.05, seed=0):
    atoms = atoms.copy()
    atoms.rattle(std, seed=seed)
    return atoms


def test_results_are_those_of_predict(potential):
    atoms = rattled(bulk("Cu", cubic=True))
    prediction = potential.predict(atoms, samples=8, seed=3, stress=True)
    atoms.calc = blips.Calculator(potential, samples=8, seed=3)
    assert atoms.get_potential_energy() == pytest.approx(prediction.energy[0], abs=1e-10)
    assert atoms.get_forces() == pytest.approx(prediction.forces, abs=1e-10)
    expected = full_3x3_to_voigt_6_stress(prediction.stress[0])
    assert atoms.get_stress() == pytest.approx(expected, abs=1e-10)
    assert atoms.get_potential_energies() == pytest.approx(prediction.energies, abs=1e-10)
    for name in ("energy", "forces", "energies", "stress"):
        std = getattr(prediction, f"{name}_std")
        std = full_3x3_to_voigt_6_stress(std[0]) if name == "stress" else std
        found = atoms.calc.get_property(f"{name}_uncertainty", atoms)
        assert np.ravel(found) == pytest.approx(np.ravel(std), abs=1e-10)
    assert atoms.get_potential_energy(force_consistent=True) == atoms.get_potential_energy()


@pytest.mark.parametrize("mode", ["map", "frozen", "mc"])
def test_a_kept_neighbour_list_changes_no_bit(potential, mode):
    atoms = rattled(bulk("NaCl", "rocksalt", a=5.6, cubic=True))
    kept, fresh = (blips.Calculator(potential, mode, samples=2, skin=skin) for skin in (1.0, 0.0))
    for step in range(6):
        atoms.rattle(0.1, seed=step)
        atoms.set_cell(atoms.cell * (1.01 if step == 4 else 1.0), scale_atoms=True)
        for name in ("energy", "forces", "energy_uncertainty"):
            np.testing.assert_array_equal(*(c.get_property(name, atoms) for c in (kept, fresh)))
    assert 2 <= kept.neighbours.searches < 6


def test_nothing_is_computed_twice(potential, monkeypatch):
    calls = []
    predict = type(potential).predict
    monkeypatch.setattr(
        type(potential), "predict", lambda *a, **k: calls.append(k) or predict(*a, **k)
    )
    atoms = molecule("NH3")
    atoms.calc = blips.Calculator(potential, samples=4)
    atoms.get_potential_energy()
    atoms.get_forces()
    atoms.calc.get_property("forces_uncertainty", atoms)
    assert len(calls) == 1
    atoms.positions[0, 0] += 0.01
    atoms.get_forces()
    assert len(calls) == 2


def test_map_mode_is_the_plain_model_with_uncertainties_every_n_structures(potential):
    atoms = molecule("NH3")
    calculator = blips.Calculator(potential, method="map", every=3, samples=4)
    atoms.calc = calculator
    with_uncertainty = []
    for _ in range(7):
        forces = atoms.get_forces()
        expected = potential.predict(atoms, method="map").forces
        assert forces == pytest.approx(expected, abs=1e-12)
        with_uncertainty.append("forces_uncertainty" in calculator.results)
        atoms.positions += 0.01 * np.arange(12).reshape(4, 3)
    assert with_uncertainty == [True, False, False, True, False, False, True]
    assert calculator.get_property("energy_uncertainty", atoms) > 0


def test_a_frozen_member_is_the_same_at_every_call_and_conservative(potential):
    atoms = rattled(molecule("NH3"))
    atoms.calc = blips.Calculator(potential, method="frozen", member=2, seed=5)
    member = potential.draw(3, seed=5)[2]
    assert atoms.get_potential_energy() == pytest.approx(member.predict(atoms).energy[0])
    numeric = calculate_numerical_forces(atoms, eps=1e-4)
    assert atoms.get_forces() == pytest.approx(numeric, abs=1e-5)
    other = blips.Calculator(potential, method="frozen", member=1, seed=5)
    assert other.get_potential_energy(atoms) != atoms.get_potential_energy()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
@pytest.mark.parametrize("method", ["mc", "frozen"])
def test_copies_and_pickles_give_the_same_numbers(potential, duplicate, method):
    atoms = rattled(molecule("NH3"))
    calculator = blips.Calculator(potential, method=method, samples=4)
    energy = calculator.get_potential_energy(atoms)
    again = duplicate(calculator)
    again.reset()
    assert again.get_potential_energy(atoms) == pytest.approx(energy, abs=1e-12)


def test_optimisers_band_and_phonons_run_on_a_frozen_member(potential):
    calculator = blips.Calculator(potential, method="frozen")
    atoms = rattled(molecule("NH3"))
    atoms.calc = calculator
    assert BFGS(atoms, logfile=None).run(fmax=0.01, steps=200)
    ends = [atoms.copy(), rattled(atoms, 0.1, seed=1)]
    images = [ends[0], *(ends[0].copy() for _ in range(2)), ends[1]]
    for image in images:
        image.calc = blips.Calculator(potential, method="frozen")
    band = NEB(images, method="improvedtangent")
    band.interpolate()
    FIRE(band, logfile=None).run(fmax=0.5, steps=3)
    assert np.isfinite(band.get_forces()).all()


def test_phonons_of_a_frozen_member_obey_the_sum_rule(potential, tmp_path):
    atoms = bulk("Cu")
    phonons = Phonons(
        atoms,
        blips.Calculator(potential, method="frozen"),
        supercell=(2, 2, 2),
        name=tmp_path / "ph",
    )
    phonons.run()
    phonons.read(acoustic=False)
    constants = phonons.get_force_constant()  # [cells, 3, 3]
    assert np.abs(constants.sum(axis=0)).max() < 1e-3 * np.abs(constants).max()


def test_langevin_keeps_uncertainties_in_the_written_frames(potential, tmp_path):
    atoms = molecule("NH3")
    atoms.calc = blips.Calculator(potential, method="map", every=1, samples=4)
    file = tmp_path / "md.extxyz"
    dynamics = Langevin(
        atoms, 0.5, temperature_K=100, friction=0.1, fixcm=False, rng=np.random.default_rng(0)
    )
    dynamics.attach(lambda: ase.io.write(file, atoms, append=True))
    dynamics.run(3)
    frames = ase.io.read(file, ":")
    assert len(frames) == 4
    for frame in frames:
        assert frame.info["energy_uncertainty"] > 0
        assert frame.arrays["forces_uncertainty"].shape == (4, 3)
    expected = atoms.calc.results["forces_uncertainty"]
    assert frames[-1].arrays["forces_uncertainty"] == pytest.approx(expected, abs=1e-7)


def test_a_structure_keeps_no_uncertainties_of_another(potential):
    atoms = molecule("NH3")
    atoms.calc = blips.Calculator(potential, method="map", every=2, samples=4)
    atoms.get_forces()
    assert atoms.info["energy_uncertainty"] > 0
    atoms.positions[0] += 0.01
    atoms.get_forces()
    assert "energy_uncertainty" not in atoms.info
    assert "forces_uncertainty" not in atoms.arrays
    atoms.calc = blips.Calculator(potential, method="map", samples=4)
    atoms.calc.get_property("forces_uncertainty", atoms)
    atoms.positions[0] += 0.01
    atoms.calc.calculate(atoms, ["energy"])  # directly, past ASE's own look at what changed
    assert "forces_uncertainty" not in {**atoms.calc.results, **atoms.arrays}


def test_snapshots_have_results_that_belong_to_them(potential):
    atoms = molecule("NH3")
    atoms.calc = blips.Calculator(potential, samples=4)
    energy = atoms.get_potential_energy()
    frame = snapshot(atoms)
    assert frame.get_potential_energy() == energy
    assert frame.info["energy_uncertainty"] == atoms.calc.results["energy_uncertainty"]
    atoms.positions[0] += 0.01
    moved = snapshot(atoms)
    assert moved.calc.results == {}
    assert "energy_uncertainty" not in moved.info


def test_errors_name_the_remedy(potential):
    with pytest.raises(InputError, match=r"blips\.bayesianize"):
        blips.Calculator(PaiNN(cutoff=4.0, features=16, blocks=1))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="mc, frozen, onepass, map"):
        blips.Calculator(potential, method="committee")
    with pytest.raises(InputError, match="every"):
        blips.Calculator(potential, every=-1)
    with pytest.raises(PropertyNotImplementedError):
        blips.Calculator(potential).get_property("dipole", molecule("NH3"))
    with pytest.raises(InputError, match="no volume"):
        blips.Calculator(potential).get_stress(molecule("NH3"))
