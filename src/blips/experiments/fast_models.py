"""Models of the study of fast error bars."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ase import Atoms

from blips.backbones import PaiNN, build, load
from blips.conversion import bayesianize
from blips.data.ammonia import load_ammonia
from blips.experiments import silica_data
from blips.experiments.demo import BACKBONE, BLIP_TRAINING, NUM_TRAIN
from blips.experiments.fast_data import MakeSets, ammonia_sets, crystal_sets, mixed_sets, turned
from blips.potential import BayesianPotential
from blips.train.fit import fit
from blips.train.objective import Model

Make = Callable[[Path, int], BayesianPotential]
ORB = {
    "latent_dim": 64,
    "base_mlp_hidden_dim": 128,
    "head_mlp_hidden_dim": 64,
    "num_message_passing_steps": 3,
}
COPIES = 16  # of each NH3 for ORB, turned
MOSTLY_FORCES = {"energy": 0.003, "forces": 1.0}  # energies of zeolites would drown the forces


class Subject(NamedTuple):
    """A model of the study: how to make it (folder for runs, seed), and its structures."""

    make: Make
    sets: MakeSets


def painn_of_ammonia(folder: Path, seed: int) -> BayesianPotential:
    """PaiNN of the demo, trained shortly on the shipped NH3."""
    train = load_ammonia("train")[:NUM_TRAIN]
    valid = load_ammonia("valid")
    return _trained(folder / "painn", _painn(seed), train, valid, seed, epochs=100)


def painn_of_silica(folder: Path, seed: int) -> BayesianPotential:
    """PaiNN of the demo, trained shortly on zeolites."""
    settings = {"epochs": 25, "batch_size": 4, "kl_weight": 1.0}
    return _trained(folder / "painn-silica", _painn(seed), *_zeolites(64), seed, **settings)


def orb_of_ammonia(folder: Path, seed: int) -> BayesianPotential:
    """A small direct ORB, trained on the shipped NH3; turned copies teach it to turn."""
    train = turned(load_ammonia("train")[:NUM_TRAIN], COPIES, seed=0)
    valid = turned(load_ammonia("valid"), 1, seed=1)
    settings = {"epochs": 150, "batch_size": 64, "kl_weight": 1.0, "lr": 1e-3}
    return _trained(folder / "orb", _orb(seed, **ORB), train, valid, seed, **settings)


def orb_of_silica(folder: Path, seed: int) -> BayesianPotential:
    """A small direct ORB, trained on zeolites."""
    settings: dict[str, Any] = {"epochs": 60, "batch_size": 4, "kl_weight": 0.3, "lr": 5e-4}
    settings["weights"] = MOSTLY_FORCES
    return _trained(folder / "orb-silica", _orb(seed, **ORB), *_zeolites(256), seed, **settings)


def orb_of_all(folder: Path, seed: int) -> BayesianPotential:
    """ORB v3 direct at full size (25 million weights), trained shortly on NH3 and zeolites.

    As for released models, the posterior is that which `bayesianize` begins with.
    """
    torch.manual_seed(seed)
    backbone = build("orb-direct")
    zeolites, held_out = _zeolites(64)
    train = turned(load_ammonia("train")[:NUM_TRAIN], 8, seed=0) + zeolites
    valid = turned(load_ammonia("valid"), 1, seed=1) + held_out
    settings: dict[str, Any] = {"epochs": 36, "batch_size": 8, "lr": 3e-4, "threads": 2}
    settings["weights"] = MOSTLY_FORCES
    _train(folder / "orb-mixed", backbone, train, valid, seed, **settings)
    backbone.pretrained = True
    return bayesianize(backbone, seed=seed)


def _trained(
    folder: Path,
    potential: BayesianPotential,
    train: Sequence[Atoms],
    valid: Sequence[Atoms],
    seed: int,
    **settings: Any,
) -> BayesianPotential:
    """A potential after `_train`."""
    _train(folder, potential, train, valid, seed, **settings)
    return potential


def _train(
    folder: Path,
    model: Model,
    train: Sequence[Atoms],
    valid: Sequence[Atoms],
    seed: int,
    **settings: Any,
) -> None:
    """Fit as the demo does, but for these settings; in `folder`, where it goes on if stopped."""
    config = {"training": {**BLIP_TRAINING, **settings}, "seed": seed}
    fit(model, train, valid=valid, config=config, folder=folder, resume=True)


def _zeolites(count: int) -> tuple[list[Atoms], list[Atoms]]:
    """To train on, and to choose the best epoch."""
    sizes = {"train": count, "valid": 8, "calibration": 0, "known": 1, "new": 1}
    data = silica_data.load_data(sizes)
    return data.train, data.valid


def _painn(seed: int) -> BayesianPotential:
    torch.manual_seed(seed)
    return bayesianize(PaiNN(**BACKBONE), prior_dropout=0.5, seed=seed)


def _orb(seed: int, **sizes: int) -> BayesianPotential:
    torch.manual_seed(seed)
    return bayesianize(build("orb-direct", **sizes), prior_dropout=0.1, initial=0.02, seed=seed)


def released(name: str, **options: Any) -> Make:
    """A released model with the posterior that `bayesianize` begins with."""

    def make(_folder: Path, seed: int) -> BayesianPotential:
        torch.manual_seed(seed)
        return bayesianize(load(name, **options), seed=seed)

    return make


SUBJECTS: dict[str, Subject] = {
    "painn-nh3": Subject(painn_of_ammonia, ammonia_sets),
    "painn-silica": Subject(painn_of_silica, partial(crystal_sets, topology="dft")),
    "orb-nh3": Subject(orb_of_ammonia, ammonia_sets),
    "orb-silica": Subject(orb_of_silica, partial(crystal_sets, topology="dft")),
    "orb-mixed": Subject(orb_of_all, mixed_sets),
    "chgnet": Subject(released("chgnet"), mixed_sets),
    "mattersim-1m": Subject(released("mattersim-1m"), mixed_sets),
    "sevennet-0": Subject(released("sevennet-0", trust=True), mixed_sets),
    "orb-v3-direct-20-omat (random)": Subject(
        released("orb-v3-direct-20-omat", random=True), mixed_sets
    ),
}
