"""Noise: how the weights of a pass are drawn, and the context that says so.

Three ways to evaluate a converted model:

    with mean(): ...                   # posterior means, the plain model (also the default)
    with use(SampledNoise(...)): ...   # fresh weights for every row (local or flipout estimator)
    with use(FrozenNoise(...)): ...    # the same draw for every row and every call

The active noise lives in a context variable: every thread has its own, nested contexts restore
the outer one, and so do contexts left by an exception.
"""

import hashlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from blips.bayes.random import BitSource, normals
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
    """

    generators: Sequence[torch.Generator] = ()
    estimator: str = "auto"
    weights: "WeightNoise | None" = None

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
        """Random signs for all maps of the pass."""
        return BitSource(self.generators)


SHARING = 8
"""Consecutive samples of a prediction that share flipout's weight noise."""


class WeightNoise:
    """Deviations theta * eps of some samples, functions of (seed, number // SHARING, name).

    Samples that share one differ in their signs, which makes them uncorrelated, as rows are. So a
    small molecule's prediction reads fewer weights than it has samples. Predictions make the noise
    once and keep it while the weights stay the same: drawing it costs more than a pass. No
    gradients reach the weights.

    Args:
        seed: of the prediction.
        numbers: of the samples.
        keep: False makes them anew at every call, with the same result.
    """

    def __init__(self, seed: int, numbers: range, *, keep: bool = True) -> None:
        self.seed, self.numbers, self.keep = seed, numbers, keep
        self._kept: dict[str, tuple[tuple[tuple[int, int], ...], Tensor]] = {}

    def deviation(
        self, name: str, weight: Tensor, parameters: Iterable[Tensor] | None = None
    ) -> Tensor:
        """Theta * eps, [G, *weight.shape], for K / G consecutive samples each.

        Args:
            name: of the weight.
            weight: theta.
            parameters: that theta is computed from, where it is none itself; they tell whether
                it is still the same.
        """
        sources = [weight] if parameters is None else parameters
        stamp = tuple((source.data_ptr(), source._version) for source in sources)
        kept_stamp, kept = self._kept.get(name, (None, weight))
        if kept_stamp == stamp:
            return kept
        groups = [number // SHARING for number in self.numbers]
        drawn = dict.fromkeys(groups)
        streams = [
            seeded_generator("weights", self.seed, group, name, device=weight.device)
            for group in drawn
        ]
        deviation = weight.detach() * normals(weight.shape, streams, weight.dtype)
        if len(groups) != SHARING * len(drawn):  # some group is incomplete
            deviation = deviation[[group - groups[0] for group in groups]]
        if self.keep:
            self._kept[name] = (stamp, deviation)
        return deviation


class NoiseStore:
    """Weight noise that predictions share: the newest, within a bound of bytes.

    Copies and pickles of a model start with an empty store.

    Args:
        weight_bytes: size of all weights that a sample draws.
        most_bytes: bound; noise that is larger is made at every call.
    """

    def __init__(self, weight_bytes: int, most_bytes: float = 2e8) -> None:
        self.most_samples = int(most_bytes // max(1, weight_bytes))
        self._kept: dict[tuple[int, range], WeightNoise] = {}
        self._draws: dict[tuple[int, int], FrozenDraw] = {}

    def draw(self, seed: int, member: int) -> "FrozenDraw":
        """A frozen member's draw, from the store where it is there."""
        draw = self._draws.get((seed, member))
        if draw is None:
            while len(self._draws) >= max(1, self.most_samples):
                self._draws.pop(next(iter(self._draws)), None)
            draw = self._draws[(seed, member)] = FrozenDraw(seed, member)
        return draw

    def get(self, seed: int, numbers: range) -> WeightNoise:
        """Noise of these samples, from the store where it is there."""
        key = (seed, numbers)
        kept = self._kept.get(key)
        if kept is not None:
            return kept
        noise = WeightNoise(seed, numbers, keep=len(numbers) <= self.most_samples)
        if noise.keep:
            keys = list(self._kept)
            while keys and len(numbers) + sum(len(n) for _, n in keys) > self.most_samples:
                self._kept.pop(keys.pop(0), None)
            self._kept[key] = noise
        return noise

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_kept": {}, "_draws": {}}


@dataclass(frozen=True)
class FrozenDraw:
    """One draw of standard normal numbers for every map, a function of (seed, member, name).

    The numbers of a map are made when it is first met and kept; making them again gives the same.
    """

    seed: int
    member: int = 0
    _drawn: dict[str, Tensor] = field(default_factory=dict[str, Tensor], repr=False, compare=False)

    def normal_like(self, name: str, weight: Tensor) -> Tensor:
        """Standard normal numbers of the shape, dtype and device of `weight`."""
        eps = self._drawn.get(name)
        if eps is None or eps.dtype != weight.dtype or eps.device != weight.device:
            generator = seeded_generator("frozen", self.seed, self.member, name)
            eps = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            eps = self._drawn[name] = eps.to(weight)
        return eps


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


def seeded_generator(*key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Generator whose stream is a function of the key, the same on every machine."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(digest, "little") >> 1)
    return generator


def generators(
    seed: int, count: int, first: int = 0, device: torch.device | str = "cpu"
) -> list[torch.Generator]:
    """Generators of samples first, first + 1, ...: sample k is a function of (seed, k)."""
    return [seeded_generator("sample", seed, first + k, device=device) for k in range(count)]
