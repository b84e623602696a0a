"""Noise of weights that predictions draw once and keep."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from blips.bayes.random import BitSource, normals, seeded_generator, sign_bits

Kept = dict[str, tuple[tuple[tuple[int, int], ...], Tensor]]
"""Deviations by name, each with what tells whether its weights are still the same."""

SHARING = 16
"""Consecutive samples of a prediction that share flipout's weight noise."""


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


class WeightNoise:
    """Deviations theta * eps of some samples, functions of (seed, number // SHARING, name).

    Samples that share one differ in their signs, which makes them uncorrelated, as rows are. So a
    small molecule's prediction reads fewer weights than it has samples. Predictions make the noise
    once and keep it while the weights stay the same: drawing it costs more than a pass. No
    gradients reach the weights.

    Args:
        seed: of the prediction.
        numbers: of the samples.
        kept: where the noise of these groups is kept; None makes it anew at every call, with the
            same result.
    """

    def __init__(self, seed: int, numbers: range, kept: Kept | None = None) -> None:
        self.seed, self.numbers, self.kept = seed, numbers, kept

    def deviation(
        self, name: str, weight: Tensor, parameters: Iterable[Tensor] | None = None
    ) -> Tensor:
        """Theta * eps, [G, *weight.shape], for K / G consecutive samples each.

        One for each sample where they are of several groups, not all of which are complete.

        Args:
            name: of the weight.
            weight: theta.
            parameters: that theta is computed from, where it is none itself; they tell whether
                it is still the same.
        """
        deviation = self.of_groups(name, weight, parameters)
        if len(deviation) in (1, len(self.numbers) / SHARING):
            return deviation
        return deviation[self.group_of_sample]

    def of_groups(
        self, name: str, weight: Tensor, parameters: Iterable[Tensor] | None = None
    ) -> Tensor:
        """Theta * eps of each group, [groups, *weight.shape]; arguments as for `deviation`."""
        sources = [weight] if parameters is None else parameters
        stamp = tuple((source.data_ptr(), source._version) for source in sources)
        kept_stamp, deviation = (self.kept or {}).get(name, (None, weight))
        if kept_stamp == stamp:
            return deviation
        streams = self._streams("weights", name, weight.device)
        deviation = weight.detach() * normals(weight.shape, streams, weight.dtype)
        if self.kept is not None:
            self.kept[name] = (stamp, deviation)
        return deviation

    @cached_property
    def group_of_sample(self) -> Tensor:
        """The group of each sample, counted from that of the first, [K]."""
        groups = torch.tensor([number // SHARING for number in self.numbers])
        return groups - groups[0]

    def input_signs(self, name: str, rows: int, channels: int, device: torch.device) -> Tensor:
        """Signs that the samples of a group have in common, packed, [groups * rows, words, 1]."""
        (bits,) = sign_bits(BitSource(self._streams("signs", name, device)), rows, channels)
        return bits

    def _streams(self, kind: str, name: str, device: torch.device) -> list[torch.Generator]:
        """A generator for each group."""
        return [
            seeded_generator(kind, self.seed, group, name, device=device)
            for group in groups_of(self.numbers)
        ]


def groups_of(numbers: range) -> range:
    """Groups that samples with these numbers belong to."""
    return range(numbers[0] // SHARING, numbers[-1] // SHARING + 1)


class NoiseStore:
    """Weight noise that predictions share: the newest, within a bound of bytes.

    Copies and pickles of a model start with an empty store.

    Args:
        weight_bytes: size of all weights that a sample draws.
        most_bytes: bound; noise that is larger is made at every call.
    """

    def __init__(self, weight_bytes: int, most_bytes: float = 2e8) -> None:
        self.most = int(most_bytes // max(1, weight_bytes))  # draws of all weights
        self._kept: dict[tuple[int, range], Kept] = {}  # by seed and groups
        self._draws: dict[tuple[int, int], FrozenDraw] = {}

    def draw(self, seed: int, member: int) -> FrozenDraw:
        """A frozen member's draw, from the store where it is there."""
        draw = self._draws.get((seed, member))
        if draw is None:
            while len(self._draws) >= max(1, self.most):
                self._draws.pop(next(iter(self._draws)), None)
            draw = self._draws[(seed, member)] = FrozenDraw(seed, member)
        return draw

    def get(self, seed: int, numbers: range) -> WeightNoise:
        """Noise of these samples, from the store where it is there."""
        groups = groups_of(numbers)
        if len(groups) > self.most:
            return WeightNoise(seed, numbers)
        kept = self._kept.get((seed, groups))
        if kept is None:
            keys = list(self._kept)
            while keys and len(groups) + sum(len(found) for _, found in keys) > self.most:
                self._kept.pop(keys.pop(0), None)
            kept = self._kept[seed, groups] = {}
        return WeightNoise(seed, numbers, kept)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_kept": {}, "_draws": {}}
