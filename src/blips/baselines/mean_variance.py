"""Mean-variance estimation: the model predicts how noisy each label is.

Nix, Weigend, "Estimating the mean and variance of the target probability distribution" (1994); for
potentials, Tan et al., "Single-model uncertainty quantification in neural network potentials does
not consistently outperform model ensembles" (2023). The second readout gives two log-variances for
each atom, of its force components and of its share in the energy,

    sigma_F,i^2 = exp(a_i),    sigma_E^2 = sum_i exp(b_i),
    loss = 1/2 [ log(2 pi sigma^2) + error^2 / sigma^2 ]

Tan et al. take the norm of an atom's force error for its error; here each component has the
likelihood, so that std is that of a component. The variance is aleatoric: it describes the noise
of labels like those of the training set, and says nothing about structures unlike them.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from blips import keys
from blips.backbones.base import Backbone
from blips.baselines.last_layer import energy_scale
from blips.baselines.second_readout import SecondReadout
from blips.data.graph import Graph

VAR_FLOOR = 1e-8  # eV^2, (eV/A)^2: keeps the likelihood of a perfect fit finite


@dataclass(frozen=True)
class Gaussian:
    """N(0, var)."""

    var: Tensor

    @property
    def aleatoric_var(self) -> Tensor:
        """The variance."""
        return self.var

    @property
    def epistemic_var(self) -> None:
        """None: the model has no distribution over its parameters."""
        return None

    def rescaled(self, factor: float | Tensor) -> Self:
        """Give N(0, factor^2 var)."""
        return type(self)(self.var * factor**2)

    def loss(self, error: Tensor) -> Tensor:
        """Compute the negative log-likelihood, nats."""
        return 0.5 * (math.log(2.0 * math.pi) + self.var.log() + error.square() / self.var)


class MeanVariance(SecondReadout):
    """A potential that also predicts the variance of its labels.

    Args:
        backbone: the plain potential.
        seed: of the second readout's initial weights.
    """

    kind: ClassVar = "mean_variance"
    numbers_per_atom: ClassVar = 2

    def __init__(self, backbone: Backbone, seed: int = 0) -> None:
        super().__init__(backbone, {"seed": seed}, seed)

    def distributions(self, numbers: Tensor, graph: Graph) -> dict[str, Gaussian]:
        """Make distributions of log-variances [N, 2]."""
        variances = energy_scale(self.backbone) ** 2 * numbers.exp() + VAR_FLOOR  # [N, 2]
        return {
            keys.ENERGY: Gaussian(graph.sum_over_structures(variances[:, 0])),  # [S]
            keys.FORCES: Gaussian(variances[:, 1:]),  # [N, 1]
        }
