"""Models of the study of fast error bars."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ase import Atoms

from blips.backbones import PaiNN, build, load
from blips.data.ammonia import load_ammonia
from blips.experiments import silica_data
from blips.experiments.demo import BACKBONE, NUM_TRAIN, TRAINING
from blips.experiments.fast_data import MakeSets, ammonia_sets, crystal_sets, mixed_sets, turned
from blips.factory import bayesianize
from blips.potential import BayesianPotential
from blips.train.fit import fit

Make = Callable[[Path], BayesianPotential]
ORB = {
    "latent_dim": 64,
    "base_mlp_hidden_dim": 128,
    "head_mlp_hidden_dim": 64,
    "num_message_passing_steps": 3,
}
COPIES = 16  # of each NH3 for ORB, turned


class Subject(NamedTuple):
    """A model of the study: how to make it (in a folder for runs), and its structures."""

    make: Make
    sets: MakeSets
    refine: bool = False  # whether a network is trained on its samples as well


def painn_of_ammonia(folder: Path) -> BayesianPotential:
    """PaiNN of the demo, trained shortly on the shipped NH3."""
    train = load_ammonia("train")[:NUM_TRAIN]
    return _trained(folder / "painn", _painn(), train, load_ammonia("valid"), epochs=100)


def painn_of_silica(folder: Path) -> BayesianPotential:
    """PaiNN of the demo, trained shortly on zeolites."""
    settings = {"epochs": 25, "batch_size": 4, "kl_weight": 1.0}
    return _trained(folder / "painn-silica", _painn(), *_zeolites(64), **settings)


def orb_of_ammonia(folder: Path) -> BayesianPotential:
    """A small direct ORB, trained on the shipped NH3; turned copies teach it to turn."""
    train = turned(load_ammonia("train")[:NUM_TRAIN], COPIES, seed=0)
    valid = turned(load_ammonia("valid"), 1, seed=1)
    settings = {"epochs": 150, "batch_size": 64, "kl_weight": 1.0, "lr": 1e-3}
    return _trained(folder / "orb", _orb(), train, valid, **settings)


def orb_of_silica(folder: Path) -> BayesianPotential:
    """A small direct ORB, trained on zeolites; their energies would drown the forces."""
    settings = {"epochs": 60, "batch_size": 4, "kl_weight": 0.3, "lr": 5e-4}
    weights = {"energy": 0.003, "forces": 1.0}
    return _trained(folder / "orb-silica", _orb(), *_zeolites(256), weights=weights, **settings)


def _trained(
    folder: Path,
    potential: BayesianPotential,
    train: Sequence[Atoms],
    valid: Sequence[Atoms],
    **settings: Any,
) -> BayesianPotential:
    """Fitted as the demo's, but for these settings; in `folder`, where it goes on if stopped."""
    config = {"training": {**TRAINING, **settings}, "seed": 0}
    fit(potential, train, valid=valid, config=config, folder=folder, resume=True)
    return potential


def _zeolites(count: int) -> tuple[list[Atoms], list[Atoms]]:
    """To train on, and to choose the best epoch."""
    sizes = {"train": count, "valid": 8, "calibration": 0, "known": 1, "new": 1}
    data = silica_data.load_data(sizes)
    return data.train, data.valid


def _painn() -> BayesianPotential:
    torch.manual_seed(0)
    return bayesianize(PaiNN(**BACKBONE), prior_dropout=0.5, seed=0)


def _orb() -> BayesianPotential:
    torch.manual_seed(0)
    return bayesianize(build("orb-direct", **ORB), prior_dropout=0.1, initial=0.02, seed=0)


def released(name: str, **options: Any) -> Make:
    """A released model with the posterior that `bayesianize` begins with."""

    def make(_folder: Path) -> BayesianPotential:
        torch.manual_seed(0)
        return bayesianize(load(name, **options))

    return make


SUBJECTS: dict[str, Subject] = {
    "painn-nh3": Subject(painn_of_ammonia, ammonia_sets, refine=True),
    "painn-silica": Subject(painn_of_silica, partial(crystal_sets, topology="dft"), refine=True),
    "orb-nh3": Subject(orb_of_ammonia, ammonia_sets, refine=True),
    "orb-silica": Subject(orb_of_silica, partial(crystal_sets, topology="dft"), refine=True),
    "chgnet": Subject(released("chgnet"), mixed_sets),
    "mattersim-1m": Subject(released("mattersim-1m"), mixed_sets),
    "sevennet-0": Subject(released("sevennet-0", trust=True), mixed_sets),
    "orb-v3-direct-20-omat (random)": Subject(
        released("orb-v3-direct-20-omat", random=True), mixed_sets
    ),
}
