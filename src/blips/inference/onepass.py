"""Energy uncertainty at first order, from the one backward pass that forces need anyway.

The model runs at its posterior means, the gradients dE/dz of every Bayesian map come with those by
the positions: no sampling, and a share of the variance for every edge and atom. Noise of a size
that bends the energy is beyond first order: compare with `method="mc"` where it matters.

A Bayesian map with weights W + sqrt(coef) W eps moves its output z by dz = sqrt(coef) (W eps) h.
To first order in eps the scalar E moves by sum_rows (dE/dz) dz, a linear function of independent
standard normal numbers, so its variance is a sum of squares. With g = dE/dz:

    Var E = sum_rows coef sum_uv W_vu^2 (sum_c h_cu g_cv)^2

for rows with noise of their own. u, v count the channels in and out, c the components of an irrep
(one for scalars, where it is coef g^2 . (h^2)(W^2)^T).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from blips.bayes.linear import Product
from blips.data.graph import Graph
from blips.inference.linearise import LinearModel
from blips.inference.maps import ChosenMaps
from blips.inference.sampling import StochasticModel
from blips.prediction import Outputs


@dataclass(frozen=True)
class OnePass:
    """Outputs at the posterior means, and where the variance of the energies comes from, eV^2.

    Rows have noise of their own, as samples have, so their shares add up to the variance.
    """

    outputs: Outputs  # energy [S], energies [N], forces [N, 3], ...
    energy_var: Tensor  # of each structure, [S]
    row_var: Mapping[str, Tensor]  # share of every row, [rows] by row type
    atom_var: Tensor  # the same by the atom that a row belongs to (an edge: its receiver), [N]


def one_pass(
    model: StochasticModel, graph: Graph, *, forces: bool = True, stress: bool = False
) -> OnePass:
    """Evaluate a model once, and where the variance of its energies comes from."""
    backbone, roles = model.backbone, model.roles
    with torch.no_grad():
        coefficients = model.coefficients(graph)
    maps = ChosenMaps.of(backbone, roles, dimension=1, seed=0, last=False)
    linearised = LinearModel(backbone, maps)(graph, forces=forces, stress=stress, depth="energies")
    row_var: dict[str, Tensor] = {}
    for product in linearised.products:
        name = product.name.partition("[")[0]
        added = row_variances(product, coefficients[name]).double()
        row_var[roles[name]] = row_var.get(roles[name], 0.0) + added
    row_atoms = backbone.row_atoms(graph)
    atom_var = torch.zeros(graph.num_nodes, dtype=torch.float64, device=graph.positions.device)
    for role, values in row_var.items():
        atom_var = atom_var.index_add(0, row_atoms[role], values)
    energy_var = graph.sum_over_structures(atom_var)
    return OnePass(linearised.outputs, energy_var, row_var, atom_var)


def row_variances(product: Product, coef: Tensor) -> Tensor:
    """Compute the variance that each row of a product adds, with its own noise, [rows]."""
    h, g = product.h.detach(), product.gradient.detach()
    weight_square = product.weight.detach().square()
    if h.ndim == 2:
        return coef * (F.linear(h.square(), weight_square) * g.square()).sum(dim=1)
    h, g = h.flatten(1, -2), g.flatten(1, -2)  # [rows, dim, in], [rows, dim, out]
    total = torch.zeros_like(coef)
    for a in range(h.shape[1]):
        for b in range(a + 1):
            both = F.linear(h[:, a] * h[:, b], weight_square) * g[:, a] * g[:, b]
            total = total + (1.0 if a == b else 2.0) * both.sum(dim=1)
    return (coef * total).clamp_min(0.0)  # rounding may leave a small negative number
