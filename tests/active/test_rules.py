"""Selection in closed form: against determinants, conditioning, plain greedy choice."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from ase.build import molecule
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

import blips
from blips.active.evidence import candidate_rows, whitened
from blips.active.rules import (
    best,
    expected_reduction,
    greedy,
    information,
    random_score,
    target_rows,
)
from blips.backbones import PaiNN
from blips.bayes.condition import Evidence
from blips.inference.linearise import LinearModel
from helpers import TINY

SEEDS = st.integers(0, 10_000)


def random_rows(seed, candidates=12, rows=3, dimension=7):
    """Rows of very different sizes, some of them alike."""
    rng = np.random.default_rng(seed)
    found = rng.normal(size=(candidates, rows, dimension)) * rng.lognormal(size=(candidates, 1, 1))
    found[1::4] = found[0::4][: len(found[1::4])] + 1e-3 * found[1::4]
    return found


def spectrum_of(rows):
    evidence = Evidence(rows.shape[1])
    evidence.add(torch.as_tensor(rows))
    return evidence.spectrum()


def test_best_takes_the_first_of_equals():
    assert [index for index, _ in best(np.array([1.0, 3.0, 3.0, 2.0]), 3)] == [1, 2, 3]


def test_random_scores_depend_on_seed_round_and_index_alone():
    assert random_score(0, 1, 2) == random_score(0, 1, 2)
    numbers = {random_score(s, r, i) for s in range(3) for r in range(3) for i in range(3)}
    assert len(numbers) == 27


@given(SEEDS, st.sampled_from([1e-3, 0.3, 10.0]), st.sampled_from([0.2, 3.0]))
def test_information_of_a_linear_model_is_the_drop_of_its_entropy(seed, ratio, scale):
    """Entropy of weights 1/2 log det Lambda^-1, before and after the labels of a candidate."""
    rng = np.random.default_rng(seed)
    known, new = rng.normal(size=(4, 6)), rng.normal(size=(3, 6))
    noise_var = ratio * scale**2
    before = np.eye(6) / scale**2 + known.T @ known / noise_var
    after = before + new.T @ new / noise_var
    expected = 0.5 * (np.linalg.slogdet(after)[1] - np.linalg.slogdet(before)[1])
    rows = whitened(spectrum_of(known), ratio, torch.as_tensor(new))
    assert_allclose(information(rows[None]), [expected], rtol=1e-8)


@given(SEEDS)
def test_expected_reduction_is_what_conditioning_takes_off(seed):
    rng = np.random.default_rng(seed)
    known, new, target = (rng.normal(size=(n, 6)) for n in (3, 2, 5))
    ratio, scale = 0.2, 1.7
    spectra = [spectrum_of(rows) for rows in (known, np.concatenate([known, new]))]
    before, after = (one.var(torch.as_tensor(target), ratio, scale) for one in spectra)
    expected = (before - after).sum()
    white = [whitened(spectra[0], ratio, torch.as_tensor(rows)) for rows in (new, target)]
    found = expected_reduction(white[0][None], white[1]) * ratio * scale**2
    assert_allclose(found, [float(expected)], rtol=1e-8)


@given(SEEDS, st.floats(1e-6, 1e6))
def test_a_gain_is_the_share_of_the_forces_variance_and_that_of_the_energies(seed, unit):
    """Whatever the unit of energies: a label that decides everything takes both off."""
    rng = np.random.default_rng(seed)
    forces, energies = rng.normal(size=(5, 4)), rng.normal(size=(3, 4))
    target, label = target_rows(forces, unit * energies), rng.normal(size=(1, 2, 4))
    shares = [
        expected_reduction(label, part)[0] / np.square(part).sum() for part in (forces, energies)
    ]
    assert_allclose(expected_reduction(label, target), [sum(shares)], rtol=1e-9)
    assert_allclose(expected_reduction(1e6 * np.eye(4)[None], target), [2.0], rtol=1e-9)
    nothing = target_rows(np.zeros((2, 4)), np.zeros((0, 4)))
    assert expected_reduction(label, nothing) == [0.0]


@given(SEEDS, st.integers(1, 12))
def test_gains_add_up_to_the_joint_determinant_and_fall(seed, count):
    rows = random_rows(seed)
    chosen = greedy("information", rows, count)
    joint = np.concatenate([rows[index] for index, _ in chosen])
    expected = 0.5 * np.linalg.slogdet(np.eye(len(joint)) + joint @ joint.T)[1]
    assert_allclose(sum(gain for _, gain in chosen), expected, rtol=1e-8)
    assert all(a >= b - 1e-9 for (_, a), (_, b) in pairwise(chosen))


@given(SEEDS)
def test_information_is_submodular(seed):
    """A label tells no more to a model that knows more."""
    rows = random_rows(seed, candidates=5)

    def joint(*numbers):
        whole = np.concatenate([rows[n] for n in numbers])
        return information(whole[None])[0]

    less = joint(0, 4) - joint(0)
    more = joint(0, 1, 2, 4) - joint(0, 1, 2)
    assert more <= less + 1e-9
    assert more >= -1e-9


@given(SEEDS)
def test_each_pick_is_the_best_given_those_before(seed):
    """By determinants and variances that know nothing of the updates."""
    rows, target = random_rows(seed), random_rows(seed + 1, candidates=2).reshape(-1, 7)
    chosen = greedy("expected_reduction", rows, 4, target=target)
    picked = np.zeros((0, 7))

    def left(extra):
        precision = np.eye(7) + picked.T @ picked + extra.T @ extra
        return np.trace(target @ np.linalg.solve(precision, target.T))

    for index, gain in chosen:
        before = left(np.zeros((0, 7)))
        reductions = np.array([before - left(rows[k]) for k in range(len(rows))])
        assert_allclose(gain, reductions[index], rtol=1e-6, atol=1e-9)
        others = [k for k in range(len(rows)) if k not in dict(chosen)]
        assert reductions[index] >= reductions[others].max() - 1e-9
        picked = np.concatenate([picked, rows[index]])


@given(SEEDS, st.integers(0, 20))
def test_batches_have_no_repeats_and_no_nan_and_equals_go_by_index(seed, count):
    rows = random_rows(seed, candidates=8)
    rows[3] = rows[6] = rows[0]
    rows[5] = 0.0
    target = rows[2]
    for rule in ("information", "expected_reduction", "force_std"):
        chosen = greedy(rule, rows, count, target=target)
        numbers = [index for index, _ in chosen]
        assert len(numbers) == len(set(numbers)) == min(count, 8)
        assert np.isfinite([gain for _, gain in chosen]).all()
        if count >= 8:
            assert numbers.index(0) < numbers.index(3) < numbers.index(6)


def test_cost_is_weighed_against_information():
    rows = np.zeros((2, 1, 3))
    rows[0, 0, 0], rows[1, 0, 1] = 2.0, 1.0
    assert greedy("information", rows, 1)[0][0] == 0
    ((dear, gain),) = greedy("information", rows, 1, cost=np.array([64.0, 2.0]))
    assert dear == 1
    assert_allclose(gain, 0.5 * np.log(2.0))  # of the label, not over its cost


def test_copies_are_left_by_force_std_too():
    rows = np.zeros((3, 2, 3))
    rows[0, 1, 0] = rows[1, 1, 0] = 3.0
    rows[2, 1, 1] = 3.0
    rows[:2, 0, 2] = 100.0, 200.0  # energies, which are not asked about
    chosen = greedy("force_std", rows, 3, std=np.array([1.0, 0.99, 0.5]))
    assert [index for index, _ in chosen] == [0, 2, 1]
    assert_allclose([gain for _, gain in chosen], [1.0, 0.5, 0.99 / np.sqrt(10)])
    assert_allclose(chosen[2][1], 0.99 / np.sqrt(10.0))


@pytest.fixture(scope="module")
def conditioned():
    torch.manual_seed(0)
    potential = blips.bayesianize(PaiNN(**TINY).double())
    potential.condition(displaced(3, 0), valid=labelled(displaced(3, 1)))
    return potential


def displaced(count, seed, name="NH3"):
    rng = np.random.default_rng(seed)
    found = [molecule(name) for _ in range(count)]
    for atoms in found:
        atoms.positions += rng.normal(scale=0.1, size=atoms.positions.shape)
    return found


def labelled(structures):
    from ase.calculators.emt import EMT
    from ase.calculators.singlepoint import SinglePointCalculator

    for atoms in structures:
        atoms.calc = EMT()
        results = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
        atoms.calc = SinglePointCalculator(atoms, **results)
    return structures


def test_variance_after_picking_is_that_of_the_posterior_conditioned_on_it(conditioned):
    """All components as rows, so that nothing is random: NH3 has twelve."""
    pool, target = displaced(6, 2), displaced(2, 3)
    rows = candidate_rows(conditioned, pool, rows=12)
    wanted = candidate_rows(conditioned, target, rows=12)[:, 1:]
    target_rows = wanted.reshape(-1, wanted.shape[-1])
    picks = greedy("expected_reduction", rows, 2, target=target_rows)
    posterior = conditioned.posterior
    try:
        before = force_var(conditioned, target)
        conditioned.condition([pool[index] for index, _ in picks])
        after = force_var(conditioned, target)
    finally:
        conditioned.posterior = posterior
    noise_var = posterior.scale.ratio * posterior.scale.scale**2
    assert_allclose(sum(gain for _, gain in picks) * noise_var, before - after, rtol=1e-5)
    assert after < before


def force_var(potential, structures):
    """Sum of the variances of all force components."""
    posterior, graph = potential.posterior, potential.backbone.graph(structures)
    linearised = LinearModel(potential.backbone, posterior.maps)(graph, depth="rows")
    total = 0.0
    for k in range(3 * graph.num_nodes):
        u = torch.zeros(3 * graph.num_nodes, dtype=torch.float64)
        u[k] = 1.0
        (row,) = linearised.rows_along("forces", [u.view(-1, 3)])
        known = posterior.scale.ratio, posterior.scale.scale
        total += float(posterior.spectrum.var(row.sum(0, keepdim=True), *known).sum())
    return total


def test_random_sums_stand_for_all_components(conditioned):
    atoms = displaced(1, 4)
    whole = candidate_rows(conditioned, atoms, rows=12)[0, 1:]
    sums = [candidate_rows(conditioned, atoms, rows=4, seed=k)[0, 1:] for k in range(600)]
    found = np.mean([rows.T @ rows for rows in sums], axis=0)
    expected = whole.T @ whole
    assert np.linalg.norm(found - expected) < 0.15 * np.linalg.norm(expected)


@settings(max_examples=5)
@given(SEEDS)
def test_rows_depend_on_geometry_and_seed_not_on_the_batch(conditioned, seed):
    pool = [*displaced(3, seed), *displaced(2, seed, "CH3CH2OH"), *displaced(1, seed, "OH")]
    together = candidate_rows(conditioned, [*pool, pool[0]], rows=8, seed=seed)
    for k, atoms in enumerate([*pool, pool[0]]):
        alone = candidate_rows(conditioned, [atoms], rows=8, seed=seed)
        assert_allclose(together[k], alone[0], rtol=1e-5, atol=1e-5 * np.abs(alone).max())
    assert not together[5, 7:].any()  # OH has six components
    other = candidate_rows(conditioned, pool, rows=8, seed=seed + 1)
    size = np.abs(other).max()
    assert_allclose(other[:, 0], together[:6, 0], atol=1e-5 * size)  # energies are no sums
    assert not np.allclose(other[0, 1:], together[0, 1:])
