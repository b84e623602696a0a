"""As many posterior samples as a standard deviation needs.

The deviation of K samples is itself uncertain. With the kurtosis kappa = m4 / m2^2 of the samples,

    relative standard error of sigma = 1/2 sqrt( (kappa - (K - 3)/(K - 1)) / K ),

1 / sqrt(2 (K - 1)) for normal samples. Samples are drawn in rounds until that of a typical energy,
force component, ... (the root mean square over all of a batch) is below a tolerance. Sample k is a
function of (seed, k), so the result is that of as many samples asked for by number.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blips.data.graph import Graph
from blips.errors import InputError
from blips.predict import Prediction
from blips.sampling import Moments, Sampler, sampled_outputs

FIRST_ROUND = 16  # samples before the first look: kurtosis from fewer says nothing
ROUND_TO = 8
NORMAL_KURTOSIS = 3.0


@dataclass(frozen=True)
class Tolerance:
    """When to stop drawing.

    Attributes:
        relative_error: of sigma, that a typical one shall have at most.
        max_samples: stop here in any case.
    """

    relative_error: float = 0.1
    max_samples: int = 512

    def __post_init__(self) -> None:
        """Refuse what no number of samples reaches."""
        if not 0 < self.relative_error < 1:
            raise InputError(
                f"tolerance={self.relative_error}: the relative error of a standard deviation is "
                "a number between 0 and 1, such as 0.1 (about 50 samples)"
            )
        if self.max_samples < 2:
            raise InputError(f"max_samples={self.max_samples}: a deviation needs at least 2")


class Tails:
    """Second to fourth central moments of samples that arrive in chunks (Pébay's update)."""

    def __init__(self) -> None:
        self.count = 0
        self._mean: Tensor | None = None
        self._sums: tuple[Tensor, Tensor, Tensor] | None = None  # of powers 2, 3, 4

    def add(self, samples: Tensor) -> None:
        """[K, ...]."""
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
        """Standard error of a typical sigma over sigma, never below that of normal samples."""
        count = self.count
        kurtosis = self.kurtosis.clamp_min(NORMAL_KURTOSIS)
        square = 0.25 * (kurtosis - (count - 3) / (count - 1)) / count
        return float(square.mean().sqrt())


def adaptive_monte_carlo(
    sampler: Sampler,
    graph: Graph,
    tolerance: Tolerance,
    *,
    method: str,
    chunk: int,
    covariance: bool = False,
) -> Prediction:
    """As `monte_carlo`, with the number of samples chosen.

    Args:
        sampler: evaluates the samples of a range of numbers as one replicated batch.
        graph: the structures.
        tolerance: when to stop.
        method: name for the result.
        chunk: at most so many samples at once.
        covariance: also the 3x3 covariance of the forces.

    Returns:
        Its `samples` is the number drawn; `details` has "sigma_relative_error", reached by each
        quantity, and "tolerance_reached".
    """
    moments, tails = Moments(covariance), dict[str, Tails]()
    drawn, goal = 0, min(FIRST_ROUND, tolerance.max_samples)
    errors: dict[str, float] = {}
    while drawn < goal:
        for outputs in sampled_outputs(sampler, graph, range(drawn, goal), chunk):
            moments.add(outputs)
            for name, value in outputs.items():
                tails.setdefault(name, Tails()).add(value)
        drawn = goal
        errors = {name: tail.relative_error() for name, tail in tails.items()}
        goal = _next_goal(drawn, max(errors.values()), tolerance)
    reached = max(errors.values()) <= tolerance.relative_error
    details = {"sigma_relative_error": errors, "tolerance_reached": reached}
    found = moments.prediction(graph, method=method, chunk=chunk)
    return replace(found, details={**found.details, **details})


def _next_goal(drawn: int, error: float, tolerance: Tolerance) -> int:
    """Samples in all after the next round: as many as the error so far asks for, at most double."""
    if error <= tolerance.relative_error:
        return drawn
    needed = drawn * (error / tolerance.relative_error) ** 2
    rounded = ROUND_TO * math.ceil(min(needed, 2 * drawn) / ROUND_TO)
    return min(max(rounded, drawn + ROUND_TO), tolerance.max_samples)


def joined_details(parts: list[Prediction]) -> Mapping[str, Any]:
    """Details of batches that were sampled each on its own, worst errors and all counts."""
    details = dict(parts[0].details)
    errors = [part.details["sigma_relative_error"] for part in parts]
    details["sigma_relative_error"] = {
        name: max(error[name] for error in errors) for name in errors[0]
    }
    details["tolerance_reached"] = all(part.details["tolerance_reached"] for part in parts)
    counts = [np.full(len(part), part.samples) for part in parts]
    details["samples_of_structures"] = np.concatenate(counts)
    return details
