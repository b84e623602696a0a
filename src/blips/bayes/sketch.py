r"""The coordinates that weights are conditioned in: the weights themselves, or a sketch of them.

Weights w = theta + |theta| (P v) with v in R^d. Where the chosen weights are at most `dimension`,
P is the identity. Otherwise P hashes them into d buckets (count sketch, Charikar et al. 2002):
weight i shares the noise of bucket h(i), with the sign s(i) = +-1. Inner products of gradients
survive on average, E[(P^T a) . (P^T b)] = a . b, with a relative error of order 1 / sqrt(d).

The hash is integer arithmetic on (seed, i), the same on every machine and version of torch.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from blips.errors import InputError


@dataclass(frozen=True)
class Sketch:
    """P of some weight matrices."""

    shapes: Mapping[str, tuple[int, ...]]  # of matrices by name, in the order of coordinates
    dimension: int  # largest d
    seed: int = 0  # of the hash

    def __post_init__(self) -> None:
        """Refuse an empty choice and a dimension that is not positive."""
        if not self.shapes or self.dimension < 1:
            raise InputError(
                f"a sketch needs weights and a positive dimension; got {len(self.shapes)} "
                f"matrices and dimension {self.dimension}"
            )

    @property
    def num_weights(self) -> int:
        """Number of all weights."""
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def size(self) -> int:
        """d, the number of coordinates."""
        return min(self.num_weights, self.dimension)

    def gather(self, v: Tensor) -> dict[str, Tensor]:
        """Compute P v of all matrices, [K, d] -> [K, *shape] by name."""
        return {
            name: (v.index_select(1, bucket.to(v.device)) * sign.to(v)).view(-1, *self.shapes[name])
            for name, (bucket, sign) in self._buckets.items()
        }

    def scatter(self, values: Mapping[str, Tensor]) -> Tensor:
        """Compute P^T of all matrices' gradients [S, *shape], -> [S, d]; differentiable."""
        first = next(iter(values.values()))
        out = first.new_zeros(len(first), self.size)
        for name, value in values.items():
            bucket, sign = self._buckets[name]
            out = out.index_add(1, bucket.to(value.device), value.flatten(1) * sign.to(value))
        return out

    @cached_property
    def _buckets(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Bucket and sign of every weight of each matrix, [weights]."""
        index = torch.arange(self.num_weights)
        if self.num_weights <= self.dimension:
            bucket, sign = index, torch.ones_like(index)
        else:
            bits = _mixed(index + (_folded(self.seed) << 40))
            bucket = (bits >> 1) % self.dimension
            sign = 1 - 2 * (bits & 1)
        sizes = [prod(shape) for shape in self.shapes.values()]
        parts = zip(*(x.split_with_sizes(sizes) for x in (bucket, sign)), strict=True)
        return dict(zip(self.shapes, parts, strict=True))

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_buckets"}


def _folded(seed: int) -> int:
    """Hash a seed to a number below 2^22; smaller ones stay as they are."""
    if 0 <= seed < 2**22:
        return seed
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest()) % 2**22


def _mixed(x: Tensor) -> Tensor:
    """Hash int64 x to 62-bit numbers (the finaliser of SplitMix64 with 62 bits kept)."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        shifted = (x >> shift) & (2 ** (64 - shift) - 1)  # logically
        x = (x ^ shifted) * factor
    return x & (2**62 - 1)
