"""Deep evidential regression: the model predicts a distribution over means and variances.

Amini, Schwarting, Soleimany, Rus, "Deep Evidential Regression" (2020); for potentials, Tan et al.
(2023), see `MeanVariance`. Label y ~ N(mu, s^2), with (mu, s^2) ~ normal-inverse-gamma(gamma, nu,
alpha, beta), gamma being the prediction. Then

    aleatoric variance  E[s^2] = beta / (alpha - 1)
    epistemic variance  Var[mu] = beta / (nu (alpha - 1))

and y is Student-t distributed with 2 alpha degrees of freedom; its negative log-likelihood is the
loss, with a penalty on evidence where the prediction is wrong:

    NLL = 1/2 log(pi / nu) - alpha log(w) + (alpha + 1/2) log(nu error^2 + w)
          + log Gamma(alpha) - log Gamma(alpha + 1/2),          w = 2 beta (1 + nu)
    loss = NLL + penalty * |error| (2 nu + alpha)

The second readout gives six numbers for each atom: nu, alpha, beta of its force components, and of
its share in the energy. A structure has the mean nu and alpha of its atoms and the sum of their
beta, so that both variances of the energy grow with the number of atoms. Tan et al. take the norm
of an atom's force error for its error; here each component has the likelihood.

The penalty has a unit, that of 1 / error: its weight refers to `training.loss_unit`.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from blips import keys
from blips.backbones.base import Backbone
from blips.baselines.last_layer import energy_scale
from blips.baselines.second_readout import SecondReadout
from blips.data.graph import Graph
from blips.errors import InputError
from blips.train.loss import atom_counts

FLOOR = 1e-4  # of nu, alpha - 1 and beta


@dataclass(frozen=True)
class NormalInverseGamma:
    """Evidence about an error: nu, alpha > 1 and beta > 0 of the same shape."""

    nu: Tensor
    alpha: Tensor
    beta: Tensor  # square of the error's unit
    penalty: float = 0.0

    @property
    def aleatoric_var(self) -> Tensor:
        """E[s^2]."""
        return self.beta / (self.alpha - 1.0)

    @property
    def epistemic_var(self) -> Tensor:
        """Var[mu]."""
        return self.aleatoric_var / self.nu

    def rescaled(self, factor: float | Tensor) -> Self:
        """Give the evidence about the error times `factor`."""
        return replace(self, beta=self.beta * factor**2)

    def nll(self, error: Tensor) -> Tensor:
        """Compute the negative log-likelihood of the label, nats."""
        width = 2.0 * self.beta * (1.0 + self.nu)
        return (
            0.5 * (math.log(math.pi) - self.nu.log())
            - self.alpha * width.log()
            + (self.alpha + 0.5) * (self.nu * error.square() + width).log()
            + torch.lgamma(self.alpha)
            - torch.lgamma(self.alpha + 0.5)
        )

    def loss(self, error: Tensor) -> Tensor:
        """Compute the NLL plus the penalty on misplaced evidence."""
        return self.nll(error) + self.penalty * error.abs() * (2.0 * self.nu + self.alpha)


class Evidential(SecondReadout):
    """A potential that predicts the evidence for its energies and forces.

    Args:
        backbone: the plain potential.
        penalty: weight of misplaced evidence.
        seed: of the second readout's initial weights.
    """

    kind: ClassVar = "evidential"
    numbers_per_atom: ClassVar = 6

    def __init__(self, backbone: Backbone, penalty: float = 0.2, seed: int = 0) -> None:
        if penalty < 0:
            raise InputError(f"the penalty on evidence must not be negative, got {penalty}")
        super().__init__(backbone, {"penalty": penalty, "seed": seed}, seed)
        self.penalty = penalty

    def distributions(self, numbers: Tensor, graph: Graph) -> dict[str, NormalInverseGamma]:
        """Make distributions of unconstrained numbers [N, 6]."""
        positive = F.softplus(numbers) + FLOOR
        nu, alpha, beta = positive.reshape(-1, 3, 2).unbind(dim=1)  # [N, 2]: energy, forces
        alpha, beta = alpha + 1.0, beta * energy_scale(self.backbone) ** 2
        per_structure = graph.sum_over_structures(torch.stack([nu[:, 0], alpha[:, 0]], dim=1))
        mean_nu, mean_alpha = (per_structure / atom_counts(graph)[:, None]).unbind(dim=1)  # [S]
        total_beta = graph.sum_over_structures(beta[:, 0])  # [S]
        return {
            keys.ENERGY: NormalInverseGamma(mean_nu, mean_alpha, total_beta, self.penalty),
            keys.FORCES: NormalInverseGamma(nu[:, 1:], alpha[:, 1:], beta[:, 1:], self.penalty),
        }
