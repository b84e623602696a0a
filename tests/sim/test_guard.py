"""Guards: what they object to."""

import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from ase.calculators.emt import EMT
from scipy.stats import norm

import blips
from blips.backbones import PaiNN
from blips.errors import InputError
from blips.sim.guard import Guard, std_for


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
    assert (
        Guard(force_std=1.01 * force_std, energy_std_per_atom=1.01 * energy_std).check(atoms) == []
    )
    findings = Guard(force_std=0.99 * force_std, energy_std_per_atom=0.99 * energy_std).check(atoms)
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
    assert [f.limit for f in Guard(force_std=0.1).check(atoms)] == ["geometry"]


def test_periodic_images_count():
    copper = bulk("Cu", a=3.6)
    assert Guard(closest=0.9, farthest=3.0).check(copper) == []
    assert [f.limit for f in Guard(closest=1.1).check(copper)] == ["closest"]


def test_a_limit_as_an_error_rate():
    std = std_for(0.5, 0.05)
    assert 2 * norm.sf(0.5 / std) == pytest.approx(0.05)
    with pytest.raises(InputError, match="between 0 and 1"):
        std_for(0.5, 1.5)


def test_errors_name_the_remedy():
    with pytest.raises(InputError, match="positive"):
        Guard(force_std=-1.0)
    with pytest.raises(InputError, match="less than"):
        Guard(farthest=10.0)
    copper = bulk("Cu")
    with pytest.raises(InputError, match=r"blips\.Calculator"):
        Guard(force_std=0.1).check(copper)
    copper.calc = EMT()
    with pytest.raises(InputError, match=r"blips\.Calculator"):
        Guard(force_std=0.1).check(copper)
