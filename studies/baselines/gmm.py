"""Gaussian mixture on the embeddings: atoms unlike those of the training set are uncertain.

Zhu, Batzner, Musaelian, Kozinsky, "Fast uncertainty estimates in deep learning interatomic
potentials" (2023); Tan et al. (2023). A mixture is fitted to what the readout sees of the atoms of
the training set. The strangeness of an atom is its negative log-density above the least one of the
training set,

    u_i = max( -log p(x_i) - min_train( -log p ), 0 ),

which grows with the square of the distance from a component. Error bars are monotone in it,

    sigma_F,i^2 = a_F + b_F u_i,    sigma_E^2 = sum_i ( a_E + b_E u_i ),    a > 0, b >= 0,

with a and b of least Gaussian NLL on validation data. This goes on beyond the validation data,
where it matters: their order is that of u.
"""

import math
from dataclasses import astuple, dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from blips import keys
from blips.backbones.base import Backbone
from blips.bayes.noise import seeded_generator
from blips.data.dataset import TrainingData
from blips.data.graph import Graph
from blips.errors import InputError
from studies.baselines.last_layer import inputs_of, readout_of
from studies.baselines.learned import Learned, data_batches

LOG_RANGE = np.log(1e4)  # how far a and b may be from what each would be without the other


@dataclass(frozen=True)
class GaussianMixture:
    """C components in D dimensions, fitted by expectation maximisation.

        p(x) = sum_c w_c N(x; mu_c, Sigma_c)

    The covariances of few rows in many dimensions are singular: a multiple of the identity is
    added to them.
    """

    log_weights: Tensor  # [C]
    means: Tensor  # [C, D]
    cholesky: Tensor  # [C, D, D], lower factors of the covariances

    @classmethod
    def fit(
        cls,
        x: Tensor,
        components: int,
        *,
        seed: int = 0,
        regularisation: float = 1e-6,
        iterations: int = 200,
        tolerance: float = 1e-6,
    ) -> Self:
        """Fit to rows x [R, D] in float64, until a step gains less mean log-density than tolerance.

        `regularisation` is added to the diagonals, in units of the mean variance of the data.
        """
        x = x.double()
        if not 1 <= components <= len(x):
            raise InputError(f"{components} components for {len(x)} rows; expected 1 to {len(x)}")
        ridge = regularisation * x.var(dim=0, unbiased=False).mean().clamp(min=1e-300)
        distance = torch.cdist(x, _centres(x, components, seed))  # [R, C]
        share = torch.nn.functional.one_hot(distance.argmin(dim=1), components).double()
        mixture, before = cls._maximise(x, share, ridge), -math.inf
        for _ in range(iterations):
            joint = mixture._log_joint(x)  # [R, C]
            log_density = joint.logsumexp(dim=1)  # [R]
            gain, before = float(log_density.mean()) - before, float(log_density.mean())
            if gain < tolerance:
                break
            mixture = cls._maximise(x, (joint - log_density[:, None]).exp(), ridge)
        return mixture

    @classmethod
    def _maximise(cls, x: Tensor, share: Tensor, ridge: Tensor) -> Self:
        """Maximise the likelihood of x where row r belongs to component c by share [R, C]."""
        total = share.sum(dim=0).clamp(min=1e-12)  # [C]
        means = share.T @ x / total[:, None]
        centred = x - means[:, None]  # [C, R, D]
        covariances = (share.T[:, :, None] * centred).transpose(1, 2) @ centred
        covariances = covariances / total[:, None, None]
        covariances.diagonal(dim1=1, dim2=2).add_(ridge)
        return cls((total / len(x)).log(), means, torch.linalg.cholesky(covariances))

    def log_density(self, x: Tensor) -> Tensor:
        """Compute the log-density of rows [R, D], [R]."""
        return self._log_joint(x.double()).logsumexp(dim=1)

    def _log_joint(self, x: Tensor) -> Tensor:
        """Compute log( w_c N(x; mu_c, Sigma_c) ), [R, C]."""
        centred = (x - self.means[:, None]).transpose(1, 2)  # [C, D, R]
        whitened = torch.linalg.solve_triangular(self.cholesky, centred, upper=False)
        log_volume = self.cholesky.diagonal(dim1=1, dim2=2).log().sum(dim=1)  # [C]
        constant = 0.5 * x.shape[1] * math.log(2.0 * math.pi)
        log_normal = -0.5 * whitened.square().sum(dim=1) - (log_volume + constant)[:, None]
        return (log_normal + self.log_weights[:, None]).T


def _centres(x: Tensor, count: int, seed: int) -> Tensor:
    """Choose rows far apart: each next one by its squared distance to those before (k-means++)."""
    generator = seeded_generator("mixture", seed)
    chosen = [int(torch.randint(len(x), (), generator=generator))]
    for _ in range(count - 1):
        nearest = torch.cdist(x, x[chosen]).min(dim=1).values.square().cpu()
        chosen.append(int(torch.multinomial(nearest + 1e-300, 1, generator=generator)))
    return x[chosen]


def fit_variance(count: Tensor, strangeness: Tensor, error: Tensor) -> tuple[float, float]:
    """Fit a and b of the variance a * count + b * strangeness, of least Gaussian NLL, to [R]."""
    n, u, square = (t.double().cpu().numpy() for t in (count, strangeness, error.square()))
    alone = np.log([square.sum() / n.sum(), square.sum() / max(u.sum(), 1e-12)])

    def nll(log_parameters: np.ndarray) -> float:
        a, b = np.exp(log_parameters)
        var = a * n + b * u
        return float(np.mean(np.log(var) + square / var))

    bounds = [(value - LOG_RANGE, value + LOG_RANGE) for value in alone]
    found = minimize(nll, alone - np.log(2.0), method="Nelder-Mead", bounds=bounds)
    a, b = np.exp(found.x)
    return float(a), float(b)


def embeddings(backbone: Backbone, graph: Graph) -> Tensor:
    """Compute the readout's input for each atom, [N, F], without autograd's graph."""
    with torch.no_grad(), inputs_of(readout_of(backbone)) as seen:
        backbone(graph)
    return seen[-1]


class EmbeddingMixture(Learned):
    """Error bars for a trained potential from the density of its embeddings.

    `fit` trains the backbone, `condition` takes it as it is; the other arguments are those of
    `GaussianMixture.fit`.
    """

    kind: ClassVar = "gmm"
    learned: ClassVar = ("log_weights", "means", "cholesky", "least")
    log_weights: Tensor
    means: Tensor
    cholesky: Tensor
    least: Tensor  # -log p of the likeliest training atom

    def __init__(
        self,
        backbone: Backbone,
        components: int = 2,
        regularisation: float = 1e-6,
        seed: int = 0,
    ) -> None:
        settings = {"components": components, "regularisation": regularisation, "seed": seed}
        super().__init__(backbone, settings)

    def learn(self, train: TrainingData) -> None:
        """Fit the mixture to the embeddings of all atoms."""
        batches = data_batches(self.backbone, train)
        rows = torch.cat([embeddings(self.backbone, batch.graph) for batch in batches])
        mixture = GaussianMixture.fit(rows, **self.settings)
        self.log_weights, self.means, self.cholesky = astuple(mixture)
        self.least = -mixture.log_density(rows).max()

    def strangeness(self, graph: Graph) -> Tensor:
        """Compute u of each atom, [N]."""
        mixture = GaussianMixture(self.log_weights, self.means, self.cholesky)
        nll = -mixture.log_density(embeddings(self.backbone, graph))
        return (nll - self.least).clamp(min=0.0)

    def features(self, graph: Graph) -> dict[str, Tensor]:
        """Count the atoms that a label depends on, and sum their strangeness, P = 2."""
        by_atom = self.strangeness(graph)
        both = torch.stack([torch.ones_like(by_atom), by_atom], dim=1)  # [N, 2]
        by_component = both[:, None].expand(-1, 3, -1)
        return {keys.ENERGY: graph.sum_over_structures(both), keys.FORCES: by_component}

    def best_scale(self, features: Tensor, error: Tensor) -> tuple[float, float]:
        """Choose a and b."""
        return fit_variance(features[..., 0], features[..., 1], error)

    def stds(self, graph: Graph, *, forces: bool) -> dict[str, Tensor]:
        """Compute the std of each label from the strangeness of its atoms."""
        scales, features = self.scales, self.features(graph)
        return {
            f"{name}_std": (a * features[name][..., 0] + b * features[name][..., 1]).sqrt()
            for name, (a, b) in scales.items()
            if forces or name != keys.FORCES
        }
