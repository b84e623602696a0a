"""Runs to report on: one of `fit` from files, and the demo, both after an epoch or two."""

import ase.io
import pytest
import torch

import blips
from blips.backbones import PaiNN
from blips.demo import run_demo
from helpers import TINY, morse_ammonia


@pytest.fixture(scope="session")
def fit_run(tmp_path_factory):
    """A folder of `fit` whose data are files; a formula that would be a tag if not escaped."""
    folder = tmp_path_factory.mktemp("fit")
    ase.io.write(folder / "train.extxyz", morse_ammonia(8, seed=0))
    ase.io.write(folder / "valid.extxyz", morse_ammonia(4, seed=1))
    torch.manual_seed(0)
    training = {"epochs": 3, "batch_size": 4, "threads": 1, "tensorboard": False}
    config = {
        "training": training,
        "data": {"train": str(folder / "train.extxyz"), "valid": str(folder / "valid.extxyz")},
    }
    potential = blips.bayesianize(PaiNN(**TINY))
    blips.fit(potential, config=config, folder=folder / "<b>run&amp", display=False)
    return folder / "<b>run&amp"


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    run_demo(folder, epochs=2)
    return folder
