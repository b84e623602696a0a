"""Released models: where they start, what they keep, and error bars that cost no training."""

import json

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

import blips
from blips.backbones import PaiNN, load
from blips.backbones.base import Backbone, graph_batches
from blips.backbones.derivatives import plain_outputs
from blips.cli.configuration import TEMPLATES
from blips.config import ModelConfig, TrainingConfig, load_config
from blips.conversion import FROM_SCRATCH, PRETRAINED
from blips.data.dataset import StructureData
from blips.errors import CheckpointError, ConfigError
from blips.train.checkpoint import read_tensors
from blips.train.loss import Anchor
from blips.train.objective import Objective
from blips.train.references import set_reference_energies, unexplained_energies
from blips.train.released import build_model
from helpers import QUICK, TINY, morse_ammonia, quartz
from recipes.fetch_weights import fetch
from studies.silica import study as silica

OFFSETS = {14: 3.0, 8: -7.0}  # eV: what another level of theory counts differently


@pytest.fixture(scope="module")
def chgnet() -> Backbone:
    """As released; tests that convert or train it take their own."""
    pytest.importorskip("chgnet", reason="chgnet is not installed")
    return load("chgnet")


def labelled(frames: list[Atoms], model: Backbone, scale: float = 1.0) -> list[Atoms]:
    """Energies (with `OFFSETS`) and forces of a model, times `scale`."""
    for atoms in frames:
        outputs = plain_outputs(model, next(graph_batches(model, atoms, 1)), forces=True)
        energy = scale * float(outputs["energy"].detach()) + sum(OFFSETS[z] for z in atoms.numbers)
        forces = scale * outputs["forces"].detach().double().numpy()
        atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces)
    return frames


def painn(seed: int = 0) -> blips.BayesianPotential:
    torch.manual_seed(seed)
    return blips.bayesianize(PaiNN(**TINY), seed=seed)


def fit_painn(model, folder, *, replay=None, resume=False, **training):
    return blips.fit(
        model,
        morse_ammonia(8, seed=0),
        valid=morse_ammonia(4, seed=1),
        replay=replay,
        config={"training": QUICK | {"epochs": 4} | training},
        folder=folder,
        resume=resume,
        display=False,
    )


# Where a posterior begins


def test_released_weights_begin_with_a_narrow_posterior_and_arguments_win(chgnet):
    assert chgnet.pretrained
    settings = blips.bayesianize(load("chgnet")).settings
    found = (settings["prior_dropout"], tuple(settings["bounds"]), settings["initial"])
    assert found == PRETRAINED == (0.01, (1e-5, 0.11), 3e-4)
    given = blips.bayesianize(load("chgnet"), prior_dropout=0.2, bounds=(1e-3, 0.5)).settings
    assert (given["prior_dropout"], given["bounds"]) == (0.2, [1e-3, 0.5])
    assert given["initial"] == 1e-3  # the default, moved into the bounds
    scratch = painn().settings
    assert (scratch["prior_dropout"], tuple(scratch["bounds"])) == FROM_SCRATCH[:2]
    assert scratch["initial"] == 1.0


@pytest.mark.statistical
@pytest.mark.parametrize("name", ["chgnet", "mattersim-1m"])
def test_samples_before_training_still_are_the_released_model(name):
    pytest.importorskip(name.split("-")[0])
    if name == "mattersim-1m":
        try:
            fetch(name)
        except CheckpointError as error:
            pytest.skip(str(error))
    potential = blips.bayesianize(load(name))
    atoms = quartz(rattle=0.03)
    exact = potential.predict(atoms, method="map")
    sampled = potential.predict(atoms, samples=32)
    size = np.abs(exact.forces).mean()
    assert np.abs(sampled.forces - exact.forces).mean() < 0.05 * size
    assert np.abs(sampled.forces_std).mean() < 0.1 * size  # what a single training step sees
    assert (sampled.forces_std > 0).all()


# Against forgetting


def test_the_anchor_is_the_relative_squared_distance_of_each_tensor():
    model = painn()
    anchor = Anchor(model)
    assert float(anchor.penalty().detach()) == 0.0
    start = {name: p.detach().clone() for name, p in model.backbone.named_parameters()}
    expected = []
    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.backbone.named_parameters()):
            parameter.add_(0.01 * index)
            size = start[name].square().mean()
            distance = (parameter - start[name]).square().mean()
            expected.append(float(distance / size if size > 0 else distance))
    assert float(anchor.penalty().detach()) == pytest.approx(np.mean(expected), rel=1e-5)
    model.backbone.requires_grad_(False)
    with pytest.raises(ConfigError, match="anchor_weight has nothing to hold"):
        Anchor(model)


def test_the_loss_has_the_weighted_anchor_and_the_weighted_second_set():
    model = painn()
    data = StructureData(morse_ammonia(4, seed=0), TINY["cutoff"])
    batch, second = data.batch([0, 1]), data.batch([2, 3])
    config = TrainingConfig(noise=True, kl_weight=0.5, anchor_weight=3.0, replay_weight=2.0)
    objective = Objective(model, config, num_data=4)
    alone = objective(batch, ("step", 1), 1.0)
    objective.anchor = Anchor(model)
    with torch.no_grad():
        next(model.backbone.readout.parameters()).mul_(1.1)
    terms = objective(batch, ("step", 1), 1.0, second)
    parts = terms.parts
    replayed = objective(second, ("step", 1, "replay"), 1.0).parts["loss"]
    assert parts["replay"] == pytest.approx(replayed)
    assert parts["anchor"] > 0
    assert float(terms.total.detach()) == pytest.approx(
        parts["loss"] + 0.5 * parts["kl"] + 3.0 * parts["anchor"] + 2.0 * parts["replay"]
    )
    assert not {"anchor", "replay"} & alone.parts.keys()


def test_a_heavy_anchor_keeps_the_weights(tmp_path):
    distance = {}
    for weight in (0.0, 1e4):
        model = painn()
        anchor = Anchor(model)
        fit_painn(model, tmp_path / str(weight), anchor_weight=weight)
        distance[weight] = float(anchor.penalty().detach())
    assert distance[1e4] < 0.1 * distance[0.0]


def test_the_second_set_is_learned_too(tmp_path):
    """Far displacements, which the training set does not have; here with a plain model."""
    train, second = morse_ammonia(4, seed=0, scale=0.02), morse_ammonia(4, seed=5, scale=0.2)
    batch = StructureData(second, TINY["cutoff"]).batch(range(4))
    loss = {}
    for weight in (0.0, 5.0):
        torch.manual_seed(0)
        model = PaiNN(**TINY)
        training = QUICK | {"epochs": 20, "lr": 0.02, "replay_weight": weight}
        blips.fit(
            model,
            train,
            valid=train,
            replay=second,
            config={"training": training},
            folder=tmp_path / str(weight),
            display=False,
        )
        loss[weight] = Objective(model, TrainingConfig(), num_data=4).evaluate(batch)["loss"]
    assert loss[5.0] < 0.8 * loss[0.0]


def test_anchor_and_replay_resume_bitwise_even_from_another_model(tmp_path, monkeypatch):
    options = {"anchor_weight": 1.0, "replay_weight": 0.5, "ema_decay": 0.9, "batch_size": 3}
    second = morse_ammonia(5, seed=2)
    fit_painn(painn(), tmp_path / "whole", replay=second, **options)
    with monkeypatch.context() as patch:
        patch.setattr(
            "blips.train.loop.Trainer._should_stop", lambda self: self.progress.epoch == 2
        )
        stopped = painn()
        fit_painn(stopped, tmp_path / "parts", replay=second, **options)
    fit_painn(stopped, tmp_path / "parts", replay=second, resume=True, **options)
    whole, parts = (
        read_tensors(tmp_path / run / "last.safetensors")[0] for run in ("whole", "parts")
    )
    assert whole.keys() == parts.keys()
    assert any(name.startswith("anchor.") for name in whole)
    assert not [name for name in whole if not torch.equal(whole[name], parts[name])]
    metrics = [(tmp_path / run / "metrics.csv").read_text() for run in ("whole", "parts")]
    assert metrics[0] == metrics[1]
    assert {"train_anchor", "train_replay"} <= set(metrics[0].splitlines()[0].split(","))


# Another level of theory


def frames(model: Backbone, scale: float = 1.0) -> list[Atoms]:
    """Quartz, and quartz with an oxygen vacancy, so that both elements can be told apart."""
    found = [quartz(rattle=0.05, seed=seed) for seed in range(4)]
    for atoms in found[2:]:
        del atoms[-1]
    return labelled(found, model, scale)


def test_element_energies_of_another_level_of_theory_are_refitted(chgnet):
    structures = frames(chgnet)
    before = plain_outputs(chgnet, next(graph_batches(chgnet, structures, 4)), forces=True)
    settings = load_config()
    try:
        for _ in range(2):  # the second time begins with corrections, which must not add up
            set_reference_energies(chgnet, structures, settings)
            assert float(chgnet.reference.shift[14]) == pytest.approx(3.0, abs=1e-4)
            assert float(chgnet.reference.shift[8]) == pytest.approx(-7.0, abs=1e-4)
        left = unexplained_energies(chgnet, structures).by_number()
        assert list(left) == [8, 14]
        assert np.abs(list(left.values())).max() < 1e-4
        after = plain_outputs(chgnet, next(graph_batches(chgnet, structures, 4)), forces=True)
        assert torch.equal(before["forces"], after["forces"])
    finally:
        chgnet.reference.set({})


def test_energies_of_the_second_set_are_moved_to_the_model(tmp_path, chgnet):
    """Trained on labels with other element energies, replayed on the model's own."""
    potential = blips.bayesianize(load("chgnet"))
    structures = frames(chgnet)
    own = [atoms.copy() for atoms in structures]
    for copy, atoms in zip(own, structures, strict=True):
        offset = sum(OFFSETS[z] for z in atoms.numbers)
        energy = atoms.get_potential_energy() - offset
        copy.calc = SinglePointCalculator(copy, energy=energy, forces=atoms.get_forces())
    result = blips.fit(
        potential,
        structures,
        valid=structures[1:2],
        replay=own,
        config={"training": QUICK | {"epochs": 1, "lr": 1e-6, "batch_size": 2}},
        folder=tmp_path,
        display=False,
    )
    row = result.progress.history[0]
    assert row["train_replay"] == pytest.approx(row["train_loss"], rel=0.5)  # not of 50 eV
    moved = json.loads((tmp_path / "replay.json").read_text())
    assert moved["Si"] == pytest.approx(-3.0, abs=1e-3)
    assert moved["O"] == pytest.approx(7.0, abs=1e-3)


# Error bars without training


@pytest.mark.parametrize("loss", ["nll", "crps"])
def test_a_frozen_backbone_predicts_the_same_bits(tmp_path, loss):
    model = painn()
    with torch.no_grad():
        model.backbone.reference.set({7: 0.3, 1: -0.2})
    atoms = morse_ammonia(3, seed=4)
    before = model.predict(atoms, method="map")
    start = {name: value.clone() for name, value in model.state_dict().items()}
    fit_painn(model, tmp_path, loss=loss, samples=3, freeze_backbone=True, weight_decay=0.1)
    after = model.predict(atoms, method="map")
    assert np.array_equal(before.energy, after.energy)
    assert np.array_equal(before.forces, after.forces)
    changed = {n for n, value in model.state_dict().items() if not torch.equal(value, start[n])}
    assert changed
    assert all(name.startswith("encoder.") for name in changed)
    assert all(parameter.requires_grad for parameter in model.backbone.parameters())


# Configuration


def test_the_name_of_a_released_model_in_a_configuration_loads_its_weights(tmp_path, chgnet):
    path = chgnet.export(tmp_path / "own.pth.tar")
    model = build_model(ModelConfig(backbone="chgnet", weights=str(path), trust=True))
    assert isinstance(model, blips.BayesianPotential)
    assert model.settings["prior_dropout"] == 0.01
    state = chgnet.state_dict()
    assert all(torch.equal(v, state[n]) for n, v in model.backbone.state_dict().items())
    options = {"backbone": "chgnet", "pretrained": False, "bayes": {"enabled": False}}
    untrained = build_model(ModelConfig.model_validate(options))
    assert isinstance(untrained, Backbone)
    assert not untrained.pretrained


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backbone": "chgnt"}, "did you mean 'chgnet'"),
        ({"backbone": "sevennet"}, "one of sevennet-0, sevennet-l3i5, sevennet-mf-0"),
        ({"backbone": "painn", "weights": "x.pth"}, "'painn' has no setting 'weights'"),
        ({"backbone": "chgnet", "hyperparameters": {"cutoff": 3}}, "no setting 'cutoff'"),
    ],
)
def test_mistakes_in_the_model_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        build_model(ModelConfig.model_validate(options))


def test_the_template_has_the_settings_of_the_study():
    config = load_config(*TEMPLATES["finetune"])
    given = config.training.model_dump()
    chosen = {**silica.TRAINING, **silica.BLIP_TRAINING, "batch_size": None}
    assert {"loss", "lr", "ema_decay", "kl_weight"} <= chosen.keys()
    load_config({"training": chosen})  # they are settings
    for name in chosen.keys() - {"threads", "tensorboard"}:
        expected = chosen[name]
        found = {k: given[name][k] for k in expected} if isinstance(expected, dict) else given[name]
        assert found == expected, name
    assert config.model.bayes.initial == silica.BLIP["initial"]
