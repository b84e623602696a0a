"""Models of the study of fast error bars."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from blips.backbones import PaiNN, load
from blips.data.ammonia import load_ammonia
from blips.experiments import silica_data
from blips.experiments.demo import BACKBONE, NUM_TRAIN, TRAINING
from blips.experiments.fast_data import MakeSets, ammonia_sets, crystal_sets, mixed_sets
from blips.factory import bayesianize
from blips.potential import BayesianPotential
from blips.train.fit import fit

Make = Callable[[Path], BayesianPotential]


class Subject(NamedTuple):
    """A model of the study: how to make it (in a folder for runs), and its structures."""

    make: Make
    sets: MakeSets
    refine: bool = False  # whether a network is trained on its samples as well


def painn_of_ammonia(folder: Path) -> BayesianPotential:
    """PaiNN of the demo, trained shortly on the shipped NH3."""
    potential = _painn()
    training = {**TRAINING, "epochs": 100}
    fit(
        potential,
        load_ammonia("train")[:NUM_TRAIN],
        valid=load_ammonia("valid"),
        config={"training": training, "seed": 0},
        folder=folder / "painn",
        resume=True,
    )
    return potential


def painn_of_silica(folder: Path) -> BayesianPotential:
    """PaiNN of the demo, trained shortly on zeolites."""
    sizes = {"train": 64, "valid": 8, "calibration": 0, "known": 1, "new": 1}
    data = silica_data.load_data(sizes)
    potential = _painn()
    training = {**TRAINING, "epochs": 25, "batch_size": 4, "kl_weight": 1.0}
    fit(
        potential,
        data.train,
        valid=data.valid,
        config={"training": training, "seed": 0},
        folder=folder / "painn-silica",
        resume=True,
    )
    return potential


def _painn() -> BayesianPotential:
    torch.manual_seed(0)
    return bayesianize(PaiNN(**BACKBONE), prior_dropout=0.5, seed=0)


def released(name: str, **options: Any) -> Make:
    """A released model with the posterior that `bayesianize` begins with."""

    def make(_folder: Path) -> BayesianPotential:
        torch.manual_seed(0)
        return bayesianize(load(name, **options))

    return make


SUBJECTS: dict[str, Subject] = {
    "painn-nh3": Subject(painn_of_ammonia, ammonia_sets, refine=True),
    "painn-silica": Subject(painn_of_silica, partial(crystal_sets, topology="dft"), refine=True),
    "chgnet": Subject(released("chgnet"), mixed_sets),
    "mattersim-1m": Subject(released("mattersim-1m"), mixed_sets),
    "sevennet-0": Subject(released("sevennet-0", trust=True), mixed_sets),
    "orb-v3-direct-20-omat (random)": Subject(
        released("orb-v3-direct-20-omat", random=True), mixed_sets, refine=True
    ),
}
