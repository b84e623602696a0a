"""Energy uncertainty at first order, from the one backward pass that forces need anyway.

The model runs at its posterior means, the gradients dE/dz of every Bayesian map come with those by
the positions, and `blips.bayes.moments` makes a variance of them: no sampling, and a share of it
for every edge and atom. Noise of a size that bends the energy is beyond first order: compare with
`method="mc"` where it matters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from blips.backbones.derivatives import Derivatives
from blips.bayes.moments import row_variances
from blips.data.graph import AtomGraph, Graph
from blips.errors import InputError
from blips.inference.linearise import Linearised
from blips.inference.maps import choose_maps
from blips.inference.sampling import Stochastic
from blips.prediction import Outputs


@dataclass(frozen=True)
class OnePass:
    """Outputs at the posterior means, and where the variance of the energies comes from, eV^2.

    Attributes:
        outputs: energy [S], energies [N], forces [N, 3], ...
        energy_var: of each structure, for rows with noise of their own (as samples have), [S].
        row_var: share of every row, [rows] by row type; over all rows of a structure they add up
            to its `energy_var`.
        atom_var: the same by the atom that a row belongs to (an edge: its receiver), [N].
    """

    outputs: Outputs
    energy_var: Tensor
    row_var: Mapping[str, Tensor]
    atom_var: Tensor


def one_pass(
    model: Stochastic,
    graph: Graph,
    roles: Mapping[str, str],
    **derivatives: Unpack[Derivatives],
) -> OnePass:
    """Evaluate a model once.

    Args:
        model: the converted model and its inference network.
        graph: a batch of structures.
        roles: row type of each Bayesian map.
        derivatives: forces, stress.
    """
    backbone = model.backbone
    if not isinstance(graph, AtomGraph):
        raise InputError(
            f"{type(backbone).__name__} is no potential, so it has no energy to take "
            'gradients of; use method="mc"'
        )
    with torch.no_grad():
        coefficients = model.coefficients(graph)
    maps = choose_maps(backbone, roles, dimension=1, seed=0, last=False)
    forces, stress = derivatives.get("forces", True), derivatives.get("stress", False)
    linearised = Linearised(backbone, graph, maps, forces=forces, stress=stress, depth="energies")
    row_var: dict[str, Tensor] = {}
    for product in linearised.products:
        name = product.name.partition("[")[0]
        added = row_variances(product, coefficients[name]).double()
        row_var[roles[name]] = row_var.get(roles[name], 0.0) + added
    row_atoms = backbone.row_atoms(graph)
    atom_var = torch.zeros(graph.num_nodes, dtype=torch.float64, device=graph.numbers.device)
    for role, values in row_var.items():
        atom_var = atom_var.index_add(0, row_atoms[role], values)
    energy_var = graph.sum_over_structures(atom_var)
    return OnePass(linearised.outputs, energy_var, row_var, atom_var)
