r"""First-order variance of a scalar output, from the gradients of one backward pass.

A Bayesian map with weights W + sqrt(coef) W eps moves its output z by dz = sqrt(coef) (W eps) h.
To first order in eps the scalar E moves by sum_rows (dE/dz) dz, a linear function of independent
standard normal numbers, so its variance is a sum of squares. With g = dE/dz:

    rows with noise of their own    Var E = sum_rows coef sum_uv W_vu^2 (sum_c h_cu g_cv)^2
    one draw for all rows           Var E = sum_uv W_vu^2 (sum_rows sqrt(coef) sum_c h_cu g_cv)^2

u, v count the channels in and out, c the components of an irrep (one for scalars, where the first
line is coef g^2 . (h^2)(W^2)^T). The first line, row by row, says which edges and atoms the
uncertainty comes from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blips.bayes.noise import Noise


class Record(NamedTuple):
    """One application of one matrix at the posterior means."""

    map_name: str  # of the Bayesian map
    block_name: str  # of the matrix, different for every matrix of the map
    h: Tensor  # [rows, *irrep, in]
    weight: Tensor  # [out, in]
    coef: Tensor  # [rows]
    z: Tensor  # [rows, *irrep, out], part of the graph of autograd


@dataclass(frozen=True)
class RecordedMeans(Noise):
    """No noise: maps run at their posterior means and leave a record of every application."""

    records: list[Record] = field(default_factory=list[Record])

    @property
    def replicas(self) -> int:
        """One."""
        return 1

    def linear(
        self, name: str, h: Tensor, weight: Tensor, bias: Tensor | None, coef: Tensor
    ) -> Tensor:
        """Apply one matrix at its means, h W^T + b, and record it."""
        z = F.linear(h, weight, bias)
        self.records.append(Record(name.partition("[")[0], name, h, weight, coef, z))
        return z


def row_variances(record: Record, gradient: Tensor) -> Tensor:
    """Variance that each row of an application adds, with noise of its own, [rows].

    Args:
        record: the application.
        gradient: dE/dz, [rows, *irrep, out].
    """
    weight_square = record.weight.detach().square()
    if record.h.ndim == 2:
        var = F.linear(record.h.detach().square(), weight_square)
        return record.coef * (var * gradient.square()).sum(dim=1)
    h = record.h.detach().flatten(1, -2)
    g = gradient.flatten(1, -2)  # [rows, dim, out]
    total = torch.zeros_like(record.coef)
    for a in range(h.shape[1]):
        for b in range(a + 1):
            product = F.linear(h[:, a] * h[:, b], weight_square) * g[:, a] * g[:, b]
            total = total + (1.0 if a == b else 2.0) * product.sum(dim=1)
    return (record.coef * total).clamp_min(0.0)  # rounding may leave a small negative number


def shared_variances(
    applications: Sequence[tuple[Record, Tensor, Tensor]], num_structures: int
) -> Tensor:
    """Variance of each structure for one draw that all rows and applications share, [S].

    Args:
        applications: of one matrix: its records, dE/dz, and the structure of each row [rows].
        num_structures: S.
    """
    weight = applications[0][0].weight.detach()
    moved = weight.new_zeros(num_structures, *weight.shape)  # dE / d(W eps), [S, out, in]
    for record, gradient, structure in applications:
        scale = record.coef.detach().sqrt().view(-1, *(1,) * (gradient.ndim - 1))
        scaled = (gradient * scale).flatten(1, -2) if gradient.ndim > 2 else gradient * scale
        h = record.h.detach()
        h = h.flatten(1, -2) if h.ndim > 2 else h
        for s in range(num_structures):
            rows = structure == s
            moved[s] += scaled[rows].reshape(-1, weight.shape[0]).T @ h[rows].reshape(
                -1, weight.shape[1]
            )
    return (weight * moved).square().sum(dim=(1, 2))
