"""Fit weights of tensors, and a network, to a model's own samples: no labels needed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from ase import Atoms
from scipy.optimize import nnls
from scipy.stats import spearmanr
from torch import Tensor

from blips.backbones.base import Backbone, graph_batches
from blips.errors import InputError
from blips.onepass import OnePass
from blips.predict import Array, Prediction
from blips.spread.forces import ForceSpread
from blips.spread.network import Refinement, Scene
from blips.spread.tensors import Ingredients, feature_names, num_alone
from blips.spread.training import fit_refinement

FOLDS = 4
DISPLACEMENTS = (0.1, 0.3)  # of copies, A
MANY_DISPLACEMENTS = (0.05, *2 * (0.1, 0.15, 0.2, 0.25, 0.3))  # for a network
LEANING = 0.01  # of an element's weights on those of all atoms


class Teacher(Protocol):
    """What the fit needs of a Bayesian potential."""

    @property
    def backbone(self) -> Backbone:
        """The model, which says whether it has symmetry."""
        ...

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
    axes: bool = False  # whether the basis has tensors along the axes
    ingredients: Ingredients | None = None  # of the basis; a network needs them


class Pair(NamedTuple):
    """Deviations of the forces of one lesson, eV/A."""

    displacement: float
    found: Array  # [N, 3]
    sampled: Array


def distil_spread(
    teacher: Teacher,
    structures: Sequence[Atoms],
    samples: int,
    displacements: Sequence[float] | None,
    refine: bool,
    seed: int,
) -> ForceSpread:
    """Draw the lessons and fit; see `BayesianPotential.distil_forces`."""
    if not structures:
        raise InputError("no structures to learn from; give some that the model will be used for")
    if refine and len(structures) < FOLDS:
        raise InputError(
            f"a network needs {FOLDS} structures or more to learn from, one of them to check it; "
            "give more (better some tens), or leave out refine"
        )
    if displacements is None:
        displacements = _displacements(refine, teacher.backbone.equivariant)
    copies = displaced_copies(structures, displacements, seed)
    lessons = [
        lesson(teacher, graph, samples, _seed_of_lesson(seed, k), number, std)
        for k, (number, std, atoms) in enumerate(copies)
        for graph in graph_batches(teacher.backbone, atoms, 1)
    ]
    return fit_spread(lessons, refine)


def _seed_of_lesson(seed: int, k: int) -> int:
    """Samples of its own for every lesson.

    Samples with one seed share their weights: all lessons would err alike, a network would learn
    that error, and structures held out would confirm it.
    """
    return int(np.random.default_rng((seed, k)).integers(2**31))


def _displacements(refine: bool, equivariant: bool) -> tuple[float, ...]:
    """Of copies, A. A network that must learn without symmetry needs more of them."""
    if not refine:
        return DISPLACEMENTS
    return MANY_DISPLACEMENTS if equivariant else 2 * MANY_DISPLACEMENTS


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
    sampled = teacher.predict(
        graph,
        method="mc",
        samples=samples,
        seed=seed,
        covariance=True,
        calibrated=False,
    )
    axes = not teacher.backbone.equivariant
    ingredients = Ingredients.of(teacher.one_pass(graph), axes=axes).to("cpu")
    basis = ingredients.basis().permute(1, 2, 3, 0).numpy()
    numbers = ingredients.graph.numbers.numpy()
    cov = sampled.array("forces_cov")
    return Lesson(origin, displacement, numbers, basis, cov, axes, ingredients)


def fit_spread(lessons: Sequence[Lesson], refine: bool = False) -> ForceSpread:
    """Non-negative least squares; with four structures or more also their cross-validation.

    With `refine` also a network, if it ranks sigma of structures that it was not trained on better
    than the tensors alone do. The quality is then that on those structures.
    """
    spread = replace(_solve(lessons), quality=_quality(lessons))
    return _refined(spread, lessons) if refine else spread


def _refined(spread: ForceSpread, lessons: Sequence[Lesson]) -> ForceSpread:
    """With a network, if one that is trained on the other folds does better on the first."""
    rest, held = _split(lessons, 0)
    plain = _solve(rest)
    trial = replace(plain, refinement=_network(plain, rest))
    before, after = (_agreement(_pairs(which, held)) for which in (plain, trial))
    if after["spearman"] <= before["spearman"]:
        return spread
    return replace(spread, quality=after, refinement=_network(spread, lessons))


def _network(spread: ForceSpread, lessons: Sequence[Lesson]) -> Refinement:
    return fit_refinement([_scene(spread, one) for one in lessons], [one.cov for one in lessons])


def _solve(lessons: Sequence[Lesson]) -> ForceSpread:
    """Weights of all atoms, and of each element, which lean on those."""
    numbers = np.concatenate([one.numbers for one in lessons])  # [N]
    basis = np.concatenate([one.basis for one in lessons])  # [N, 3, 3, B]
    cov = np.concatenate([one.cov for one in lessons])  # [N, 3, 3]
    weights = _least_squares(basis, cov)
    axes = lessons[0].axes
    alone = num_alone(axes)
    groups = (len(weights) - alone) // (len(feature_names(1, axes)) - alone)
    of_elements = {
        int(z): _least_squares(basis[numbers == z], cov[numbers == z], weights)
        for z in np.unique(numbers)
    }
    return ForceSpread(
        groups,
        tuple(map(float, weights)),
        {},
        {z: tuple(map(float, row)) for z, row in of_elements.items()},
        axes,
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
    """Of weights fitted to the other lessons, see `_agreement`."""
    if len({one.origin for one in lessons}) < FOLDS:
        return {}
    pairs: list[Pair] = []
    for fold in range(FOLDS):
        rest, held = _split(lessons, fold)
        pairs += _pairs(_solve(rest), held)
    return _agreement(pairs)


def _split(lessons: Sequence[Lesson], fold: int) -> tuple[list[Lesson], list[Lesson]]:
    """Lessons of the other folds, and those of this one."""
    held = [one for one in lessons if one.origin % FOLDS == fold]
    return [one for one in lessons if one.origin % FOLDS != fold], held


def _pairs(spread: ForceSpread, lessons: Sequence[Lesson]) -> list[Pair]:
    """Deviations that a spread finds, beside those of the samples."""
    found: list[Pair] = []
    for one in lessons:
        cov = _covariance(spread, one)
        if spread.refinement is not None:
            with torch.no_grad():
                cov = spread.refinement(_scene(spread, one))
        found.append(Pair(one.displacement, _diagonal(cov.numpy()), _diagonal(one.cov)))
    return found


def _covariance(spread: ForceSpread, lesson: Lesson) -> Tensor:
    """Sum of the tensors, [N, 3, 3]."""
    weights = spread.of_atoms(torch.as_tensor(lesson.numbers))
    return torch.einsum("nijb,nb->nij", torch.as_tensor(lesson.basis), weights)


def _scene(spread: ForceSpread, lesson: Lesson) -> Scene:
    if lesson.ingredients is None:
        raise ValueError("a lesson without ingredients cannot teach a network")
    return lesson.ingredients.scene(_covariance(spread, lesson))


def _agreement(pairs: Sequence[Pair]) -> dict[str, float]:
    """Rank correlation and median ratio of sigma.

    For all copies and, as `far_...`, for those that were displaced the most.
    """
    most = max(pair.displacement for pair in pairs)
    far = [pair for pair in pairs if pair.displacement == most] if most > 0 else []
    found = {**_ranks(pairs), "atoms": float(sum(len(pair.found) for pair in pairs))}
    return {**found, **{f"far_{name}": value for name, value in _ranks(far).items()}}


def _ranks(pairs: Sequence[Pair]) -> dict[str, float]:
    if not pairs:
        return {}
    sigma = np.concatenate([pair.found for pair in pairs]).ravel()
    sampled = np.concatenate([pair.sampled for pair in pairs]).ravel()
    rho = float(spearmanr(sigma, sampled).statistic)  # type: ignore[attr-defined]
    ratio = float(np.median(sigma / np.maximum(sampled, 1e-300)))
    return {"spearman": rho, "median_ratio": ratio}


def _diagonal(cov: Array) -> Array:
    return np.sqrt(np.diagonal(cov, axis1=1, axis2=2))
