"""Noise: how the weights of a pass are drawn, and the context that says so.

Three ways to evaluate a converted model:

    with mean(): ...                   # posterior means, the plain model (also the default)
    with use(SampledNoise(...)): ...   # fresh weights for every row (local or flipout estimator)
    with use(FrozenNoise(...)): ...    # the same draw for every row and every call

The active noise lives in a context variable: every thread has its own, nested contexts restore
the outer one, and so do contexts left by an exception.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from blips.bayes.random import BitSource, seeded_generator
from blips.bayes.weights import FrozenDraw, WeightNoise
from blips.errors import InputError

Estimator = Literal["auto", "local", "flipout"]
ESTIMATORS: tuple[str, ...] = get_args(Estimator)


@dataclass(frozen=True)
class Noise:
    """Coefficients of every Bayesian map, by NAME: [R] per map, R rows of one replica.

    Attributes:
        coefficients: alpha or beta of each map's rows; for K replicas either [R] (shared) or
            [K * R] (replica-major).
    """

    coefficients: Mapping[str, Tensor]

    @property
    def replicas(self) -> int:
        """K, the number of independent weight samples that one pass carries."""
        raise TypeError("use SampledNoise or FrozenNoise")

    def coefficients_of(self, name: str, rows: int) -> Tensor:
        """Coefficients [rows] of the map `name`; errors name what does not fit."""
        if name not in self.coefficients:
            raise InputError(
                f"no coefficients for the Bayesian map {name!r}; the inference network knows "
                f"{', '.join(self.coefficients) or 'none'}. Was it made for another model?"
            )
        coef = self.coefficients[name]
        if coef.ndim != 1:
            raise InputError(
                f"coefficients of {name!r} have shape {tuple(coef.shape)}; "
                "expected one number for each row, [rows]"
            )
        if coef.shape[0] * self.replicas == rows != coef.shape[0]:
            coef = coef.repeat(self.replicas)
        if coef.shape[0] != rows:
            raise InputError(
                f"{name!r} was applied to {rows} rows but has coefficients for {coef.shape[0]}; "
                "is it declared with the right row type (edge, node, ...)?"
            )
        return coef


@dataclass(frozen=True)
class SampledNoise(Noise):
    """Every row sees its own weights w ~ N(theta, coef theta^2).

    Attributes:
        generators: one per replica; the noise of replica k depends on generator k alone, so
            results do not depend on how many replicas run at once.
        estimator: "local", "flipout", or "auto": local on scalar rows, flipout where the
            features have an irrep axis (where local noise would break equivariance).
        weights: flipout's noise of the weights, where it is the same at every call; None draws
            it from the generators.
        shares_edges: what the lengths of edges decide is worked out once for all replicas
            (`blips.bayes.shared`); only first derivatives exist. Needs `weights`.
    """

    generators: Sequence[torch.Generator] = ()
    estimator: str = "auto"
    weights: WeightNoise | None = None
    shares_edges: bool = False

    def __post_init__(self) -> None:
        """Refuse unknown estimators and missing generators."""
        if self.estimator not in ESTIMATORS:
            raise InputError(
                f"unknown estimator {self.estimator!r}; use one of {', '.join(ESTIMATORS)} "
                "(frozen draws have a class of their own, FrozenNoise)"
            )
        if not self.generators:
            raise InputError(
                "sampling needs a torch.Generator for each replica; "
                "make them with blips.bayes.noise.generators(seed, count)"
            )

    @property
    def replicas(self) -> int:
        """K."""
        return len(self.generators)

    @cached_property
    def bits(self) -> BitSource:
        """Random bits for all maps of the pass."""
        return BitSource(self.generators)


@dataclass(frozen=True)
class FrozenNoise(Noise):
    """All rows and all calls share the draw: one smooth, conservative model per draw."""

    draws: Sequence[FrozenDraw] = (FrozenDraw(seed=0),)

    @property
    def replicas(self) -> int:
        """K."""
        return len(self.draws)

    def normal_like(self, name: str, weight: Tensor) -> Tensor:
        """[K, *weight.shape]."""
        return torch.stack([draw.normal_like(name, weight) for draw in self.draws])


_active: ContextVar[Noise | None] = ContextVar("blips_active_noise", default=None)


def active() -> Noise | None:
    """The noise of the current context; None means posterior means."""
    return _active.get()


@contextmanager
def use(noise: Noise | None) -> Generator[None]:
    """Evaluate Bayesian maps with `noise` inside the block, in this thread only."""
    token = _active.set(noise)
    try:
        yield
    finally:
        _active.reset(token)


def mean() -> AbstractContextManager[None]:
    """Evaluate Bayesian maps at their posterior means (MAP): the plain model."""
    return use(None)


def generators(
    seed: int, count: int, first: int = 0, device: torch.device | str = "cpu"
) -> list[torch.Generator]:
    """Generators of samples first, first + 1, ...: sample k is a function of (seed, k)."""
    return [seeded_generator("sample", seed, first + k, device=device) for k in range(count)]
