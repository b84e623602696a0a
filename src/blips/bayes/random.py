"""Random normals and random signs from explicit generators, one per replica.

Block k of every draw depends on generator k alone: the numbers are the same however many replicas
are drawn at once, and however many threads draw them.
"""

import hashlib
import math
from collections.abc import Sequence
from functools import cache
from threading import Thread

import torch
from torch import Tensor

from blips.bayes.kernels import SIGNS, random_values, random_words

STREAM = 2**16
"""Normals worth a thread; a longer draw is cut into streams of this size with their own seeds."""

AHEAD = 2**10
"""Pairs of words that a ``BitSource`` draws at least."""

QUANTILES = 2**16
"""Values that ``quick_normals`` draws from."""

Block = tuple[Tensor, torch.Generator]


def normals(
    shape: Sequence[int], generators: Sequence[torch.Generator], dtype: torch.dtype
) -> Tensor:
    """Draw standard normals ``[K, *shape]`` on the device of the K generators.

    A CPU generator is serial and slower than the matrix products around it. A long draw therefore
    takes only a seed from it; torch's threads fill streams whose seeds follow on from that one.
    """
    device = generators[0].device
    if len(generators) == 1 and math.prod(shape) <= STREAM:
        return torch.empty((1, *shape), dtype=dtype, device=device).normal_(generator=generators[0])
    noise = torch.empty((len(generators), math.prod(shape)), dtype=dtype, device=device)
    blocks = list(zip(noise, generators, strict=True))
    if device.type == "cpu" and noise.shape[1] > STREAM:
        blocks = [stream for block in blocks for stream in _streams(*block)]
    if device.type == "cpu" and noise.numel() > STREAM:
        _fill_in_threads(blocks)
    else:
        _fill(blocks)
    return noise.view(len(generators), *shape)


def seeded_generator(*key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Generator whose stream is a function of the key, the same on every machine."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(digest, "little") >> 1)
    return generator


class BitSource:
    """Random words of K replicas: a stream for each, whose seed its generator gives.

    Words are drawn ahead, so that one call serves many small maps.

    Args:
        generators: one per replica.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = generators
        self._seeds = torch.empty(len(generators), dtype=torch.int64, device=generators[0].device)
        for seed, generator in zip(self._seeds, generators, strict=True):
            seed.random_(-(2**63), None, generator=generator)
        self._words = torch.empty((len(generators), 0), dtype=torch.int32)
        self._drawn = self._taken = 0

    def take(self, count: int) -> Tensor:
        """The next words, ``[K, count]`` of int32."""
        if self._taken + count > self._words.shape[1]:
            pairs = max(AHEAD, -(-count // 2))
            self._words = random_words(self._seeds, self._drawn, pairs).view(torch.int32)
            self._drawn, self._taken = self._drawn + pairs, 0
        self._taken += count
        return self._words[:, self._taken - count : self._taken]

    def values(self, count: int, table: Tensor) -> Tensor:
        """Values of a table with 2^16, chosen by the next words, ``[K, count]``."""
        first = self._drawn
        self._drawn += -(-count // 4)
        return random_values(self._seeds, first, count, table)


def sign_bits(source: BitSource, rows: int, *channels: int) -> list[Tensor]:
    """Draw a fair bit per row and channel, packed into int32 words.

    Args:
        source: of the bits.
        rows: of each replica.
        channels: of one or several sets of signs.

    Returns:
        For each set, ``[K * rows, words, 1]``.
    """
    words = [-(-count // SIGNS) for count in channels]
    drawn = source.take(rows * sum(words))
    parts = drawn.split_with_sizes([rows * count for count in words], 1)
    return [part.reshape(-1, count, 1) for part, count in zip(parts, words, strict=True)]


def quick_normals(source: BitSource, rows: int, channels: int, dtype: torch.dtype) -> Tensor:
    """Draw standard normals ``[K * rows, channels]`` to 16 bits, faster than ``normals``.

    The normal distribution is cut into 65536 equally likely parts, and each is represented by its
    mean. The values have mean 0, variance 1, kurtosis 2.9998, and end at 4.39.
    """
    device = source.generators[0].device
    return source.values(rows * channels, _quantiles(dtype, device)).view(-1, channels)


@cache
def _quantiles(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Means of the normal distribution between its quantiles, scaled to unit variance."""
    levels = torch.linspace(-1, 1, QUANTILES + 1, dtype=torch.float64)
    ends = math.sqrt(2) * torch.erfinv(levels)  # from -inf to inf
    density = torch.exp(-0.5 * ends * ends) / math.sqrt(2 * math.pi)
    means = (density[:-1] - density[1:]) * QUANTILES
    return (means / means.square().mean().sqrt()).to(device, dtype)


def _streams(block: Tensor, generator: torch.Generator) -> list[Block]:
    seed = int(torch.randint(2**32, (), generator=generator))
    starts = range(0, len(block), STREAM)
    seeded = [torch.Generator().manual_seed(seed + number) for number in range(len(starts))]
    return [(block[i : i + STREAM], source) for i, source in zip(starts, seeded, strict=True)]


def _fill(blocks: Sequence[Block]) -> None:
    for block, generator in blocks:
        block.normal_(generator=generator)


def _fill_in_threads(blocks: Sequence[Block]) -> None:
    threads = min(torch.get_num_threads(), len(blocks))
    helpers = [Thread(target=_fill, args=(blocks[i::threads],)) for i in range(1, threads)]
    for helper in helpers:
        helper.start()
    _fill(blocks[::threads])
    for helper in helpers:
        helper.join()
