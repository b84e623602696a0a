"""Equation of state, elastic constants and relaxed energies against closed forms."""

import json

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from ase.constraints import FixAtoms
from ase.stress import voigt_6_to_full_3x3_strain
from ase.units import GPa

from blips import properties
from blips.errors import InputError
from blips.properties import Property, PropertyError
from blips.properties.calculation import Calculation
from blips.properties.elastic import energy_gradient, moduli
from blips.properties.eos import birch_murnaghan
from properties.models import DISTANCE, EPSILON, crystal, lennard_jones, relative_changes

MEMBERS = 8
TIGHT = {"members": MEMBERS, "fmax": 1e-7}
BOTH = pytest.mark.parametrize("method", ["linear", "members"])


@pytest.fixture(scope="module")
def potential():
    return lennard_jones()


def shifted(value, relative):
    """Values of members whose relative changes are these."""
    return value * (1 + relative)


@BOTH
def test_the_equation_of_state_has_the_scales_of_the_pair(potential, method):
    start = crystal()
    start.set_cell(start.cell * 1.01, scale_atoms=True)
    scales = np.linspace(0.99, 1.01, 5)
    found = properties.equation_of_state(potential, start, method=method, scales=scales, **TIGHT)
    dp, dq = relative_changes(potential, MEMBERS)
    volume, modulus = found["volume"], found["bulk_modulus"]
    assert volume.value == pytest.approx(crystal().cell.volume, rel=1e-5)
    np.testing.assert_allclose(volume.members, shifted(volume.value, (dp - dq) / 2), rtol=1e-5)
    expected = shifted(modulus.value, 2.5 * dq - 1.5 * dp)
    np.testing.assert_allclose(modulus.members, expected, rtol=1e-4)
    assert modulus.std == pytest.approx(
        modulus.value * np.sqrt(np.mean((2.5 * dq - 1.5 * dp) ** 2)), rel=2e-2
    )
    # B' of this pair does not depend on p and q.
    assert found["bulk_modulus_derivative"].std < 0.05
    assert not found.failures


@BOTH
def test_elastic_constants_have_the_scales_of_the_pair(potential, method):
    found = properties.elastic(potential, crystal(), method=method, strain=1e-3, **TIGHT)
    constants = found["elastic_constants"]
    c11, c12, c44 = constants.value[0, 0], constants.value[0, 1], constants.value[3, 3]
    assert [c12, c44] == pytest.approx([c11 / 2, c11 / 2], rel=1e-3)  # nearest neighbours of fcc
    energy_density = 12 * EPSILON / 2 * 72 / 9 / crystal().cell.volume * 4  # B = (E'' r^2) / 9 V
    assert found["bulk_modulus"].value == pytest.approx(energy_density / GPa, rel=1e-3)
    dp, dq = relative_changes(potential, MEMBERS)
    change = 2.5 * dq - 1.5 * dp
    near = 0.02 * np.abs(change).max()  # finite differences, and the second order of members
    for name in ("bulk_modulus", "shear_modulus"):
        np.testing.assert_allclose(found[name].members / found[name].value - 1, change, atol=near)
    of_constants = (constants.members - constants.value) / c11
    expected = change[:, None, None] * constants.value / c11
    np.testing.assert_allclose(of_constants, expected, atol=near)


def test_ions_that_move_under_strain_count_to_first_order():
    """Atoms of hcp are no centres of inversion: strain displaces them against each other."""
    quiet = lennard_jones(tau=1e-4)
    options = {"members": 4, "fmax": 1e-8, "strain": 2e-3}
    atoms = bulk("Mg", "hcp", a=DISTANCE, c=DISTANCE * np.sqrt(8 / 3))
    with pytest.warns(UserWarning, match="have no Mg"):
        linear = properties.elastic(quiet, atoms, **options)
    members = properties.elastic(quiet, atoms, method="members", **options)
    for name in ("bulk_modulus", "shear_modulus"):
        change = members[name].members - members[name].value
        np.testing.assert_allclose(
            linear[name].members - linear[name].value, change, atol=0.02 * np.abs(change).max()
        )


def test_a_relaxed_energy_errs_as_the_energy_at_the_relaxed_geometry(potential):
    start = crystal()
    start.rattle(0.02, seed=1)
    linear = properties.relax(potential, start, **TIGHT)
    members = properties.relax(potential, start, method="members", **TIGHT)
    dp, dq = relative_changes(potential, MEMBERS)
    energy = -4 * 6 * EPSILON
    assert linear["energy"].value == pytest.approx(energy, rel=1e-9)
    np.testing.assert_allclose(linear["energy"].members, shifted(energy, 2 * dq - dp), rtol=1e-9)
    fixed = members["energy_at_mean_geometry"].members
    np.testing.assert_allclose(fixed, linear["energy"].members, rtol=1e-9)
    # Relaxing lowers every member's energy, by the second order: E ~ q^2 / p.
    exact = energy * (1 + dq) ** 2 / (1 + dp)
    np.testing.assert_allclose(members["energy"].members, exact, rtol=1e-9)
    assert (members["energy"].members < fixed).all()
    np.testing.assert_allclose(
        members["volume"].members, crystal().cell.volume * ((1 + dp) / (1 + dq)) ** 0.5, rtol=1e-6
    )


def test_a_formation_energy_leaves_the_cell_of_a_slab_alone(potential):
    slab = crystal()
    slab.center(vacuum=5.0, axis=2)
    slab.pbc = (True, True, False)
    found = properties.formation_energy(potential, slab, {"Cu": -1.0}, members=2)
    fixed = properties.relax(potential, slab, cell=False, members=2)["energy"].value
    assert found["formation_energy"].value == pytest.approx(fixed / len(slab) + 1.0)


def test_the_energy_gradient_is_that_of_the_energy(potential):
    """By central differences of energies, at a strain that is not small."""
    surface, atoms = Calculation(potential).plain, crystal()
    voigt = np.array([0.02, -0.01, 0.015, 0.01, -0.02, 0.03])

    def at(strain):
        moved = atoms.copy()
        moved.set_cell(atoms.cell.array @ voigt_6_to_full_3x3_strain(strain), scale_atoms=True)
        return moved

    here = at(voigt)
    stress = surface([here], stress=True).array("stress")[0]
    steps = 1e-5 * np.eye(6)
    energies = surface([at(voigt + s) for s in (*steps, *-steps)]).array("energy")
    expected = (energies[:6] - energies[6:]) / 2e-5
    np.testing.assert_allclose(
        energy_gradient(stress, voigt, here.cell.volume), expected, atol=1e-7
    )


def test_moduli_of_an_isotropic_solid():
    bulk_modulus, shear = 100 * GPa, 40 * GPa
    c = np.zeros((6, 6))
    c[:3, :3] = bulk_modulus - 2 / 3 * shear
    c[range(3), range(3)] += 2 * shear
    c[range(3, 6), range(3, 6)] = shear
    found = moduli(c)
    assert found["bulk_modulus"] == pytest.approx(100)
    assert found["shear_modulus"] == pytest.approx(40)


def test_birch_murnaghan_finds_what_a_curve_was_made_of():
    volume, modulus, derivative = 40.0, 1.2, 4.7
    v = np.linspace(36, 44, 7)
    x = (volume / v) ** (2 / 3)
    energy = -3 + 9 * volume * modulus / 16 * (
        (x - 1) ** 3 * derivative + (x - 1) ** 2 * (6 - 4 * x)
    )
    found = birch_murnaghan(v, energy)
    assert found["volume"] == pytest.approx(volume)
    assert found["bulk_modulus"] == pytest.approx(modulus / GPa)
    assert found["bulk_modulus_derivative"] == pytest.approx(derivative)
    with pytest.raises(PropertyError, match="no minimum between"):
        birch_murnaghan(v, v)


def test_members_that_fail_are_named_and_the_rest_goes_on():
    """Noise of a third leaves some members with another shell, or without a minimum."""
    wild = lennard_jones(tau=0.3)
    found = properties.equation_of_state(wild, crystal(), method="members", members=8)
    assert found.failures
    assert len(found["volume"].members) == 8 - len(found.failures)
    number, why = next(iter(found.failures.items()))
    assert 0 <= number < 8
    assert "minimum" in why
    assert f"member {number} failed" in str(found)
    assert str(number) in found.to_dict()["failures"]


def test_a_structure_that_does_not_relax_is_refused(potential):
    start = crystal()
    start.rattle(0.1, seed=3)
    with pytest.raises(
        PropertyError, match=r"no minimum after 2 steps: a force of .* eV/A is left"
    ):
        properties.relax(potential, start, steps=2)


def test_bad_arguments_are_refused(potential):
    with pytest.raises(InputError, match="use one of linear, members"):
        properties.elastic(potential, crystal(), method="frozen")
    with pytest.raises(InputError, match="members is 1; expected 2 or more"):
        properties.elastic(potential, crystal(), members=1)
    with pytest.raises(InputError, match="periodic"):
        properties.elastic(potential, Atoms("Cu2", [[0, 0, 0], [2.5, 0, 0]]))
    with pytest.raises(InputError, match="at least 4"):
        properties.equation_of_state(potential, crystal(), scales=(0.99, 1.0, 1.01))
    potential = lennard_jones()
    potential.posterior = None
    with pytest.raises(InputError, match="posterior that has seen data"):
        properties.relax(potential, crystal())


def test_elements_without_data_are_warned_of(potential):
    with pytest.warns(UserWarning, match="have no Ag"):
        properties.relax(potential, crystal("Ag"), members=4)


def test_results_are_saved_scaled_and_drawn(potential, tmp_path):
    found = properties.equation_of_state(potential, crystal(), members=4)
    found.save(tmp_path / "found.json")
    saved = json.loads((tmp_path / "found.json").read_text())
    assert saved["quantities"]["volume"]["value"] == found["volume"].value
    assert len(saved["quantities"]["volume"]["members"]) == 4
    one = Property("k", 10.0, 3.0, np.array([7.0, 13.0]), "GPa")
    scaled = one.scaled(2.0, 0.8)
    assert (scaled.value, scaled.std) == (20.0, 10.0)  # (2 * 3)^2 + (0.8 * 10)^2
    assert str(one) == "k = 10 ± 3 GPa"
    figure = found.plot()
    assert len(figure.axes) == 4  # the curve and three numbers


def test_a_relaxation_with_fixed_atoms_is_saved_too(potential, tmp_path):
    atoms = crystal()
    atoms.rattle(0.05, seed=1)
    atoms.set_constraint(FixAtoms([0]))
    found = properties.relax(potential, atoms, cell=False, members=2)
    found.save(tmp_path / "found.json")
    saved = json.loads((tmp_path / "found.json").read_text())["details"]["structure"]
    assert saved["positions"][0] == atoms.positions[0].tolist()
    assert saved["positions"][1] != atoms.positions[1].tolist()


@BOTH
def test_errors_that_compound_and_reference_share_cancel(potential, method):
    """Copper from copper forms with no energy and no error, whatever the members say of both."""
    references = {"Cu": crystal()}
    found = properties.formation_energy(potential, crystal(), references, method=method, **TIGHT)
    alone = properties.formation_energy(potential, crystal(), {"Cu": 0.0}, method=method, **TIGHT)
    assert found["formation_energy"].value == pytest.approx(0.0, abs=1e-9)
    assert found["formation_energy"].std < 1e-9
    dp, dq = relative_changes(potential, MEMBERS)
    assert alone["formation_energy"].value == pytest.approx(-6 * EPSILON)
    exact = 2 * dq - dp if method == "linear" else (1 + dq) ** 2 / (1 + dp) - 1
    np.testing.assert_allclose(
        alone["formation_energy"].members, -6 * EPSILON * (1 + exact), rtol=1e-9
    )


def test_formation_energies_need_every_element(potential):
    with pytest.raises(InputError, match="no reference for Cu; give a structure or an energy"):
        properties.formation_energy(potential, crystal(), {"Ag": 0.0})
    with pytest.raises(InputError, match="the reference of Cu is Ag4"):
        properties.formation_energy(potential, crystal(), {"Cu": crystal("Ag")})
