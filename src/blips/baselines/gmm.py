"""Gaussian mixture on the embeddings: atoms unlike those of the training set are uncertain.

Zhu, Batzner, Musaelian, Kozinsky, "Fast uncertainty estimates in deep learning interatomic
potentials" (2023); Tan et al. (2023). A mixture is fitted to what the readout sees of the atoms of
the training set. The strangeness of an atom is its negative log-density above the least one of the
training set,

    u_i = max( -log p(x_i) - min_train( -log p ), 0 ),

which grows with the square of the distance from a component. Error bars are monotone in it,

    sigma_F,i^2 = a_F + b_F u_i,    sigma_E^2 = sum_i ( a_E + b_E u_i ),    a > 0, b >= 0,

with a and b of least Gaussian NLL on validation data. Unlike an isotonic map this goes on beyond
the validation data, where it matters: their order is that of u.
"""

import math
from dataclasses import astuple, dataclass
from typing import ClassVar, Self, cast

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from blips import keys
from blips.backbones.base import Backbone
from blips.baselines.base import QUANTITIES, Learned, data_batches
from blips.baselines.last_layer import embeddings
from blips.bayes.noise import seeded_generator
from blips.data.batch import TrainingData
from blips.data.graph import Graph
from blips.errors import InputError
from blips.prediction import Prediction, point_prediction
from blips.train.objective import plain_outputs

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
        """Fit to rows x [R, D].

        Args:
            x: the data; computed in float64.
            components: C, at most R.
            seed: of the initial centres.
            regularisation: added to the covariances' diagonals, in units of the data's mean
                variance.
            iterations: at most so many steps.
            tolerance: stop when a step gains less mean log-density.
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


@dataclass(frozen=True)
class LinearVariance:
    """Variance a * count + b * strangeness."""

    a: float
    b: float

    @classmethod
    def fit(cls, count: Tensor, strangeness: Tensor, error: Tensor) -> "LinearVariance":
        """Fit a and b of least Gaussian NLL to counts, strangenesses and errors [R]."""
        n, u, square = (t.double().cpu().numpy() for t in (count, strangeness, error.square()))
        alone = np.log([square.sum() / n.sum(), square.sum() / max(u.sum(), 1e-12)])

        def nll(log_parameters: np.ndarray) -> float:
            a, b = np.exp(log_parameters)
            var = a * n + b * u
            return float(np.mean(np.log(var) + square / var))

        bounds = [(value - LOG_RANGE, value + LOG_RANGE) for value in alone]
        found = minimize(nll, alone - np.log(2.0), method="Nelder-Mead", bounds=bounds)
        a, b = np.exp(found.x)
        return cls(float(a), float(b))

    def std(self, count: Tensor | float, strangeness: Tensor) -> Tensor:
        """Compute the root of the variance."""
        return (self.a * count + self.b * strangeness).sqrt()


class EmbeddingMixture(Learned):
    """Error bars for a trained potential from the density of its embeddings.

    Args:
        backbone: the plain potential; `fit` trains it, `condition` takes it as it is.
        components: of the mixture.
        regularisation: of its covariances, in units of the embeddings' mean variance.
        seed: of the mixture's initial centres.
    """

    kind: ClassVar = "gmm"
    learned: ClassVar = ("log_weights", "means", "cholesky", "least")
    log_weights: Tensor | None
    means: Tensor | None
    cholesky: Tensor | None
    least: Tensor | None  # -log p of the likeliest training atom

    def __init__(
        self,
        backbone: Backbone,
        components: int = 2,
        regularisation: float = 1e-6,
        seed: int = 0,
    ) -> None:
        settings = {"components": components, "regularisation": regularisation, "seed": seed}
        super().__init__(backbone, settings)

    @property
    def mixture(self) -> GaussianMixture:
        """The density of the training set's embeddings; an error where it is not known yet."""
        if self.log_weights is None or self.means is None or self.cholesky is None:
            raise InputError("the mixture is not known yet; call fit or condition first")
        return GaussianMixture(self.log_weights, self.means, self.cholesky)

    @property
    def variances(self) -> dict[str, LinearVariance]:
        """Variances by quantity."""
        return {name: LinearVariance(*pair) for name, pair in self.scale_pairs.items()}

    def condition(self, train: TrainingData, valid: TrainingData) -> None:
        """Fit the mixture to training data, and the error bars to validation data."""
        batches = data_batches(self.backbone, train)
        rows = torch.cat([embeddings(self.backbone, batch.graph) for batch in batches])
        mixture = GaussianMixture.fit(rows, **self.settings)
        self.log_weights, self.means, self.cholesky = astuple(mixture)
        self.least = -mixture.log_density(rows).max()
        parts: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {name: [] for name in QUANTITIES}
        for graph, errors in self.errors(valid):
            by_atom = self.strangeness(graph)  # [N]
            for name, error in errors.items():
                parts[name].append((*_summed(name, by_atom, graph), error))
        self.scale_pairs = {
            name: astuple(LinearVariance.fit(*map(_flat, zip(*found, strict=True))))
            for name, found in parts.items()
            if found
        }

    def strangeness(self, graph: Graph) -> Tensor:
        """Compute u of each atom, [N]."""
        nll = -self.mixture.log_density(embeddings(self.backbone, graph))
        return (nll - cast(Tensor, self.least)).clamp(min=0.0)

    def predict_graph(
        self, graph: Graph, *, seed: int = 0, forces: bool = True, stress: bool = False
    ) -> Prediction:
        """Predict with std from the strangeness of the atoms."""
        by_atom = self.strangeness(graph)
        with torch.no_grad():
            arrays = dict(plain_outputs(self.backbone, graph, forces=forces, stress=stress))
        for name, variance in self.variances.items():
            if name in arrays:
                arrays[f"{name}_std"] = variance.std(*_summed(name, by_atom, graph))
        return point_prediction(arrays, graph, method=self.kind)


def _summed(name: str, by_atom: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
    """Sum atoms and their strangeness for each label: [S] energies, [N, 3] forces."""
    counts = torch.ones_like(by_atom)
    if name == keys.ENERGY:
        return graph.sum_over_structures(counts), graph.sum_over_structures(by_atom)
    return counts[:, None].expand(-1, 3), by_atom[:, None].expand(-1, 3)


def _flat(tensors: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
