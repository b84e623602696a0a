"""Warnings of labels in another unit or of another sign: heard where they should be, only there."""

import os
import warnings
from pathlib import Path

import ase.io
import pytest
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

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
    with pytest.warns(UserWarning, match="look wrong: H-N bonds have a stiffness of"):
        warn_of_labels(structures)


def test_few_or_unlabelled_structures_are_passed():
    structures = relabelled(load_ammonia("train"), forces=-1.0)
    assert suspicions([]) == []
    assert suspicions(structures[:5]) == []
    assert suspicions([atoms.copy() for atoms in structures]) == []


@pytest.mark.skipif(not FILES, reason="set BLIPS_DATA")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_public_data_set_raises_an_alarm(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        structures = ase.io.read(path, ":400", format="extxyz")
    assert suspicions(structures) == []


@pytest.mark.skipif(not FILES, reason="set BLIPS_DATA")
@pytest.mark.parametrize("name", ["acac/train_300K.xyz", "silica/valid_256.extxyz"])
def test_flipped_forces_and_kcal_of_public_data_are_noticed(name):
    structures = ase.io.read(DATA / name, ":200", format="extxyz")
    assert any("sign" in text for text in suspicions(relabelled(structures, forces=-1.0)))
    assert any("kcal/mol" in text for text in suspicions(relabelled(structures, KCAL, KCAL)))
