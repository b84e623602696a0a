"""Frozen members of a trained posterior, under tools that need a smooth potential."""

import copy

import numpy as np
import pytest
import torch
from ase.build import bulk
from ase.mep import NEB
from ase.optimize import BFGS, FIRE
from ase.phonons import Phonons
from ase.vibrations import Vibrations

import blips
from blips.backbones import SchNet
from blips.data.ammonia import load_ammonia


@pytest.fixture(scope="module")
def member(ammonia_potential):
    """Makes calculators of the same draw, in double precision."""
    potential = copy.deepcopy(ammonia_potential).double()
    return lambda: blips.Calculator(potential, method="frozen", member=1)


@pytest.fixture(scope="module")
def relaxed(member):
    atoms = min(load_ammonia("train"), key=lambda one: one.get_potential_energy()).copy()
    atoms.rattle(0.05, seed=3)
    atoms.calc = member()
    assert BFGS(atoms, logfile=None).run(fmax=1e-4, steps=100)
    return atoms


def test_bfgs_finds_ammonia(relaxed):
    assert np.linalg.norm(relaxed.get_forces(), axis=1).max() < 1e-4
    assert relaxed.get_distances(0, [1, 2, 3]) == pytest.approx(np.full(3, 1.03), abs=0.04)


def mirrored(atoms):
    """The mirror image at the plane of the hydrogen atoms: ammonia after its inversion."""
    image = atoms.copy()
    first, second, third = atoms.positions[1:]
    normal = np.cross(second - first, third - first)
    normal /= np.linalg.norm(normal)
    image.positions[0] -= 2 * np.dot(atoms.positions[0] - first, normal) * normal
    return image


def test_a_band_through_the_inversion_converges_and_is_symmetric(relaxed, member):
    images = [relaxed.copy(), relaxed.copy(), relaxed.copy(), relaxed.copy(), mirrored(relaxed)]
    for image in images:
        image.calc = member()
    band = NEB(images, method="improvedtangent")
    band.interpolate()
    assert FIRE(band, logfile=None).run(fmax=0.02, steps=300)  # BFGS needs forces of one potential
    energies = np.array([image.get_potential_energy() for image in images])
    assert energies == pytest.approx(energies[::-1], abs=5e-3)
    assert energies.argmax() == 2


def frequencies(atoms, displacement, folder):
    """In meV, of all 12 modes; imaginary ones negative."""
    vibrations = Vibrations(atoms, name=folder / f"vib-{displacement}", delta=displacement)
    vibrations.run()
    energies = 1e3 * vibrations.get_energies()
    return np.sort(energies.real - energies.imag)


def test_vibrations_converge_with_the_displacement(relaxed, tmp_path):
    coarse, fine = (frequencies(relaxed, delta, tmp_path) for delta in (0.01, 0.005))
    # 1.5 % here: norms of PaiNN's vectors bend within 1e-3 of zero, and members keep that
    assert fine[6:] == pytest.approx(coarse[6:], rel=0.03)
    assert np.abs(fine[:6]).max() < 10.0  # translations and rotations
    assert fine[6:].min() > 60.0
    assert fine[9:] == pytest.approx(np.full(3, 430.0), rel=0.1)  # stretching


def test_phonons_of_a_crystal_converge_with_the_displacement(tmp_path):
    """SchNet: at sites of inversion symmetry PaiNN's vectors vanish, and their norm has a kink."""
    torch.manual_seed(0)
    potential = blips.bayesianize(SchNet(cutoff=4.0, features=8, blocks=1)).double()
    found = []
    for delta in (0.02, 0.01, 0.005):
        calculator = blips.Calculator(potential, method="frozen")
        phonons = Phonons(
            bulk("Cu"), calculator, supercell=(2, 2, 2), delta=delta, name=tmp_path / f"ph{delta}"
        )
        phonons.run()
        phonons.read(acoustic=True)
        found.append(phonons.get_force_constant())
    coarse, medium, fine = found
    size = np.abs(fine).max()
    assert np.abs(medium - fine).max() < 1e-2 * size
    # Central differences: the error falls with the square of the displacement.
    assert np.abs(medium - fine).max() < 0.4 * np.abs(coarse - medium).max()
