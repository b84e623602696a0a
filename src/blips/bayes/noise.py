"""Noise: how the weights of a pass are drawn, and the context that says so.

Three ways to evaluate a converted model, whose rows have these coefficients:

    with use(None): ...                             # posterior means, the plain model (the default)
    with use(Noise(coefficients, generators)): ...  # fresh weights for every row
    with use(Noise(coefficients, draws)): ...       # the same draw for every row and every call

The active noise lives in a context variable: every thread has its own, nested contexts restore
the outer one, and so do contexts left by an exception.
"""

import hashlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blips.bayes.estimators import flipout_linear, frozen_linear, local_linear
from blips.errors import InputError

ESTIMATORS = ("auto", "local", "flipout")


@dataclass(frozen=True)
class FrozenDraw:
    """One draw of standard normals for every matrix, a function of (seed, member, name).

    The normals of a matrix are made when it is first met, and kept.
    """

    seed: int
    member: int = 0
    _drawn: dict[str, Tensor] = field(default_factory=dict[str, Tensor], repr=False, compare=False)

    def normal_like(self, name: str, weight: Tensor) -> Tensor:
        """Return standard normals of the shape, dtype and device of `weight`."""
        eps = self._drawn.get(name)
        wanted = (weight.shape, weight.dtype, weight.device)
        if eps is None or (eps.shape, eps.dtype, eps.device) != wanted:
            generator = seeded_generator("frozen", self.seed, self.member, name)
            eps = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            eps = self._drawn[name] = eps.to(weight)
        return eps


Source = torch.Generator | FrozenDraw


@dataclass(frozen=True)
class Noise:
    """Coefficients (alpha, beta) of every Bayesian map's rows, and a source of noise for each of K.

    With generators every row sees its own weights w ~ N(theta, coef theta^2); with frozen draws all
    rows and all calls share theirs: one smooth, conservative model per draw. Replicas depend on
    their own sources alone, so results do not depend on how many run at once.

    The estimator for generators is "local", "flipout", or "auto": local on scalar rows, flipout
    where features have an irrep axis (where local noise would break equivariance).
    """

    coefficients: Mapping[str, Tensor]  # by name, [K R] or, for all replicas, [R]
    sources: Sequence[Source]
    estimator: str = "auto"

    def coefficients_of(self, name: str, rows: int) -> Tensor:
        """Return coefficients [rows] of the map `name`; errors name what does not fit."""
        if name not in self.coefficients:
            raise InputError(
                f"no coefficients for the Bayesian map {name!r}; the inference network knows "
                f"{', '.join(self.coefficients) or 'none'}. Was it made for another model?"
            )
        coef = self.coefficients[name]
        if coef.shape[0] * len(self.sources) == rows != coef.shape[0]:  # of one graph, for replicas
            coef = coef.repeat(len(self.sources))
        if coef.shape[0] != rows:
            raise InputError(
                f"{name!r} was applied to {rows} rows but has coefficients for {coef.shape[0]}; "
                "is it declared with the right row type (edge, node, ...)?"
            )
        return coef

    def linear(
        self, name: str, h: Tensor, weight: Tensor, bias: Tensor | None, coef: Tensor
    ) -> Tensor:
        """Apply one matrix with weights drawn from N(weight, coef weight^2), coef [rows].

        [rows, *irrep, in] -> [rows, *irrep, out]; every matrix of a model has a name of its own.
        """
        if draws := [one for one in self.sources if not isinstance(one, torch.Generator)]:
            eps = torch.stack([draw.normal_like(name, weight) for draw in draws])
            return frozen_linear(h, weight, bias, coef, eps)
        has_irrep_axis = h.ndim > 2
        if self.estimator == "local" and has_irrep_axis:
            raise InputError(
                f"the local estimator cannot be used on {name!r}: its input {tuple(h.shape)} has "
                "an irrep axis, and noise drawn per component breaks equivariance. Use "
                'estimator="flipout", or "auto" (local on scalars, flipout elsewhere), or leave '
                "the map deterministic with exclude=..."
            )
        flips = self.estimator == "flipout" or has_irrep_axis
        estimator = flipout_linear if flips else local_linear
        generators = [one for one in self.sources if isinstance(one, torch.Generator)]
        return estimator(h, weight, bias, coef, generators)


_active: ContextVar[Noise | None] = ContextVar("blips_active_noise", default=None)


def active() -> Noise | None:
    """Return the noise of the current context; None means posterior means."""
    return _active.get()


@contextmanager
def use(noise: Noise | None) -> Generator[None]:
    """Evaluate Bayesian maps with `noise` inside the block, in this thread only."""
    token = _active.set(noise)
    try:
        yield
    finally:
        _active.reset(token)


def seeded_generator(*key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Make a generator whose stream is a function of the key, the same on every machine."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(digest, "little") >> 1)
    return generator


def generators(
    seed: int, count: int, first: int = 0, device: torch.device | str = "cpu"
) -> list[torch.Generator]:
    """Make generators of samples first, first + 1, ...: sample k is a function of (seed, k)."""
    return [seeded_generator("sample", seed, first + k, device=device) for k in range(count)]
