"""Structures, potentials and closed forms of the tests of conditioning."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ase import Atoms
from torch import Tensor

import blips
from blips import keys
from blips.inference.linearise import LinearModel
from blips.inference.posterior import Scale
from blips.inference.rows import components
from helpers import rattled_molecules
from inference.models import (
    labelled,
    small,
)

TRAIN = rattled_molecules(5, 0.05)
VALID = labelled(rattled_molecules(4, 0.1, first=20))
FAR = rattled_molecules(3, 0.3, first=40)
FLOOR = {keys.FORCES: 0.05, keys.ENERGY: 0.01}
FACTOR, TAU = 1.5, 0.3
EXACT = {"rtol": 1e-10, "atol": 1e-12}
OWN = pytest.mark.parametrize("name", ["painn", "schnet"])


def rescaled(potential: blips.BayesianPotential, relative_ratio: float = 1e-3) -> None:
    """Give its posterior numbers that no labels decided, and that rounding does not reach."""
    posterior = potential.conditioned()
    assert posterior.evidence is not None
    ratio = relative_ratio * posterior.evidence.mean_square
    potential.posterior = replace(posterior, scale=Scale(ratio, TAU, FLOOR, FACTOR))


def conditioned(name: str = "painn", structures=TRAIN, **options) -> blips.BayesianPotential:
    potential = small(name)
    potential.condition(structures, valid=VALID, **options)
    rescaled(potential)
    return potential


def predict(potential, atoms, **options) -> blips.Prediction:
    return potential.predict(atoms, method="conditioned", **options)


def all_rows(potential: blips.BayesianPotential, atoms: Atoms) -> Tensor:
    """Rows of the energy and of all force components, [1 + 3N, d]."""
    graph = potential.backbone.graph(atoms)
    linearised = LinearModel(potential.backbone, potential.conditioned().maps)(graph, depth="rows")
    directions = list(components(graph, 3 * len(atoms)))
    forces = linearised.rows_along(keys.FORCES, directions)
    return torch.cat([linearised.energy_rows(), *forces]).double()


def regression_covariance(posterior, rows: Tensor) -> np.ndarray:
    """tau^2 (I + G / r)^-1 by numpy, from rows of all structures."""
    b, scale = rows.numpy(), posterior.scale
    return scale.scale**2 * np.linalg.inv(np.eye(b.shape[1]) + b.T @ b / scale.ratio)


def gram_of(potential) -> Tensor:
    return potential.conditioned().evidence.gram()
