import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule
from hypothesis import given
from hypothesis import strategies as st

from blips.backbones.base import ReferenceEnergies
from blips.data.labels import Labels
from blips.train.references import fit_reference_energies

MOLECULES = ("H2O", "CH4", "NH3", "CO2", "CH3OH", "N2", "H2")
TRUE = {1: -13.6, 6: -1030.0, 7: -1480.0, 8: -2040.0}


def labelled(names=MOLECULES, energies=TRUE) -> list[Atoms]:
    frames = []
    for name in names:
        atoms = molecule(name)
        atoms.info["energy"] = sum(energies[z] for z in atoms.numbers.tolist())
        frames.append(atoms)
    return frames


@given(st.lists(st.floats(-3000, 0), min_size=4, max_size=4))
def test_sums_of_atomic_energies_are_recovered(values):
    energies = dict(zip(TRUE, values, strict=True))
    fitted = fit_reference_energies(labelled(energies=energies))
    assert list(fitted) == [1, 6, 7, 8]
    assert fitted == pytest.approx(energies, abs=1e-7)


def test_one_stoichiometry_takes_the_least_norm():
    water = labelled(["H2O"] * 3, {1: -1.0, 8: -3.0})  # 2 h + o = -5
    assert fit_reference_energies(water) == pytest.approx({1: -2.0, 8: -1.0})


def test_residual_is_orthogonal_to_every_composition():
    frames = labelled()
    rng = np.random.default_rng(0)
    for atoms in frames:
        atoms.info["energy"] += rng.normal()
    fitted = fit_reference_energies(frames)
    rest = [a.info["energy"] - sum(fitted[z] for z in a.numbers.tolist()) for a in frames]
    for number in fitted:
        counts = [np.count_nonzero(atoms.numbers == number) for atoms in frames]
        assert np.dot(rest, counts) == pytest.approx(0, abs=1e-8)


def test_units_are_those_of_the_labels():
    fitted = fit_reference_energies(labelled(), labels=Labels(energy_unit="meV"))
    assert fitted == pytest.approx({z: energy / 1000 for z, energy in TRUE.items()})


def test_reference_energies_take_the_fit():
    module = ReferenceEnergies()
    frames = labelled()
    module.set(fit_reference_energies(frames))
    numbers = torch.as_tensor(frames[0].numbers)
    total = module(torch.zeros(3), numbers).sum()
    assert float(total) == pytest.approx(frames[0].info["energy"], rel=1e-6)
