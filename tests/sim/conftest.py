"""A potential that knows ammonia near its minimum, and nothing else."""

from functools import partial

import pytest
import torch

import blips
from blips.backbones import PaiNN
from blips.data.ammonia import load_ammonia
from studies.ammonia.beyond import BeyondObjective

TRAINING = {
    "epochs": 80,
    "batch_size": 16,
    "loss": "mae",
    "loss_unit": "kcal/mol",
    "lr": 3e-3,
    "encoder_lr": 5e-3,
    "schedule": {"kind": "cosine"},
    "noise": True,
    "condition": False,
    "kl_weight": 0.1,
    "checkpoint_every": 1000,
    "threads": 1,
    "tensorboard": False,
}


@pytest.fixture(scope="session")
def ammonia_potential(tmp_path_factory):
    torch.manual_seed(0)
    potential = blips.bayesianize(PaiNN(cutoff=4.0, features=32, blocks=2, num_basis=12))
    blips.fit(
        potential,
        load_ammonia("train"),
        valid=load_ammonia("valid"),
        config={"training": TRAINING},
        folder=tmp_path_factory.mktemp("ammonia"),
        objective=partial(BeyondObjective, weight=1.0),
    )
    return potential
