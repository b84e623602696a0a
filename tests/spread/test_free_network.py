"""The network of models without symmetry (ORB): what it sees, and that it learns from it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ase.build import bulk, molecule

import blips
from blips.backbones import build
from blips.spread.distil import fit_spread, lesson
from blips.spread.network import Refinement, Scene
from blips.spread.tensors import Ingredients
from blips.spread.training import Schedule, fit_refinement
from helpers import double_coefficients, quartz, shaken

# The package hands torch tensors to functions of ASE that expect arrays.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
WIDTH = 16


@pytest.fixture(scope="module")
def orb() -> blips.BayesianPotential:
    pytest.importorskip("orb_models")
    torch.manual_seed(0)
    backbone = build(
        "orb-direct",
        latent_dim=WIDTH,
        base_mlp_hidden_dim=32,
        head_mlp_hidden_dim=16,
        num_message_passing_steps=2,
    )
    made = blips.bayesianize(backbone, initial=3e-3, bounds=(1e-5, 0.11), prior_dropout=0.01)
    made = made.double()
    made.distil_forces(crystals(4), samples=16, displacements=[0.1])
    made.force_spread = replace(made.force_spread, refinement=strange_network(made))
    return made


def crystals(count: int, first: int = 0) -> list:
    found = []
    for k in range(first, first + count):
        atoms = quartz() if k % 2 else bulk("Cu", cubic=True)
        atoms.rattle(0.1, seed=k)
        found.append(atoms)
    return found


def scene_of(orb, atoms) -> Scene:
    found = orb.one_pass(atoms)
    plain = replace(orb.force_spread, refinement=None)
    return Ingredients.of(found, axes=True).scene(plain.covariance(found))


def strange_network(orb, seed: int = 0) -> Refinement:
    """One with random weights of a size that matters."""
    torch.manual_seed(seed)
    inputs = scene_of(orb, crystals(1)[0]).inputs.shape[1]
    return shaken(Refinement([8, 14, 29], inputs, free=True).double().eval())


def test_one_pass_knows_what_the_forces_are_made_of(orb):
    atoms = crystals(2)[1]
    head = orb.backbone.get_submodule("model.heads.forces.mlp")
    seen = []
    hook = head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    orb.predict(atoms, method="map")
    hook.remove()
    found = orb.one_pass(atoms)
    assert found.features.shape == (len(atoms), WIDTH)
    torch.testing.assert_close(found.features, seen[0].detach())
    assert not found.features.requires_grad
    assert not head._forward_pre_hooks  # nothing stays behind
    assert scene_of(orb, atoms).inputs.shape[1] > WIDTH


def test_conservative_orb_has_none():
    backbone = build(
        "orb",
        latent_dim=8,
        base_mlp_hidden_dim=8,
        head_mlp_hidden_dim=8,
        num_message_passing_steps=1,
    )
    assert blips.bayesianize(backbone).one_pass(molecule("NH3")).features is None


def test_covariances_are_positive_and_differ_by_axis(orb):
    atoms = crystals(2)[1]
    cov = orb.predict(atoms, method="onepass", covariance=True).forces_cov
    assert np.linalg.eigvalsh(cov).min() > 0
    along = np.diagonal(cov, axis1=1, axis2=2)
    assert np.ptp(along / along.sum(axis=1, keepdims=True)) > 0.01


def test_twice_the_coefficients_twice_the_variance(orb, monkeypatch):
    atoms = crystals(1)[0]
    once = orb.predict(atoms, method="onepass").forces_std
    double_coefficients(orb, monkeypatch)
    twice = orb.predict(atoms, method="onepass").forces_std
    np.testing.assert_allclose(twice**2, 2 * once**2, rtol=1e-6)


def test_it_is_saved_with_the_model(orb, tmp_path):
    again = blips.load(blips.save(orb, tmp_path / "model.safetensors"))
    expected = orb.predict(crystals(2), method="onepass").forces_std
    assert again.force_spread.refinement.free
    np.testing.assert_allclose(
        again.predict(crystals(2), method="onepass").forces_std, expected, rtol=1e-5
    )


def test_it_learns_a_covariance_that_features_decide(orb):
    scenes = [scene_of(orb, atoms) for atoms in crystals(24)]
    typical = torch.cat([scene.features for scene in scenes])

    def truth(scene: Scene) -> torch.Tensor:
        """Along z it is what the first feature says; the tensors know nothing of it."""
        first = (scene.features[:, 0] - typical[:, 0].mean()) / typical[:, 0].std()
        cov = scene.cov.clone()
        cov[:, 2, 2] = cov[:, 2, 2] * torch.exp(first.clamp(-2, 2)) + cov[:, 0, 0]
        return cov

    network = fit_refinement(scenes, [truth(one).numpy() for one in scenes], Schedule(steps=400))
    fresh = [scene_of(orb, atoms) for atoms in crystals(6, first=100)]
    with torch.no_grad():
        pairs = [(network(one), truth(one), one.cov) for one in fresh]
    error = np.mean([_log_error(guess, right) for guess, right, _ in pairs])
    before = np.mean([_log_error(guess, right) for _, right, guess in pairs])
    assert network.free
    assert error < 0.4 * before


def _log_error(guess, right) -> float:
    return float((guess[:, 2, 2] / right[:, 2, 2]).log().abs().mean())


def test_it_is_taught_by_lessons_with_features(orb, monkeypatch):
    monkeypatch.setattr(fit_refinement, "__defaults__", (Schedule(steps=20), 0))
    seen = []

    def noted(scenes, sampled):
        seen.extend(scenes)
        return fit_refinement(scenes, sampled)

    monkeypatch.setattr("blips.spread.distil.fit_refinement", noted)
    lessons = [
        lesson(orb, orb.one_pass(atoms).graph, 8, 0, k, 0.0) for k, atoms in enumerate(crystals(4))
    ]
    fit_spread(lessons, refine=True)
    assert {scene.features.shape[1] for scene in seen} == {WIDTH}
