"""Selection on closed forms."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from ase.build import molecule
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

import blips
from blips.active.acquisition import (
    best,
    greedy_diverse,
    greedy_information,
    random_score,
    structure_scores,
)
from blips.active.frames import to_json
from blips.active.select import structure_features
from blips.active.worker import file_digest, member_deviations
from blips.backbones import PaiNN
from blips.errors import InputError
from blips.train.checkpoint import save
from helpers import TINY


def test_scores_of_two_structures():
    forces_std = np.array([[3.0, 0, 4.0], [0, 1.0, 0], [2.0, 0, 0]])
    scores = structure_scores(
        np.array([2, 1]), np.array([0.4, 0.3]), forces_std, np.full((3, 3), 2.0)
    )
    assert_allclose(scores["energy_std"], [0.2, 0.3])
    assert_allclose(scores["force_std_max"], [5.0, 2.0])
    assert_allclose(scores["force_std_mean"], [3.0, 2.0])
    assert_allclose(scores["force_max"], np.sqrt(12.0))


def test_best_takes_the_first_of_equals():
    assert [c.index for c in best(np.array([1.0, 3.0, 3.0, 2.0]), 3)] == [1, 2, 3]


def test_random_scores_depend_on_seed_round_and_index_alone():
    assert random_score(0, 1, 2) == random_score(0, 1, 2)
    numbers = {random_score(s, r, i) for s in range(3) for r in range(3) for i in range(3)}
    assert len(numbers) == 27


def test_diverse_choice_skips_a_copy_of_what_it_has():
    scores = np.array([1.0, 0.99, 0.5])
    features = np.array([[0.0], [0.0], [10.0]])
    chosen = greedy_diverse(scores, features, 3)
    assert [c.index for c in chosen] == [0, 2, 1]
    correlation = np.exp(-0.5)  # at the median distance
    assert_allclose(chosen[1].gain, 0.5 * np.sqrt(1 - correlation**2))
    assert chosen[2].gain < 1e-3  # explained by it


def test_diverse_choice_of_unlike_candidates_is_by_score():
    features = 1e3 * np.eye(4)  # all pairs at the same distance: one correlation for all
    assert [c.index for c in greedy_diverse(np.array([1.0, 4.0, 3.0, 2.0]), features, 4)] == [
        1,
        2,
        3,
        0,
    ]


@given(st.integers(0, 1000), st.integers(2, 6), st.integers(1, 5))
def test_information_adds_up_to_the_joint_determinant(seed, members, count):
    rng = np.random.default_rng(seed)
    deviations = []
    for _ in range(6):
        samples = rng.normal(size=(members, rng.integers(1, 9)))
        deviations.append(samples - samples.mean(0))
    chosen = greedy_information(deviations, count)
    joint = np.concatenate([deviations[c.index] for c in chosen], axis=1)
    covariance = joint.T @ joint / (members - 1)  # of all outputs of the batch
    expected = 0.5 * np.linalg.slogdet(np.eye(len(covariance)) + covariance)[1]
    assert_allclose(sum(c.gain for c in chosen), expected, rtol=1e-9)
    gains = [c.gain for c in chosen]
    assert all(a >= b - 1e-12 for a, b in pairwise(gains))  # submodular


def test_information_is_of_energies_and_forces_in_units_of_their_noise(tmp_path):
    torch.manual_seed(0)
    potential = blips.bayesianize(PaiNN(**TINY))
    path = tmp_path / "model.safetensors"
    save(potential, path)
    structures = [molecule("NH3"), molecule("H2O")]
    job = {"model": str(path), "digest": file_digest(path), "samples": 3, "seed": 1}
    job |= {"structures": [to_json(a) for a in structures], "energy_noise": 0.1, "force_noise": 2.0}
    found = member_deviations(job)
    assert [a.shape for a in found] == [(3, 1 + 12), (3, 1 + 9)]
    members = potential.draw(3, seed=1)
    energies = np.array([m.predict(structures).array("energy")[1] / 3 for m in members])
    forces = np.array([m.predict(structures).array("forces")[4:] for m in members]).reshape(3, -1)
    expected = np.column_stack([energies / 0.1, forces / 2.0])
    assert_allclose(found[1], expected - expected.mean(0), rtol=1e-4, atol=1e-6)


def test_information_needs_two_members():
    with pytest.raises(InputError, match="at least 2 members"):
        greedy_information([np.zeros((1, 3))], 1)


@given(st.integers(0, 100))
def test_features_are_invariant(seed):
    rng = np.random.default_rng(seed)
    atoms = molecule("CH3CH2OH")
    atoms.positions += rng.normal(scale=0.1, size=(len(atoms), 3))
    moved = atoms[rng.permutation(len(atoms))]
    moved.rotate(float(rng.uniform(0, 360)), rng.normal(size=3))
    moved.translate(rng.normal(size=3))
    other = atoms.copy()
    other.positions[0] += 0.5
    features = structure_features([atoms, moved, other])
    assert_allclose(features[0], features[1], atol=1e-10)
    assert np.abs(features[0] - features[2]).max() > 0.01
