"""The rule that labels speak for: closed forms, made-up data on which a rule must win or lose."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import blips
from blips.active import auto
from blips.active.evidence import candidate_rows, labelled_rows
from blips.backbones import PaiNN
from helpers import TINY, morse_ammonia


def made_up(rare_matter, seed, structures=24, dimension=40):
    """Structures of one kind, and a few with large rows, which all rules but random pick.

    Where the rare matter, they share the direction in which the model errs. Else it is that of the
    common ones, and each of the rare has a direction of its own: their labels tell nothing.
    """
    rng = np.random.default_rng(seed)
    rows = 0.05 * rng.normal(size=(structures, 3, dimension))
    rare = np.arange(0, structures, 3)
    rows[rare, :, 0 if rare_matter else 2 + rare] += 30.0
    rows[np.delete(np.arange(structures), rare), :, 1] += 3.0
    weights = np.zeros(dimension)
    weights[0 if rare_matter else 1] = 1.0
    return rows, rows @ weights + 0.01 * rng.normal(size=rows.shape[:2])


def test_a_rule_that_finds_what_matters_beats_random():
    trials = [auto.trial(*made_up(True, seed), seed) for seed in range(3)]
    assert np.mean([trial["expected_reduction"] for trial in trials]) < -0.2
    assert auto.chosen_rule(trials) == "expected_reduction"


def test_random_wins_where_rules_look_at_what_does_not_matter():
    trials = [auto.trial(*made_up(False, seed), seed) for seed in range(3)]
    for rule in auto.RULES[:-1]:
        assert np.mean([trial[rule] for trial in trials]) > 0.2
    assert auto.chosen_rule(trials) == "random"


def test_in_doubt_it_is_the_first_rule():
    assert auto.chosen_rule([]) == "expected_reduction"
    assert auto.chosen_rule([{}, {}]) == "expected_reduction"
    slightly = {"expected_reduction": [0.1, -0.05], "information": [0.0, 0.1]}
    trial = slightly | {"force_std": [-0.3, 0.2], "random": [0.0, 0.0]}
    assert auto.chosen_rule([trial]) == "expected_reduction"
    better = trial | {"information": [-0.5, -0.6]}
    assert auto.chosen_rule([better]) == "information"


def test_more_rounds_have_less_noise():
    trial = {"expected_reduction": [0.3, -0.1], "information": [0.3, 0.5]}
    trial |= {"force_std": [0.5, 0.6], "random": [0.0, 0.0]}
    assert auto.chosen_rule([trial]) == "expected_reduction"  # 0.1 +- 0.2
    assert auto.chosen_rule([trial] * 5) == "random"  # 0.1 +- 0.09


def test_a_trial_depends_on_its_seed_alone_and_needs_six_labels():
    rows, residuals = made_up(True, 0)
    assert auto.trial(rows, residuals, 1) == auto.trial(rows, residuals, 1)
    assert auto.trial(rows, residuals, 1) != auto.trial(rows, residuals, 2)
    assert auto.trial(rows[:5], residuals[:5], 1) == {}
    assert set(auto.trial(rows[:6], residuals[:6], 1)) == set(auto.RULES)
    assert auto.trial(rows, 0 * residuals, 1) == {}


def test_the_step_is_the_posterior_mean():
    """Of v ~ N(0, I) given y = B v + noise of variance c, by the covariance of v itself."""
    rng = np.random.default_rng(0)
    rows, residuals = rng.normal(size=(6, 3, 5)), rng.normal(size=(6, 3))
    picks, targets = np.array([4, 1]), np.array([0, 3])
    known = rows[picks].reshape(-1, 5)
    precision = np.eye(5) + known.T @ known / auto.NOISE
    mean = np.linalg.solve(precision, known.T @ residuals[picks].ravel() / auto.NOISE)
    left = residuals[targets][:, 1:] - rows[targets][:, 1:] @ mean
    expected = np.log(np.abs(left).mean())
    assert_allclose(auto._log_error(rows, residuals, picks, targets), expected, rtol=1e-12)


@pytest.mark.parametrize("rows", [12, 4])
def test_rows_of_labels_come_with_what_the_mean_lacks(rows):
    """All components of ammonia's forces where rows allow it, else sums of them."""
    torch.manual_seed(0)
    potential = blips.bayesianize(PaiNN(**TINY), seed=0)
    potential.condition(morse_ammonia(6, seed=0), valid=morse_ammonia(4, seed=1))
    labelled = morse_ammonia(3, seed=2)
    found, lacking = labelled_rows(potential, labelled, rows=rows)
    assert_allclose(found, candidate_rows(potential, labelled, rows=rows))
    predicted = potential.predict(labelled, method="map")
    energies = [atoms.get_potential_energy() for atoms in labelled]
    assert_allclose(lacking[:, 0], energies - predicted.array("energy"), atol=1e-4)
    forces = np.stack([atoms.get_forces() for atoms in labelled])
    error = (forces - predicted.array("forces").reshape(forces.shape)).reshape(3, -1)
    if rows == 12:
        assert_allclose(lacking[:, 1:], error, atol=1e-4)
    else:  # u = +-1/2: each sum is one of the sums of +-error / 2
        signs = np.array(np.meshgrid(*[[-0.5, 0.5]] * 12)).reshape(12, -1)
        nearest = np.abs(lacking[:, 1:, None] - (error @ signs)[:, None]).min(axis=2)
        assert nearest.max() < 1e-4
        assert np.ptp(lacking[:, 1:], axis=1).min() > 1e-3
