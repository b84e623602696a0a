"""Weights that change after conditioning do not silently give error bars of another model."""

import copy
import pickle

import numpy as np
import pytest
import torch
from ase.build import molecule

import blips
from blips.backbones import PaiNN
from blips.errors import InputError
from helpers import morse_ammonia

USING = ("auto", "conditioned", "onepass")


def conditioned(**options) -> blips.BayesianPotential:
    torch.manual_seed(0)
    potential = blips.bayesianize(PaiNN(cutoff=3.0, features=8, blocks=1, num_basis=4))
    structures = morse_ammonia(6, seed=0)
    potential.condition(structures[:3], valid=structures[3:], **options)
    return potential


def change(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.flatten()[0] += 1e-3


@pytest.mark.parametrize("name", ["readout.0.weight", "embedding.weight"])
@pytest.mark.parametrize("method", USING)
def test_changed_weights_are_named(name, method):
    potential = conditioned()
    names = dict(potential.backbone.named_parameters())
    change(names[name])
    with pytest.raises(
        InputError, match=r"weights changed since .* \(1 of \d+: .*condition it again"
    ):
        potential.predict(molecule("NH3"), method=method)


@pytest.mark.parametrize(("count", "more"), [(3, False), (4, True)])
def test_three_of_many_changed_weights_are_named(count, more):
    potential = conditioned()
    names = sorted(name for name, _ in potential.backbone.named_parameters())[:count]
    for name in names:
        change(potential.backbone.get_parameter(name))
    with pytest.raises(InputError, match=rf"\({count} of \d+: ") as raised:
        potential.predict(molecule("NH3"))
    assert ", ".join(names[:3]) in str(raised.value)
    assert (", ...)" in str(raised.value)) == more


def test_draws_and_further_structures_are_refused_too():
    potential = conditioned()
    (member,) = potential.draw(1)
    change(next(potential.backbone.parameters()))
    graph = potential.backbone.graph(molecule("NH3"))
    for use in (lambda: potential.draw(1), lambda: member(graph)):
        with pytest.raises(InputError, match="weights changed"):
            use()
    with pytest.raises(InputError, match="weights changed"):
        potential.condition(morse_ammonia(2, seed=1))
    potential.posterior = None
    structures = morse_ammonia(6, seed=0)
    potential.condition(structures[:3], valid=structures[3:])
    assert (potential.predict(molecule("NH3")).energy_std > 0).all()


def test_methods_without_the_posterior_go_on():
    potential = conditioned()
    change(next(potential.backbone.parameters()))
    assert potential.predict(molecule("NH3"), method="map").energy_std is None
    assert potential.predict(molecule("NH3"), method="mc", samples=2).energy_std > 0


def test_another_tensor_in_place_of_a_weight_is_noticed():
    potential = conditioned()
    last = [m for m in potential.backbone.modules() if hasattr(m, "weight")][-1]
    last.weight = torch.nn.Parameter(2.0 * last.weight.detach())
    with pytest.raises(InputError, match="weights changed"):
        potential.predict(molecule("NH3"))


def test_the_inference_network_counts_where_the_posterior_has_it():
    for coefficients, stale in (("constant", False), ("network", True)):
        potential = conditioned(coefficients=coefficients)
        change(next(potential.encoder.parameters()))
        if stale:
            with pytest.raises(InputError, match="encoder"):
                potential.predict(molecule("NH3"))
        else:
            assert potential.predict(molecule("NH3")).method == "conditioned"


@pytest.mark.parametrize(
    "same",
    [
        copy.deepcopy,
        lambda potential: pickle.loads(pickle.dumps(potential)),
        lambda potential: potential.double().float(),
        lambda potential: potential.load_state_dict(potential.state_dict()) and potential,
    ],
    ids=["copy", "pickle", "precision", "state dict"],
)
def test_the_same_weights_elsewhere_pass(same):
    potential = conditioned()
    expected = potential.predict(molecule("NH3")).forces_std
    twin = same(potential)
    np.testing.assert_allclose(twin.predict(molecule("NH3")).forces_std, expected, rtol=1e-4)
    change(next(twin.backbone.parameters()))
    with pytest.raises(InputError, match="weights changed"):
        twin.predict(molecule("NH3"))


def test_files_keep_posterior_and_weights_together(tmp_path):
    potential = conditioned()
    blips.save(potential, tmp_path / "model.safetensors")
    loaded = blips.load(tmp_path / "model.safetensors")
    assert loaded.predict(molecule("NH3")).method == "conditioned"
    change(next(loaded.backbone.parameters()))
    with pytest.raises(InputError, match="weights changed"):
        loaded.predict(molecule("NH3"))
