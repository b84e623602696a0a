"""Atoms that no model can know anything about are flagged, in every output."""

import warnings

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from hypothesis import given
from hypothesis import strategies as st

import blips
from blips.backbones import PaiNN
from blips.data.graph import AtomGraph
from blips.inference.domain import BOND, BONDED, FARTHER, MARGIN, Domain
from helpers import rattled_molecules
from inference.models import labelled

TRAIN = rattled_molecules(5, 0.05)
CLOSE = Atoms("H2", [[0, 0, 0], [0.11, 0, 0]])


def graph(atoms: Atoms | list[Atoms]) -> AtomGraph:
    several = [atoms] if isinstance(atoms, Atoms) else atoms
    return AtomGraph.batch([AtomGraph.from_atoms(one, 5.0, torch.float64) for one in several])


@pytest.fixture(scope="module")
def potential() -> blips.BayesianPotential:
    torch.manual_seed(0)
    found = blips.bayesianize(PaiNN(features=8, blocks=1).double())
    found.condition(TRAIN, valid=labelled(rattled_molecules(4, 0.1, first=20)))
    return found


def test_least_distances_of_each_pair_of_elements():
    domain = Domain.of(graph([molecule("H2O"), molecule("CH4")]))
    assert domain.numbers == {1, 6, 8}
    for atoms, pair in ((molecule("H2O"), (1, 8)), (molecule("CH4"), (6, 1))):
        expected = atoms.get_distance(0, 1)
        assert float(domain.least[pair]) == pytest.approx(expected, rel=1e-6)
        assert float(domain.least[pair[::-1]]) == pytest.approx(expected, rel=1e-6)
    assert not domain.least[6, 8].isfinite()
    water = [molecule("H2O").get_distance(1, 2), molecule("CH4").get_distance(1, 2)]
    assert float(domain.least[1, 1]) == pytest.approx(min(water), rel=1e-6)


@given(st.floats(0.3, 3.0))
def test_a_pair_is_outside_below_the_margin(distance: float):
    domain = Domain.from_dict([1], {"1-1": 1.0})
    inside = domain.contains(graph(Atoms("H2", [[0, 0, 0], [distance, 0, 0]])))
    assert inside.tolist() == [distance >= MARGIN] * 2


def test_only_the_atoms_that_are_too_close_are_outside():
    atoms = Atoms("HHHO", [[0, 0, 0], [0.4, 0, 0], [2, 0, 0], [4, 0, 0]])
    domain = Domain.from_dict([1], {"1-1": 0.7})
    assert domain.contains(graph(atoms)).tolist() == [False, False, True, False]  # no O was seen


def test_periodic_images_count():
    domain = Domain.from_dict([14], {"14-14": 2.35})
    crystal = bulk("Si")
    assert domain.contains(graph(crystal)).all()
    crystal.set_cell(0.6 * crystal.cell.array, scale_atoms=True)
    assert not domain.contains(graph(crystal)).any()


def test_covalent_radii_stand_in_for_pairs_that_were_not_seen():
    for distance, expected in ((0.62 * BONDED - 0.01, False), (0.62 * BONDED + 0.01, True)):
        pair = graph(Atoms("H2", [[0, 0, 0], [distance, 0, 0]]))  # ASE's radius of H: 0.31 A
        assert Domain().contains(pair).tolist() == [expected] * 2


def test_the_loneliest_atom_of_each_element():
    far = Atoms("OHH", [[0, 0, 0], [1.5, 0, 0], [0, 1.6, 0]])
    domain = Domain.of(graph([molecule("H2O"), far, Atoms("N")]))
    assert float(domain.farthest[1]) == pytest.approx(1.6)
    assert float(domain.farthest[8]) == pytest.approx(1.5)
    assert domain.farthest[7].isinf()  # it had no neighbour, and may have none
    assert domain.contains(graph(Atoms("N"))).all()


@given(st.floats(0.4, 4.5))
def test_an_atom_is_outside_if_its_nearest_neighbour_is_too_far(distance: float):
    atoms = graph(Atoms("H2", [[0, 0, 0], [distance, 0, 0]]))
    assert Domain.from_dict([1], {"1": 2.0}).contains(atoms).all() == (distance <= 2.0 * FARTHER)
    near = Domain.from_dict([1], {"1": 0.1})  # a bond is not too far, whatever was seen
    assert near.contains(atoms).all() == (distance <= BOND * 0.31)


def test_lone_atoms_are_outside_unless_such_were_seen():
    single = graph([Atoms("H"), molecule("H2")])
    assert Domain.of(graph(molecule("H2"))).contains(single).tolist() == [False, True, True]
    assert Domain.of(single).contains(single).all()


def test_what_was_seen_later_widens_the_domain():
    first = Domain.from_dict([1], {"1-1": 1.0, "1": 1.5})
    second = Domain.from_dict([8], {"1-1": 0.5, "8": 2.0})
    both = Domain.joined([first, second])
    assert both.numbers == {1, 8}
    assert float(both.least[1, 1]) == 0.5
    assert both.to_dict() == {"1-1": 0.5, "1": 1.5, "8": 2.0}
    assert Domain.from_dict(both.numbers, both.to_dict()).to_dict() == both.to_dict()
    wider = Domain.joined([both, Domain.from_dict([1], {"1": 1.7})])
    assert wider.to_dict()["1"] == pytest.approx(1.7)


@pytest.mark.parametrize("method", ["auto", "onepass", "mc", "map"])
def test_predictions_flag_atoms_that_are_too_close(potential, method: str):
    structures = [molecule("NH3"), CLOSE]
    found = potential.predict(structures, method=method, samples=2)
    assert found.in_domain.tolist() == [True] * 4 + [False] * 2
    assert found.structure_in_domain.tolist() == [True, False]
    assert found[1].in_domain.tolist() == [False, False]
    assert found.summary()["in_domain"] == [True, False]


def test_models_that_have_seen_nothing_flag_them_too():
    torch.manual_seed(0)
    found = blips.bayesianize(PaiNN(features=8, blocks=1)).predict(CLOSE, samples=2)
    assert not found.in_domain.any()


def test_unknown_elements_are_outside(potential):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are none
        found = potential.predict(molecule("SH2"))
    assert found.in_domain.tolist() == [False, True, True]


def test_files_and_ase_have_the_flag(potential, tmp_path):
    structures = [molecule("NH3"), CLOSE]
    prediction = potential.predict(structures)
    ase.io.write(tmp_path / "out.extxyz", prediction.to_atoms(structures))
    back = ase.io.read(tmp_path / "out.extxyz", ":")
    assert [atoms.arrays["in_domain"].tolist() for atoms in back] == [[True] * 4, [False] * 2]
    assert not prediction[1].ase_results()["in_domain"].any()


def test_checkpoints_keep_the_domain(potential, tmp_path):
    blips.save(potential, tmp_path / "model.safetensors")
    again = blips.load(tmp_path / "model.safetensors")
    domain, expected = again.posterior.domain, potential.posterior.domain
    assert domain.numbers == expected.numbers
    np.testing.assert_array_equal(domain.least, expected.least)
    assert domain.least[1, 7].isfinite()
