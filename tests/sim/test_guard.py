"""Guards: what they object to."""

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.emt import EMT
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

import blips
from blips.backbones import PaiNN
from blips.errors import InputError
from blips.sim.guard import Guard, std_for

NORMALS = np.random.default_rng(0).normal(size=(100_000, 3))


@pytest.fixture(scope="module")
def calculator():
    torch.manual_seed(0)
    potential = blips.bayesianize(PaiNN(cutoff=4.0, features=16, blocks=2)).double()
    return blips.Calculator(potential, samples=8)


def test_limits_on_sigma_are_compared_with_the_calculators(calculator):
    atoms = molecule("NH3")
    atoms.calc = calculator
    force_std = np.linalg.norm(calculator.get_property("forces_uncertainty", atoms), axis=1).max()
    energy_std = calculator.get_property("energy_uncertainty", atoms) / 4
    assert Guard(high=1.01 * force_std, energy_std_per_atom=1.01 * energy_std).check(atoms) == []
    findings = Guard(high=0.99 * force_std, energy_std_per_atom=0.99 * energy_std).check(atoms)
    assert [finding.limit for finding in findings] == ["force_std", "energy_std_per_atom"]
    assert findings[0].value == pytest.approx(force_std)
    assert "eV/A on atom" in findings[0].text


def test_atoms_that_come_too_close_or_leave(calculator):
    atoms = molecule("NH3")
    atoms.positions[1] = atoms.positions[0] + [0.3, 0, 0]
    assert [f.limit for f in Guard().check(atoms)] == ["closest"]
    atoms = molecule("NH3")
    atoms.positions[1] += [4.0, 0, 0]
    assert Guard().check(atoms) == []
    assert [f.limit for f in Guard(farthest=2.5).check(atoms)] == ["farthest"]
    atoms.positions[0] = np.nan
    assert [f.limit for f in Guard(high=0.1).check(atoms)] == ["geometry"]


@pytest.mark.parametrize("method", ["auto", "map", "frozen"])
def test_atoms_outside_the_domain_stop(calculator, method):
    """Two H far closer than any bond, yet not as close as the limit of the geometry."""
    atoms = molecule("NH3")
    atoms.positions[3] = atoms.positions[1] + [0.3, 0, 0]
    atoms.calc = blips.Calculator(calculator.potential, method, samples=4)
    atoms.get_forces()
    (finding,) = Guard(high=1e9).check(atoms)
    assert (finding.limit, finding.value, finding.allowed) == ("domain", 2.0, 0.0)
    assert finding.stops
    assert "atom 1 (H)" in finding.text
    assert Guard().check(atoms) == []  # looks at the geometry alone
    atoms.positions[3] += [1.5, 0, 0]
    assert Guard(high=1e9).check(atoms) == []


def test_periodic_images_count():
    copper = bulk("Cu", a=3.6)
    assert Guard(closest=0.9, farthest=3.0).check(copper) == []
    assert [f.limit for f in Guard(closest=1.1).check(copper)] == ["closest"]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (0.19, []),
        (0.2, []),
        (0.21, [(0.2, False)]),
        (0.6, [(0.2, False)]),
        (0.61, [(0.6, True)]),
        (np.inf, [(0.6, True)]),
        (np.nan, [(0.6, True)]),
    ],
)
def test_two_thresholds(value, found):
    """Go on, save, stop; a std that is no number stops."""
    atoms = molecule("NH3")
    forces_std = np.zeros((4, 3))
    forces_std[2, 1] = value
    results = {"forces_uncertainty": forces_std, "energy_uncertainty": 0.0}
    findings = Guard(low=0.2, high=0.6).check_std(atoms, results)
    assert [(finding.allowed, finding.stops) for finding in findings] == found


@pytest.mark.parametrize("guard", [Guard(low=0.2), Guard(high=0.2), Guard(energy_std_per_atom=1.0)])
def test_a_std_that_is_no_number_stops_whatever_limit_is_set(guard):
    results = {"forces_uncertainty": np.full((4, 3), np.nan), "energy_uncertainty": np.nan}
    (finding,) = guard.check_std(molecule("NH3"), results)
    assert finding.stops


@settings(max_examples=30, deadline=None)
@given(rate=st.floats(0.001, 0.2), weights=st.lists(st.floats(0.01, 1), min_size=3, max_size=3))
def test_no_direction_of_the_error_exceeds_the_rate(rate, weights):
    """With components of any proportion, fewer atoms err by more than `error` than the rate says.

    |e|^2 is a weighted sum of three chi^2 variables; here by many normal draws.
    """
    share = np.array(weights) / np.sum(weights)
    components = NORMALS * np.sqrt(share) * std_for(0.5, rate)
    exceeding = (np.linalg.norm(components, axis=1) > 0.5).mean()
    assert exceeding <= rate + 4 * np.sqrt(rate / len(NORMALS))


def test_both_thresholds_as_error_rates():
    guard = Guard.by_error_rate(0.5, low=0.01, high=0.1, farthest=3.0)
    assert (guard.low, guard.high, guard.farthest) == (std_for(0.5, 0.01), std_for(0.5, 0.1), 3.0)
    with pytest.raises(InputError, match="low < high"):
        Guard.by_error_rate(0.5, low=0.1, high=0.01)


def test_a_limit_as_an_error_rate():
    std = std_for(0.5, 0.05)
    assert 2 * norm.sf(0.5 / std) == pytest.approx(0.05)
    with pytest.raises(InputError, match="between 0 and 1"):
        std_for(0.5, 1.5)


def test_errors_name_the_remedy():
    with pytest.raises(InputError, match="positive"):
        Guard(high=-1.0)
    with pytest.raises(InputError, match="less than"):
        Guard(farthest=10.0)
    copper = bulk("Cu")
    with pytest.raises(InputError, match=r"blips\.Calculator"):
        Guard(high=0.1).check(copper)
    copper.calc = EMT()
    with pytest.raises(InputError, match=r"blips\.Calculator"):
        Guard(high=0.1).check(copper)


def test_the_limit_of_leaving_atoms_holds_by_itself_and_for_two_atoms_or_more():
    guard = Guard(closest=None, farthest=3.0)
    assert guard.check_geometry(Atoms("Cu")) == []
    (left,) = guard.check_geometry(Atoms("Cu2", [[0, 0, 0], [0, 0, 5.0]]))
    assert left.limit == "farthest"
    assert Guard(closest=None).check_geometry(Atoms("Cu2", [[0, 0, 0], [0, 0, 0.1]])) == []


def test_findings_of_the_geometry_allow_nothing_and_neighbours_count_from_both_sides():
    atoms = molecule("H2O")
    assert Guard(farthest=2.0).check_geometry(atoms) == []
    atoms.positions[0] = np.nan
    (exploded,) = Guard().check_geometry(atoms)
    assert np.isnan(exploded.value)
    assert (exploded.allowed, exploded.stops) == (0.0, True)
    flat = Atoms("Cu2", [[0, 0, 0], [0, 0, 2.0]], cell=[1e-9, 1e-9, 1e-9], pbc=True)
    (impossible,) = Guard().check_geometry(flat)
    assert (impossible.limit, impossible.value, impossible.allowed) == ("geometry", np.inf, 0.0)
