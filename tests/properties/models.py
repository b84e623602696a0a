"""A model whose properties and their error bars are known in closed form.

Atoms of the first shell interact by Lennard-Jones, p (s/r)^12 - 2 q (s/r)^6 with p = q = EPSILON.
A crystal's scales are then those of the pair: with relative changes dp and dq,

    r0 ~ (p/q)^(1/6),    energy ~ q^2/p,    V ~ (p/q)^(1/2),    C_ij ~ energy / V ~ q^(5/2) p^(-3/2)
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.singlepoint import SinglePointCalculator
from torch import Tensor, nn

import blips
from blips import keys
from blips.backbones.base import AtomisticBackbone, scatter_sum
from blips.data.graph import Graph
from blips.inference.posterior import Scale

EPSILON, DISTANCE, CUTOFF = 0.5, 2.5, 3.1  # eV, A
TAU = 1e-3  # relative std of p and q before data


class LennardJones(AtomisticBackbone):
    """Energy linear in its two weights."""

    roles: ClassVar = {"readout": keys.NODE}
    readout_maps: Mapping[str, str] = {"readout": keys.NODE}

    def __init__(self, cutoff: float = CUTOFF) -> None:
        super().__init__(cutoff)
        self.hyperparameters = {"cutoff": cutoff}
        self.readout = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            self.readout.weight[:] = torch.tensor([[EPSILON, -2 * EPSILON]])

    def forward(self, graph: Graph) -> dict[str, Tensor]:
        graph = self._atom_graph(graph)
        near = DISTANCE / graph.vectors().norm(dim=-1)
        powers = torch.stack([near**12, near**6], dim=1) / 2  # half of a bond each
        features = scatter_sum(powers, graph.edge_index[0], graph.num_nodes)
        return {keys.ENERGIES: self.readout(features).squeeze(-1)}


def lennard_jones(tau: float = TAU, cutoff: float = CUTOFF) -> blips.BayesianPotential:
    """The model with a posterior that is as wide as its prior: v ~ N(0, tau^2 I)."""
    potential = blips.bayesianize(LennardJones(cutoff).double())
    labelled = crystal()
    labelled.rattle(0.05, seed=0)
    zero = np.zeros((len(labelled), 3))
    labelled.calc = SinglePointCalculator(labelled, energy=0.0, forces=zero)
    potential.condition([labelled], valid=[labelled])
    scale = Scale(ratio=1e12, scale=tau, floor={keys.FORCES: 0.01}, energy_factor=1.0)
    potential.posterior = replace(potential.conditioned(), scale=scale)
    return potential


def relative_changes(potential: blips.BayesianPotential, members: int) -> tuple[Tensor, Tensor]:
    """Changes dp/p and dq/q of the members; the weight of q is negative, noise is |theta| v."""
    v = potential.conditioned().draws(members)
    return v[:, 0].numpy(), -v[:, 1].numpy()


def crystal(symbol: str = "Cu") -> Atoms:
    """An fcc crystal at the minimum, 4 atoms."""
    return bulk(symbol, "fcc", a=DISTANCE * np.sqrt(2), cubic=True)
