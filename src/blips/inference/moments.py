r"""Moments of posterior samples that arrive in chunks, in float64.

    mean = 1/K sum_k y_k,    std = sqrt( 1/(K-1) sum_k (y_k - mean)^2 )

The standard deviation of K samples is itself uncertain. With the kurtosis kappa = m4 / m2^2,

    relative standard error of the std = 1/2 sqrt( (kappa - (K - 3)/(K - 1)) / K ),

1 / sqrt(2 (K - 1)) for normal samples.
"""

import numpy as np
import torch
from torch import Tensor

from blips import keys
from blips.data.graph import Graph
from blips.errors import InputError
from blips.prediction import Array, Outputs, Prediction

NORMAL_KURTOSIS = 3.0


class RunningMoments:
    """Mean and variance of one quantity (Chan's update)."""

    def __init__(self, covariance: bool = False) -> None:
        self.count = 0
        self.covariance = covariance
        self._mean: Tensor | None = None
        self._squares: Tensor | None = None

    def add(self, samples: Tensor) -> None:
        """Add samples [K, ...], or [K, ..., 3] with `covariance` over the last axis."""
        samples = samples.detach().double()
        count, mean = samples.shape[0], samples.mean(0)
        squares = self._outer(samples - mean).sum(0)
        if self._mean is None or self._squares is None:
            self.count, self._mean, self._squares = count, mean, squares
            return
        total = self.count + count
        shift = mean - self._mean
        self._squares = self._squares + squares + self._outer(shift) * (self.count * count / total)
        self._mean = self._mean + shift * (count / total)
        self.count = total

    def _outer(self, deviation: Tensor) -> Tensor:
        if self.covariance:
            return deviation[..., :, None] * deviation[..., None, :]
        return deviation.square()

    @property
    def mean(self) -> Array:
        """[...]."""
        if self._mean is None:
            raise InputError("no samples were drawn; ask for at least one")
        return self._mean.cpu().numpy()

    @property
    def var(self) -> Array:
        """(K-1)-normalised variance, or covariance, [...]."""
        if self._squares is None or self.count < 2:
            raise InputError(f"a standard deviation needs at least 2 samples, got {self.count}")
        return (self._squares / (self.count - 1)).cpu().numpy()


class Tails:
    """Second to fourth central moments of one quantity (Pébay's update)."""

    def __init__(self) -> None:
        self.count = 0
        self._mean: Tensor | None = None
        self._sums: tuple[Tensor, Tensor, Tensor] | None = None  # of powers 2, 3, 4

    def add(self, samples: Tensor) -> None:
        """Add samples [K, ...]."""
        samples = samples.detach().double()
        count, mean = samples.shape[0], samples.mean(0)
        d = samples - mean
        square = d.square()
        sums = (square.sum(0), (square * d).sum(0), square.square().sum(0))
        if self._mean is None or self._sums is None:
            self.count, self._mean, self._sums = count, mean, sums
            return
        a, b, total = self.count, count, self.count + count
        (a2, a3, a4), (b2, b3, b4) = self._sums, sums
        step = mean - self._mean
        m2 = a2 + b2 + step**2 * (a * b / total)
        m3 = a3 + b3 + step**3 * (a * b * (a - b) / total**2)
        m3 = m3 + 3 * step * (a * b2 - b * a2) / total
        m4 = a4 + b4 + step**4 * (a * b * (a * a - a * b + b * b) / total**3)
        m4 = m4 + 6 * step**2 * (a * a * b2 + b * b * a2) / total**2
        m4 = m4 + 4 * step * (a * b3 - b * a3) / total
        self.count, self._mean, self._sums = total, self._mean + step * (b / total), (m2, m3, m4)

    @property
    def kurtosis(self) -> Tensor:
        """m4 / m2^2, [...]; that of normal numbers where nothing varies."""
        if self._sums is None:
            raise InputError("no samples were drawn; ask for at least one")
        m2, _, m4 = self._sums
        normal = torch.full_like(m2, NORMAL_KURTOSIS)
        return torch.where(m2 > 0, self.count * m4 / m2.square().clamp_min(1e-300), normal)

    def relative_error(self) -> float:
        """Relative standard error of a typical std, never below that of normal samples."""
        count = self.count
        kurtosis = self.kurtosis.clamp_min(NORMAL_KURTOSIS)
        square = 0.25 * (kurtosis - (count - 3) / (count - 1)) / count
        return float(square.mean().sqrt())


class Moments:
    """Running moments of every output of a model.

    Args:
        covariance: also the 3x3 covariance of the forces.
    """

    def __init__(self, covariance: bool = False) -> None:
        self.covariance = covariance
        self._of: dict[str, RunningMoments] = {}

    def add(self, outputs: Outputs) -> None:
        """Add samples, [K, ...] of each output."""
        for name, value in outputs.items():
            wants_covariance = self.covariance and name == keys.FORCES
            self._of.setdefault(name, RunningMoments(wants_covariance)).add(value)

    def prediction(self, graph: Graph, *, method: str, chunk: int) -> Prediction:
        """Return means and standard deviations."""
        arrays: dict[str, Array] = {}
        for name, moment in self._of.items():
            arrays[name] = moment.mean
            if moment.covariance:
                arrays[f"{name}_cov"] = moment.var
                arrays[f"{name}_std"] = np.sqrt(np.diagonal(moment.var, axis1=-2, axis2=-1))
            else:
                arrays[f"{name}_std"] = np.sqrt(moment.var)
        return Prediction.of(
            arrays,
            n_atoms=graph.node_counts().numpy(force=True),
            method=method,
            samples=max(moment.count for moment in self._of.values()),
            details={"chunk": chunk},
        )
