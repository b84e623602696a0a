"""Warnings of labels in another unit or of another sign: heard where they should be, only there."""

import os
import re
import warnings
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.data import covalent_radii

from blips.data.ammonia import load_ammonia
from blips.data.labels import Labels
from blips.data.sanity import suspicions, warn_of_labels
from blips.units import ENERGY_UNITS

KCAL = 1 / ENERGY_UNITS["kcal/mol"]
DATA = Path(os.environ.get("BLIPS_DATA", "absent"))
FILES = sorted(DATA.glob("*/*.*xyz"))


def relabelled(structures: list[Atoms], energy: float = 1.0, forces: float = 1.0) -> list[Atoms]:
    found = []
    for atoms in structures:
        copy = atoms.copy()
        labels = {
            "energy": energy * atoms.get_potential_energy(),
            "forces": forces * atoms.get_forces(),
        }
        copy.calc = SinglePointCalculator(copy, **labels)
        found.append(copy)
    return found


@pytest.mark.parametrize("name", ["train", "valid", "test_ood"])
def test_the_shipped_labels_look_right(name):
    assert suspicions(load_ammonia(name)) == []


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ({"energy": KCAL, "forces": KCAL}, ["kcal/mol or kJ/mol"]),
        ({"forces": -1.0}, ["energies rise where", "wrong sign"]),
        (
            {"energy": 1 / ENERGY_UNITS["Hartree"], "forces": 1 / 51.42},
            ["Hartree or Ry"],
        ),
        ({"energy": KCAL}, ["are the energies in kcal/mol, the others in eV"]),
    ],
)
def test_other_units_and_signs_are_noticed(factors, words):
    found = suspicions(relabelled(load_ammonia("train"), **factors))
    for word in words:
        assert any(word in sentence for sentence in found), found


def test_units_that_are_said_are_right():
    structures = relabelled(load_ammonia("train"), KCAL, KCAL)
    assert suspicions(structures, Labels(energy_unit="kcal/mol")) == []
    with pytest.warns(UserWarning, match="look wrong: bonds have a stiffness of 66"):
        warn_of_labels(structures)


def test_few_or_unlabelled_structures_are_passed():
    structures = relabelled(load_ammonia("train"), forces=-1.0)
    assert suspicions([]) == []
    assert suspicions(structures[:5]) == []
    assert suspicions([atoms.copy() for atoms in structures]) == []


def springs(c: float) -> list[Atoms]:
    """Pairs of atoms of several kinds and lengths, with the stiffness c e^2 / (4 pi eps_0 l^3)."""
    found = []
    for k, name in enumerate(["NH", "OH", "CH", "CC", "CO"] * 8):
        atoms = Atoms(name, [[0, 0, 0], [1, 1, 1]])
        rest = covalent_radii[atoms.numbers].sum()
        atoms.set_distance(0, 1, (0.9 + 0.005 * k) * rest)
        vector = atoms.get_distance(0, 1, vector=True)
        push = c * 14.399645 / rest**3 * (rest / np.linalg.norm(vector) - 1) * vector
        atoms.calc = SinglePointCalculator(atoms, forces=np.array([-push, push]))
        found.append(atoms)
    return found


@pytest.mark.parametrize(
    ("c", "words"),
    [
        (-3.0, "forces of wrong sign"),
        (3.0 * KCAL, "stiffness of 69 .* kcal/mol or kJ/mol"),
        (3.0 / 51.42, r"stiffness of 0\.058 .* Hartree or Rydberg"),
    ],
)
def test_bonds_tell_sign_and_unit_without_a_trajectory(c, words):
    (found,) = suspicions(springs(c))
    assert re.search(words, found)
    assert suspicions(springs(c)[:7]) == []  # too few to say


@pytest.mark.parametrize("c", [1.0, 3.0, 10.0, 28.0])
def test_bonds_of_any_kind_look_right(c):
    assert suspicions(springs(c)) == []


def test_no_energy_lies_below_that_of_all_electrons():
    hydrogen = Atoms("H")
    hydrogen.calc = SinglePointCalculator(hydrogen, energy=-13.6)
    assert suspicions([hydrogen]) == []
    ammonia = molecule("NH3")
    for energy, unit in ((-56.5 * 27.2114, "eV"), (-56.5 * 627.5, "kcal/mol")):
        ammonia.calc = SinglePointCalculator(ammonia, energy=energy)
        assert suspicions([ammonia], Labels(energy_unit=unit)) == []
    (found,) = suspicions([ammonia])
    assert "is -3.545e+04 eV, and that of all its electrons above" in found


@pytest.mark.skipif(not FILES, reason="set BLIPS_DATA")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_public_data_set_raises_an_alarm(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        structures = ase.io.read(path, ":400", format="extxyz")
    assert suspicions(structures) == []


@pytest.mark.skipif(not FILES, reason="set BLIPS_DATA")
@pytest.mark.parametrize(
    "name", ["acac/train_300K.xyz", "silica/valid_256.extxyz", "mlearn/Si_train.extxyz"]
)
def test_flipped_forces_and_kcal_of_public_data_are_noticed(name):
    structures = ase.io.read(DATA / name, ":200", format="extxyz")
    assert any("sign" in text for text in suspicions(relabelled(structures, forces=-1.0)))
    assert any("kcal/mol" in text for text in suspicions(relabelled(structures, KCAL, KCAL)))
