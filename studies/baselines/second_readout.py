"""Models with a second readout, which predicts how the labels scatter about the first.

What the second readout predicts for an atom becomes a distribution of the label's error: one for
the energy of each structure, and one for all three force components of each atom. It is a Gaussian
(`MeanVariance`), or a Gaussian of unknown mean and variance (`Evidential`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from blips import keys
from blips.backbones.base import Backbone
from blips.backbones.derivatives import Derivatives, plain_outputs
from blips.bayes.encoder import mlp
from blips.config import TrainingConfig
from blips.data.dataset import Batch
from blips.data.graph import Graph
from blips.errors import ConfigError, InputError
from blips.prediction import Outputs, Prediction, point_prediction
from blips.train.loss import loss_factor
from studies.baselines.last_layer import energy_scale, inputs_of, readout_of
from studies.baselines.likelihood import Likelihood

FLOOR = 1e-4  # of nu, alpha - 1 and beta
VAR_FLOOR = 1e-8  # eV^2, (eV/A)^2: keeps the likelihood of a perfect fit finite


@dataclass(frozen=True)
class Gaussian:
    """N(0, var); there is no distribution over the model's parameters."""

    aleatoric_var: Tensor
    epistemic_var: ClassVar[None] = None

    def rescaled(self, factor: float | Tensor) -> Self:
        """Return N(0, factor^2 var)."""
        return type(self)(self.aleatoric_var * factor**2)

    def loss(self, error: Tensor) -> Tensor:
        """Compute the negative log-likelihood, nats."""
        var = self.aleatoric_var
        return 0.5 * (math.log(2.0 * math.pi) + var.log() + error.square() / var)


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
        """Return the evidence about the error times `factor`."""
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


Distribution = Gaussian | NormalInverseGamma  # of label - prediction, with mean zero


class SecondReadout(Likelihood):
    """A potential whose second readout, its initial weights seeded, predicts distributions."""

    numbers_per_atom: ClassVar[int]

    def __init__(self, backbone: Backbone, settings: dict[str, Any], seed: int = 0) -> None:
        super().__init__(backbone, settings)
        first = readout_of(backbone)[0]
        width = int(first.in_features)  # type: ignore[arg-type]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head = mlp(width, width, self.numbers_per_atom)
        self.head.to(next(backbone.parameters()))

    def distributions(self, numbers: Tensor, graph: Graph) -> Mapping[str, Distribution]:
        """Make distributions of the numbers [N, P]: energy [S] and forces [N, 1], in eV, A."""
        raise NotImplementedError

    def evaluate(
        self, graph: Graph, **derivatives: Unpack[Derivatives]
    ) -> tuple[Outputs, Mapping[str, Distribution]]:
        """Compute outputs of the potential, and the distributions of their errors."""
        with inputs_of(readout_of(self.backbone)) as seen:
            outputs = plain_outputs(self.backbone, graph, **derivatives)
        return outputs, self.distributions(self.head(seen[-1]).double(), graph)

    def loss_terms(
        self, batch: Batch, config: TrainingConfig, derivatives: Derivatives
    ) -> dict[str, Tensor]:
        """Average the loss of the errors under their distributions, in the loss's unit."""
        outputs, distributions = self.evaluate(batch.graph, **derivatives)
        terms = {}
        for name, target in batch.targets.items():
            weight = getattr(config.weights, name)
            if weight == 0:
                continue
            if name not in distributions:
                raise ConfigError(
                    f"{type(self).__name__} has no distribution of the {name}; "
                    f"set training.weights.{name}=0"
                )
            factor = loss_factor(name, batch.graph.node_counts(), config)
            error = (target - outputs[name]).double() * factor
            terms[name] = weight * distributions[name].rescaled(factor).loss(error).mean()
        return terms

    def predict_graph(
        self, graph: Graph, *, seed: int = 0, forces: bool = True, stress: bool = False
    ) -> Prediction:
        """Predict with the std of the distributions."""
        with torch.no_grad():
            outputs, distributions = self.evaluate(graph, forces=forces, stress=stress)
        arrays = dict(outputs)
        for name, distribution in distributions.items():
            if name not in outputs:
                continue
            var = distribution.aleatoric_var.expand_as(outputs[name])
            arrays[f"{name}_aleatoric_std"] = var.sqrt()
            if distribution.epistemic_var is not None:
                arrays[f"{name}_std"] = distribution.epistemic_var.expand_as(outputs[name]).sqrt()
        return point_prediction(arrays, graph, method=self.kind)


class MeanVariance(SecondReadout):
    """Mean-variance estimation: a potential that also predicts how noisy each label is.

    Nix, Weigend, "Estimating the mean and variance of the target probability distribution" (1994);
    for potentials, Tan et al., "Single-model uncertainty quantification in neural network
    potentials does not consistently outperform model ensembles" (2023). The second readout gives
    two log-variances for each atom, of its force components and of its share in the energy,

        sigma_F,i^2 = exp(a_i),    sigma_E^2 = sum_i exp(b_i),
        loss = 1/2 [ log(2 pi sigma^2) + error^2 / sigma^2 ]

    Tan et al. take the norm of an atom's force error for its error; here each component has the
    likelihood, so that std is that of a component. The variance is aleatoric: it describes the
    noise of labels like those of the training set, and says nothing about structures unlike them.
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


class Evidential(SecondReadout):
    """Deep evidential regression: a potential that predicts the evidence for its labels.

    Amini, Schwarting, Soleimany, Rus, "Deep Evidential Regression" (2020); for potentials, Tan et
    al. (2023). Label y ~ N(mu, s^2), with (mu, s^2) ~ normal-inverse-gamma(gamma, nu, alpha, beta),
    gamma being the prediction. Then

        aleatoric variance  E[s^2] = beta / (alpha - 1)
        epistemic variance  Var[mu] = beta / (nu (alpha - 1))

    and y is Student-t distributed with 2 alpha degrees of freedom; its negative log-likelihood is
    the loss, with a penalty on evidence where the prediction is wrong:

        NLL = 1/2 log(pi / nu) - alpha log(w) + (alpha + 1/2) log(nu error^2 + w)
              + log Gamma(alpha) - log Gamma(alpha + 1/2),          w = 2 beta (1 + nu)
        loss = NLL + penalty * |error| (2 nu + alpha)

    The second readout gives six numbers for each atom: nu, alpha, beta of its force components, and
    of its share in the energy. A structure has the mean nu and alpha of its atoms and the sum of
    their beta, so that both variances of the energy grow with the number of atoms. Tan et al. take
    the norm of an atom's force error for its error; here each component has the likelihood.

    The penalty has a unit, that of 1 / error: its weight refers to `training.loss_unit`.
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
        mean_nu, mean_alpha = (per_structure / graph.node_counts()[:, None]).unbind(dim=1)  # [S]
        total_beta = graph.sum_over_structures(beta[:, 0])  # [S]
        return {
            keys.ENERGY: NormalInverseGamma(mean_nu, mean_alpha, total_beta, self.penalty),
            keys.FORCES: NormalInverseGamma(nu[:, 1:], alpha[:, 1:], beta[:, 1:], self.penalty),
        }
