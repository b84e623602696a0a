"""The network that corrects covariances of forces in one pass."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import blips
from blips.backbones import PaiNN
from blips.errors import InputError
from blips.spread import ForceSpread
from blips.spread.distil import fit_spread, lesson
from blips.spread.geometry import Geometry
from blips.spread.network import Refinement, Scene
from blips.spread.tensors import Ingredients
from blips.spread.training import Schedule, fit_refinement, wishart_loss
from helpers import double_coefficients, rattled_molecules, shaken

rattled = partial(rattled_molecules, scale=0.2)


@pytest.fixture(scope="module")
def potential() -> blips.BayesianPotential:
    torch.manual_seed(0)
    backbone = PaiNN(cutoff=4.0, features=16, blocks=2, num_basis=6)
    made = blips.bayesianize(backbone, bounds=(1e-6, 0.5), initial=0.01).double()
    made.distil_forces(rattled(6), samples=24)
    made.force_spread = replace(made.force_spread, refinement=strange_network(made))
    return made


def scene_of(potential, atoms) -> Scene:
    found = Ingredients.of(potential.one_pass(atoms))
    spread = replace(potential.force_spread, refinement=None)
    return found.scene(spread.covariance(potential.one_pass(atoms)))


def strange_network(potential, seed: int = 0) -> Refinement:
    """One with random weights of a size that matters."""
    torch.manual_seed(seed)
    inputs = scene_of(potential, rattled(1)).invariants.shape[1]
    return shaken(Refinement([1, 6, 7], inputs).double().eval())


def test_it_changes_covariances_that_stay_positive_and_turn(potential):
    atoms = rattled(2)[1]
    plain = replace(potential.force_spread, refinement=None).covariance(potential.one_pass(atoms))
    before = potential.predict(atoms, method="onepass", covariance=True).forces_cov
    assert np.linalg.eigvalsh(before).min() > 0
    known = np.isin(atoms.numbers, [1, 6, 7])
    changed = np.abs(before / plain.numpy() - 1).max(axis=(1, 2)) > 0.01
    np.testing.assert_array_equal(changed, known)  # oxygen was in no lesson of the network
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    atoms.positions = atoms.positions @ turn.T
    after = potential.predict(atoms, method="onepass", covariance=True).forces_cov
    np.testing.assert_allclose(after, turn @ before @ turn.T, rtol=1e-6, atol=1e-12)


def test_twice_the_coefficients_twice_the_variance(potential, monkeypatch):
    atoms = rattled(1)[0]
    once = potential.predict(atoms, method="onepass").forces_std
    double_coefficients(potential, monkeypatch)
    twice = potential.predict(atoms, method="onepass").forces_std
    np.testing.assert_allclose(twice**2, 2 * once**2, rtol=1e-6)


def test_structures_do_not_see_each_other(potential):
    together = potential.predict(rattled(3), method="onepass").forces_std
    apart = [potential.predict(atoms, method="onepass").forces_std for atoms in rattled(3)]
    np.testing.assert_allclose(together, np.concatenate(apart), rtol=1e-8)
    scenes = [scene_of(potential, atoms) for atoms in rattled(3)]
    network = potential.force_spread.refinement
    with torch.no_grad():
        joined = network(Scene.join(scenes))
        torch.testing.assert_close(joined, torch.cat([network(one) for one in scenes]))


def test_far_bonds_do_not_count(potential):
    scene = scene_of(potential, rattled(1)[0])
    bonds = scene.bonds
    ends = torch.tensor([0]), torch.tensor([1])
    far = Geometry(torch.eye(3).double()[:1], torch.tensor([4.9999]).double(), *ends, 4)
    more = replace(scene, bonds=Geometry(
        torch.cat([bonds.unit, far.unit]),
        torch.cat([bonds.distance, far.distance]),
        torch.cat([bonds.receiver, far.receiver]),
        torch.cat([bonds.sender, far.sender]),
        4,
    ))  # fmt: skip
    network = potential.force_spread.refinement
    with torch.no_grad():
        torch.testing.assert_close(network(more), network(scene), rtol=1e-5, atol=0)


def test_it_is_saved_with_the_model(potential, tmp_path):
    again = blips.load(blips.save(potential, tmp_path / "model.safetensors"))
    expected = potential.predict(rattled(2), method="onepass").forces_std
    found = again.predict(rattled(2), method="onepass").forces_std
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # weights are stored in float32
    saved = json.loads(json.dumps(potential.force_spread.to_dict()))
    del saved["refinement"]  # as earlier versions wrote it
    assert ForceSpread.from_dict(saved).refinement is None


def test_the_loss_is_least_at_the_sampled_covariance():
    root = torch.randn(5, 3, 3, generator=torch.manual_seed(0), dtype=torch.float64)
    sampled = root @ root.mT
    least = wishart_loss(sampled, sampled)
    expected = 3 + torch.logdet(sampled / sampled.diagonal(dim1=1, dim2=2).sum(1)[:, None, None])
    assert float(least) == pytest.approx(float(expected.mean()), rel=1e-3)
    for factor in (0.7, 1.4):
        assert wishart_loss(factor * sampled, sampled) > least
    still = torch.zeros(1, 3, 3, dtype=torch.float64)  # an atom that never moves says nothing
    both = torch.cat([sampled, still])
    assert float(wishart_loss(both, both)) == pytest.approx(float(least))


def test_training_finds_a_network_again(potential):
    truth = strange_network(potential, seed=3)
    scenes = [scene_of(potential, atoms) for atoms in rattled(24)]
    with torch.no_grad():
        aims = [truth(scene).numpy() for scene in scenes]
    found = fit_refinement(scenes, aims, Schedule(steps=400))
    fresh = [scene_of(potential, atoms) for atoms in rattled(6, first=100)]
    with torch.no_grad():
        pairs = [(found(scene), truth(scene), scene.cov) for scene in fresh]
    error = np.mean([_log_error(guess, right) for guess, right, _ in pairs])
    before = np.mean([_log_error(guess, right) for _, right, guess in pairs])
    assert error < 0.5 * before


def _log_error(guess, right) -> float:
    ratios = guess.diagonal(dim1=1, dim2=2) / right.diagonal(dim1=1, dim2=2)
    return float(ratios.log().abs().mean())


def test_a_network_that_does_not_help_is_not_kept(potential, monkeypatch):
    calls = []

    def useless(scenes, sampled):
        calls.append(len(scenes))
        return strange_network(potential)

    monkeypatch.setattr("blips.spread.distil.fit_refinement", useless)
    lessons = [
        lesson(potential, graph, 16, 0, k, 0.0)
        for k, atoms in enumerate(rattled(8))
        for graph in [potential.one_pass(atoms).graph]
    ]
    kept = fit_spread(lessons, refine=True)
    assert calls == [6]
    assert kept.refinement is None
    assert kept == fit_spread(lessons)
    with pytest.raises(InputError, match="4 structures or more"):
        potential.distil_forces(rattled(3), refine=True)


@pytest.mark.statistical
def test_refining_by_name_ranks_no_worse(potential, monkeypatch):
    monkeypatch.setattr(fit_refinement, "__defaults__", (Schedule(steps=200), 0))
    other = blips.bayesianize(PaiNN(cutoff=4.0, features=8, blocks=1, num_basis=4), initial=0.01)
    spread = other.distil_forces(rattled(8), samples=16, displacements=[0.1], refine=True)
    assert spread.quality["spearman"] > 0.8
    assert other.predict(rattled(1), method="onepass").forces_std.shape == (4, 3)
