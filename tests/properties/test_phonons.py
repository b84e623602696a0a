"""Phonons against closed forms of the nearest-neighbour crystal, and CHGNet's."""

import warnings

import numpy as np
import pytest
from ase.build import bulk
from ase.units import _amu, _e

from blips import load, properties
from blips.errors import InputError
from properties.models import DISTANCE, EPSILON, lennard_jones, relative_changes

pytest.importorskip("phonopy")
MEMBERS = 4
TEMPERATURES = (195.0, 200.0, 205.0, 2000.0)
OPTIONS = {
    "members": MEMBERS,
    "temperatures": TEMPERATURES,
    "fmax": 1e-7,
    "length": 7.0,
    "displacement": 1e-3,
}
PRIMITIVE = bulk("Cu", "fcc", a=DISTANCE * np.sqrt(2))


@pytest.fixture(scope="module")
def potential():
    return lennard_jones(tau=1e-4)


@pytest.mark.parametrize("method", ["linear", "members"])
def test_frequencies_have_the_scales_of_the_pair(potential, method):
    """m w^2 = 8 k at X, longitudinal; w ~ sqrt(energy / r0^2) ~ q^(7/6) p^(-2/3)."""
    found = properties.phonons(potential, PRIMITIVE, method=method, **OPTIONS)
    at_x = np.linalg.norm(found.details["wave_vectors"] - [0.5, 0, 0.5], axis=1).argmin()
    highest = found["bands"].value[at_x, -1]
    stiffness = 8 * 72 * EPSILON / DISTANCE**2 * _e * 1e20  # J/m^2
    expected = np.sqrt(stiffness / (PRIMITIVE.get_masses()[0] * _amu)) / (2 * np.pi) / 1e12
    assert highest == pytest.approx(expected, rel=1e-3)
    dp, dq = relative_changes(potential, MEMBERS)
    change = 7 / 6 * dq - 2 / 3 * dp
    np.testing.assert_allclose(
        found["bands"].members[:, at_x, -1] / highest - 1, change, atol=0.03 * np.abs(change).max()
    )
    # All frequencies have one scale, so that C(T; w) = C(T / w): dC = -T dC/dT dw/w.
    heat = found["heat_capacity"]
    slope = (heat.value[2] - heat.value[0]) / 10.0
    expected = -change * TEMPERATURES[1] * slope
    np.testing.assert_allclose(
        heat.members[:, 1] - heat.value[1], expected, atol=0.05 * np.abs(expected).max()
    )
    assert heat.value[-1] == pytest.approx(3 * 8.314, rel=0.01)  # Dulong and Petit
    assert not found.failures
    assert "notes" not in found.details


def test_imaginary_modes_are_noted_and_leave_the_rest(potential):
    """Pairs alone do not hold bcc."""
    found = properties.phonons(potential, bulk("Cu", "bcc", a=2.8), **{**OPTIONS, "fmax": 1e-5})
    assert found.details["lowest_frequency"] < -1
    assert "imaginary modes, the lowest at -2" in str(found)
    assert np.isfinite(found["heat_capacity"].std).all()


def test_isotopes_count(potential):
    heavy = PRIMITIVE.copy()
    heavy.set_masses(4 * PRIMITIVE.get_masses())
    plain, slow = (properties.phonons(potential, a, **OPTIONS)["bands"] for a in (PRIMITIVE, heavy))
    assert slow.value == pytest.approx(plain.value / 2, rel=1e-3, abs=1e-3)


def test_phonons_need_a_crystal(potential):
    molecule = PRIMITIVE.copy()
    molecule.pbc = False
    with pytest.raises(InputError, match="periodic"):
        properties.phonons(potential, molecule)


def test_released_model():
    pytest.importorskip("chgnet.model", reason="chgnet is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chgnet = load("chgnet")
        found = properties.phonons(
            chgnet, bulk("NaCl", "rocksalt", a=5.64), length=5.0, members=4, temperatures=(300.0,)
        )
    assert found["heat_capacity"].value[0] == pytest.approx(49, rel=0.05)  # near 6 R
    assert 0 < found["heat_capacity"].std[0] < 5
    assert len(found.plot().axes) >= 2
