import numpy as np
import pytest
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

from blips.prediction import Prediction
from studies.released.errorbars import measure_energies


def test_energies_are_judged_per_atom():
    sizes = np.array([1, 2, 4, 8])
    errors = np.array([0.1, 0.4, 0.4, 4.0])  # 0.1, 0.2, 0.1, 0.5 an atom
    stds = np.array([0.1, 0.2, 0.2, 1.6])  # 0.1, 0.1, 0.05, 0.2
    structures = [Atoms(f"H{size}") for size in sizes]
    for atoms, energy in zip(structures, -errors, strict=True):
        atoms.calc = SinglePointCalculator(atoms, energy=energy)
    given = {"energy": np.zeros(4), "energy_std": stds}
    prediction = Prediction(n_atoms=sizes, method="mc", samples=8, **given)
    found = {
        name: metric["value"] for name, metric in measure_energies(prediction, structures).items()
    }
    assert found["E MAE"] == pytest.approx(0.225)
    assert found["E within 90 %"] == 0.25  # 1 of 1.645 stds; 2, 2 and 2.5 are beyond
    assert found["rho E"] == pytest.approx(0.8333, abs=1e-3)
