import numpy as np
import pytest
from ase import Atoms, units
from ase.build import bulk, molecule
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from hypothesis import given
from hypothesis import strategies as st

from blips.data.labels import Labels, available, extract
from blips.errors import InputError
from blips.units import ENERGY_UNITS

STRESS = np.array([[1.0, 0.4, 0.5], [0.4, 2.0, 0.6], [0.5, 0.6, 3.0]])
VOIGT = np.array([1.0, 2.0, 3.0, 0.6, 0.5, 0.4])  # xx, yy, zz, yz, xz, xy


@pytest.fixture
def atoms() -> Atoms:
    atoms = molecule("H2O")
    forces = np.arange(9.0).reshape(3, 3)
    atoms.calc = SinglePointCalculator(atoms, energy=-3.0, forces=forces, stress=VOIGT)
    return atoms


def test_calculator_results_come_in_their_shapes(atoms):
    found = extract(atoms, ("energy", "forces", "stress"))
    assert found["energy"].shape == ()
    assert found["energy"] == -3.0
    np.testing.assert_array_equal(found["forces"], np.arange(9.0).reshape(3, 3))
    np.testing.assert_array_equal(found["stress"], STRESS)


@pytest.mark.parametrize("stored", [VOIGT, STRESS, STRESS.ravel(), STRESS.tolist()])
def test_every_form_of_stress_gives_the_same_matrix(stored):
    atoms = molecule("H2O")
    atoms.info["virial_like"] = stored
    found = extract(atoms, ("stress",), Labels(stress_key="virial_like"))
    np.testing.assert_array_equal(found["stress"], STRESS)


def test_info_and_arrays_are_searched_by_name():
    atoms = molecule("H2O")
    atoms.info["dft_energy"] = 7
    atoms.arrays["dft_forces"] = np.ones((3, 3))
    labels = Labels(energy_key="dft_energy", forces_key="dft_forces")
    assert available(atoms, labels) == ("energy", "forces")
    assert available(atoms) == ()
    assert extract(atoms, labels=labels)["energy"] == 7.0


@given(
    energy_unit=st.sampled_from(["eV", "kcal/mol", "Hartree"]),
    length_unit=st.sampled_from(["A", "Bohr"]),
)
def test_units_of_all_quantities_agree(energy_unit, length_unit):
    atoms = molecule("H2O")
    atoms.info |= {"energy": 1.0, "stress": np.eye(3)}
    atoms.arrays["forces"] = np.ones((3, 3))
    labels = Labels(energy_unit=energy_unit, length_unit=length_unit)
    found = extract(atoms, ("energy", "forces", "stress"), labels)
    length = {"A": 1.0, "Bohr": units.Bohr}[length_unit]
    energy = {"eV": 1.0, "kcal/mol": units.kcal / units.mol, "Hartree": units.Hartree}[energy_unit]
    assert found["energy"] == pytest.approx(energy)
    assert found["forces"][0, 0] == pytest.approx(energy / length)
    assert found["stress"][0, 0] == pytest.approx(energy / length**3)


def test_missing_label_names_what_is_there(atoms):
    atoms.info["topology"] = "SOD"
    with pytest.raises(InputError, match=r"energy, forces, stress.*topology.*Set energy_key"):
        extract(atoms, labels=Labels(energy_key="REF_energy"))
    with pytest.raises(InputError, match="no labels at all"):
        extract(molecule("H2O"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("energy", np.nan, "NaN"),
        ("energy", [1.0, 2.0], "one number"),
        ("energy", "high", "not numeric"),
        ("stress", np.ones(5), "6 "),
        ("forces", np.ones((2, 3)), "3 x 3"),
    ],
)
def test_unusable_labels_are_refused(key, value, message):
    atoms = molecule("H2O")
    atoms.info[key] = value
    with pytest.raises(InputError, match=message):
        extract(atoms, (key,))


def test_labels_of_moved_atoms_are_refused(atoms):
    atoms.positions += [[0.1, 0, 0], [0, 0, 0], [0, 0, 0]]
    with pytest.raises(InputError, match="positions changed"):
        extract(atoms)


def test_results_of_a_real_calculator_are_read():
    atoms = bulk("Cu", cubic=True)
    atoms.calc = EMT()
    energy = atoms.get_potential_energy()
    assert extract(atoms, ("energy",))["energy"] == energy


def test_unknown_units_and_quantities_are_refused():
    with pytest.raises(InputError, match="kcal/mol"):
        Labels(energy_unit="cal")
    with pytest.raises(InputError, match="unknown label 'dipole'"):
        extract(molecule("H2O"), ("dipole",))


@pytest.mark.parametrize(
    ("unit", "ev"),
    [("meV", 1e-3), ("kcal/mol", 0.0433641), ("kJ/mol", 0.0103643), ("Hartree", 27.2114),
     ("Ry", 13.6057)],
)  # fmt: skip
def test_units_of_energy_have_their_published_values(unit, ev):
    assert ENERGY_UNITS[unit] == pytest.approx(ev, rel=1e-5)
