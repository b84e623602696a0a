"""A prediction as text, table, structures and figure."""

import sys

import numpy as np
import pytest
from ase.build import bulk, molecule

import blips
from blips.errors import InputError, MissingPackageError

STRUCTURES = [molecule("H2O"), bulk("NaCl", "rocksalt", a=5.6), molecule("NH3")]


def prediction(**changes) -> blips.Prediction:
    sizes = np.array([len(atoms) for atoms in STRUCTURES])
    rng = np.random.default_rng(0)
    arrays = {
        "energy": np.array([-1.5, 2.0, 3.0]),
        "energy_std": np.array([3.0, 0.2, 0.3]),
        "energy_aleatoric_std": np.array([4.0, 0.0, 0.0]),
        "forces": rng.normal(size=(9, 3)),
        "forces_std": np.outer(1.0 + np.arange(9), [2.0, 1.0, 2.0]),  # norms 3, 6, 9, ...
    }
    return blips.Prediction(sizes, "mc", 8, **{**arrays, **changes})


def test_the_text_is_short_and_says_what_there_is():
    assert repr(prediction(forces_std=None)) == (
        "Prediction(3 structures, 9 atoms, method='mc', samples=8: energy ± std, forces)"
    )


def test_the_largest_std_of_a_force_is_that_of_an_atom():
    np.testing.assert_allclose(prediction().largest_force_std, [9.0, 15.0, 27.0])
    assert prediction(forces_std=None).largest_force_std is None


def test_a_notebook_shows_a_few_structures():
    page = prediction()._repr_html_()
    assert page.count("<tr>") == 4
    assert "<td>3</td><td>-1.5</td><td>5</td><td>9</td>" in page
    many = blips.Prediction(np.full(9, 1), "map", 0, energy=np.zeros(9))._repr_html_()
    assert "4 more" in many
    assert "±" not in many


def test_structures_carry_what_was_predicted():
    whole = prediction()
    labelled = [atoms.copy() for atoms in STRUCTURES]
    labelled[0].info |= {"energy": 99.0, "energy_uncertainty": 99.0, "name": "water"}
    first, second, _ = whole.to_atoms(labelled)
    assert first.get_potential_energy() == -1.5
    assert first.info == {"name": "water", "energy_uncertainty": 5.0}
    np.testing.assert_array_equal(second.get_forces(), whole.forces[3:5])
    np.testing.assert_array_equal(second.arrays["forces_uncertainty"], whole.forces_std[3:5])
    assert labelled[0].info["energy"] == 99.0


def test_results_are_of_one_structure():
    with pytest.raises(InputError, match="not of 3"):
        prediction().ase_results()


def test_a_table_has_a_row_for_each_structure():
    pytest.importorskip("pandas")
    table = prediction().to_dataframe()
    expected = ["n_atoms", "energy", "energy_uncertainty", "largest_force_uncertainty"]
    assert list(table.columns) == expected
    assert table.index.name == "structure"
    np.testing.assert_allclose(table.loc[0], [3, -1.5, 5.0, 9.0])


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackageError, match="pip install pandas"):
        prediction().to_dataframe()


def test_the_figure_has_a_point_for_each_atom():
    (axes,) = prediction().plot().axes
    (points,) = axes.lines
    np.testing.assert_allclose(points.get_ydata(), 3.0 * (1.0 + np.arange(9)))
    assert "eV/Å" in axes.get_ylabel()
    with pytest.raises(InputError, match="no forces_total_std"):
        prediction(forces_std=None).plot()
