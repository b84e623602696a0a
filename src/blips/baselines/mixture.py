"""Gaussian mixtures with full covariances, fitted by expectation maximisation.

    p(x) = sum_c w_c N(x; mu_c, Sigma_c)

The covariances of few rows in many dimensions are singular: a multiple of the identity is added.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from blips.bayes.noise import seeded_generator
from blips.errors import InputError


@dataclass(frozen=True)
class GaussianMixture:
    """C components in D dimensions."""

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
        """log( w_c N(x; mu_c, Sigma_c) ), [R, C]."""
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
