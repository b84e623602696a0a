"""Fit the weights of `blips.spread` to a model's own samples: no labels needed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from ase import Atoms
from scipy.optimize import nnls
from scipy.stats import spearmanr

from blips.errors import InputError
from blips.onepass import OnePass
from blips.predict import Array, Prediction
from blips.spread import ALONE, ForceSpread, Ingredients, feature_names

FOLDS = 4
LEANING = 0.01  # of an element's weights on those of all atoms


class Teacher(Protocol):
    """What the fit needs of a Bayesian potential."""

    @property
    def predict(self) -> Callable[..., Prediction]:
        """(graph, **options) -> means and deviations of samples."""
        ...

    @property
    def one_pass(self) -> Callable[..., OnePass]:
        """(graph) -> first-order variances."""
        ...


class Lesson(NamedTuple):
    """One structure."""

    origin: int  # displaced copies share the number of what they are copies of
    displacement: float  # A
    numbers: Array  # atomic, [N]
    basis: Array  # [N, 3, 3, B]
    cov: Array  # [N, 3, 3] (eV/A)^2, of samples


def displaced_copies(
    structures: Sequence[Atoms], displacements: Sequence[float], seed: int
) -> Iterator[tuple[int, float, Atoms]]:
    """Number, s and structure: every one as it is and displaced by N(0, s^2) for each s (A)."""
    rng = np.random.default_rng(seed)
    for number, atoms in enumerate(structures):
        yield number, 0.0, atoms
        for std in displacements:
            moved = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=atoms.pbc)
            moved.positions += rng.normal(scale=std, size=moved.positions.shape)
            yield number, std, moved


def lesson(
    teacher: Teacher, graph: Any, samples: int, seed: int, origin: int, displacement: float
) -> Lesson:
    """Tensors and sampled covariance of one structure."""
    sampled = teacher.predict(graph, samples=samples, seed=seed, covariance=True, calibrated=False)
    basis = Ingredients.of(teacher.one_pass(graph)).basis().permute(1, 2, 3, 0).cpu().numpy()
    numbers = graph.numbers.cpu().numpy()
    return Lesson(origin, displacement, numbers, basis, sampled.array("forces_cov"))


def fit_spread(lessons: Sequence[Lesson]) -> ForceSpread:
    """Non-negative least squares; with four structures or more also their cross-validation."""
    if not lessons:
        raise InputError("no structures to learn from; give some that the model will be used for")
    return replace(_solve(lessons), quality=_quality(lessons))


def _solve(lessons: Sequence[Lesson]) -> ForceSpread:
    """Weights of all atoms, and of each element, which lean on those."""
    numbers = np.concatenate([one.numbers for one in lessons])  # [N]
    basis = np.concatenate([one.basis for one in lessons])  # [N, 3, 3, B]
    cov = np.concatenate([one.cov for one in lessons])  # [N, 3, 3]
    weights = _least_squares(basis, cov)
    groups = (len(weights) - ALONE) // len(feature_names(1)[:-ALONE])
    of_elements = {
        int(z): _least_squares(basis[numbers == z], cov[numbers == z], weights)
        for z in np.unique(numbers)
    }
    return ForceSpread(
        groups,
        tuple(map(float, weights)),
        {},
        {z: tuple(map(float, row)) for z, row in of_elements.items()},
    )


def _least_squares(basis: Array, cov: Array, near: Array | None = None) -> Array:
    """Weights >= 0 that minimise the mean of |Cov_i - model|^2 / (trace Cov_i)^2.

    With `near`, their squared distance from those weights is added, in units of the tensors' sizes:
    an element with few atoms stays close to all of them.
    """
    trace = np.trace(cov, axis1=1, axis2=2)
    moving = trace > 0
    scale = 1.0 / trace[moving, None, None]
    matrix = (basis[moving] * scale[..., None]).reshape(-1, basis.shape[-1])
    aim = (cov[moving] * scale).ravel()
    size = np.sqrt(np.square(matrix).mean(axis=0)) if len(matrix) else np.zeros(basis.shape[-1])
    size[size == 0] = 1.0
    matrix = matrix / size
    if near is not None:
        pull = np.sqrt(LEANING * len(matrix))
        matrix = np.concatenate([matrix, pull * np.eye(len(size))])
        aim = np.concatenate([aim, pull * near * size])
    found, _ = nnls(matrix, aim, maxiter=100 * matrix.shape[1])
    return found / size


def _quality(lessons: Sequence[Lesson]) -> dict[str, float]:
    """Of weights fitted to the other lessons: rank correlation and median ratio of sigma.

    For all of them and, as `far_...`, for the copies that were displaced the most.
    """
    if len({one.origin for one in lessons}) < FOLDS:
        return {}
    pairs: list[tuple[float, Array, Array]] = []  # displacement, found, sampled
    for fold in range(FOLDS):
        spread = _solve([one for one in lessons if one.origin % FOLDS != fold])
        for one in (one for one in lessons if one.origin % FOLDS == fold):
            weights = spread.of_atoms(torch.as_tensor(one.numbers)).numpy()
            cov = np.einsum("nijb,nb->nij", one.basis, weights)
            pairs.append((one.displacement, _diagonal(cov), _diagonal(one.cov)))
    most = max(displacement for displacement, _, _ in pairs)
    far = [pair for pair in pairs if pair[0] == most] if most > 0 else []
    found = {**_agreement(pairs), "atoms": float(sum(len(sigma) for _, sigma, _ in pairs))}
    return {**found, **{f"far_{name}": value for name, value in _agreement(far).items()}}


def _agreement(pairs: Sequence[tuple[float, Array, Array]]) -> dict[str, float]:
    if not pairs:
        return {}
    sigma, sampled = (np.concatenate([pair[k] for pair in pairs]).ravel() for k in (1, 2))
    rho = float(spearmanr(sigma, sampled).statistic)  # type: ignore[attr-defined]
    ratio = float(np.median(sigma / np.maximum(sampled, 1e-300)))
    return {"spearman": rho, "median_ratio": ratio}


def _diagonal(cov: Array) -> Array:
    return np.sqrt(np.diagonal(cov, axis1=1, axis2=2))
