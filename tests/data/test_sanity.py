"""Warnings of labels in another unit or of another sign: heard where they should be, only there."""

import os
import warnings
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.data import covalent_radii
from ase.neighborlist import neighbor_list

from blips.data import sanity
from blips.data.ammonia import load_ammonia
from blips.data.labels import Labels
from blips.data.sanity import screened_repulsion, suspicions, warn_of_labels
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


def close_pairs(sign: float = 1.0, unit: float = 1.0) -> list[Atoms]:
    """Different pairs of atoms that are very close, repelled by 0.3 of the ZBL potential."""
    found = []
    for k, name in enumerate(["NH", "OH", "CH", "CC", "CO"]):
        atoms = Atoms(name, [[0, 0, 0], [1, 1, 1]])
        length = (0.7 + 0.02 * k) * covalent_radii[atoms.numbers].sum()
        atoms.set_distance(0, 1, length)
        first, second = atoms.numbers[:, None]
        push = 0.3 * sign * unit * screened_repulsion(first, second, np.array([length]))
        forces = push * atoms.get_distance(0, 1, vector=True) / length
        atoms.calc = SinglePointCalculator(atoms, forces=np.array([-forces, forces]))
        found.append(atoms)
    return found


def test_close_contacts_tell_sign_and_unit_without_a_trajectory():
    assert suspicions(close_pairs()) == []
    assert any("pulled together" in text for text in suspicions(close_pairs(sign=-1.0)))
    assert any("more than their nuclei do:" in text for text in suspicions(close_pairs(unit=KCAL)))
    assert suspicions(close_pairs(sign=-1.0)[:3]) == []  # too few to say


def test_the_repulsion_of_nuclei_is_the_derivative_of_its_potential():
    """V = 14.4 eV A Z Z' / r phi(r / a), with the universal screening function phi."""
    first, second = np.array([14.0]), np.array([8.0])
    length = 0.4685 / (14.0**0.23 + 8.0**0.23)

    def potential(r: float) -> float:
        x = r / length
        terms = [(0.18175, 3.1998), (0.50986, 0.94229), (0.28022, 0.4029), (0.02817, 0.20162)]
        return 14.399645 * 112.0 / r * sum(c * np.exp(-d * x) for c, d in terms)

    for r in (0.2, 0.9, 1.6):
        expected = -(potential(r + 1e-5) - potential(r - 1e-5)) / 2e-5
        assert screened_repulsion(first, second, np.array([r]))[0] == pytest.approx(expected, 1e-6)


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
@pytest.mark.parametrize("name", ["acac/train_300K.xyz", "silica/valid_256.extxyz"])
def test_flipped_forces_and_kcal_of_public_data_are_noticed(name):
    structures = ase.io.read(DATA / name, ":200", format="extxyz")
    assert any("sign" in text for text in suspicions(relabelled(structures, forces=-1.0)))
    assert any("kcal/mol" in text for text in suspicions(relabelled(structures, KCAL, KCAL)))


@pytest.mark.parametrize("pbc", [True, False])
def test_close_pairs_are_those_of_ase(pbc: bool):
    atoms = bulk("NaCl", "rocksalt", a=2.4, cubic=True)
    atoms.rattle(0.3, seed=0)
    atoms.pbc = pbc
    i, j, between, length = neighbor_list(
        "ijDd", atoms, (sanity.CLOSE * covalent_radii[atoms.numbers]).tolist()
    )
    found = sanity._close_pairs(atoms)
    for expected, one in zip((i, j, between, length), found, strict=True):
        values, others = (np.sort(x[y], axis=0) for x, y in ((expected, i < j), (one, ...)))
        np.testing.assert_allclose(others, values, atol=1e-12)
    assert len(found[0]) > 10
