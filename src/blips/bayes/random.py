"""Random normals and random signs from explicit generators, one per replica.

Block k of every draw depends on generator k alone: the numbers are the same however many replicas
are drawn at once, and however many threads draw them.
"""

from collections.abc import Sequence
from functools import cache
from threading import Thread

import torch
from torch import Tensor

STREAM = 2**16
"""Normals worth a thread; a longer draw is cut into streams of this size with their own seeds."""

SIGN_BIT = -(2**31)
"""The sign of a single-precision float, as an int32."""

SIGNS = 32
"""Signs in one int32 word."""


def normals(
    shape: Sequence[int],
    generators: Sequence[torch.Generator],
    dtype: torch.dtype,
    std: float = 1.0,
) -> Tensor:
    """Draw normals ``[K, *shape]`` of mean 0 on the device of the K generators.

    A CPU generator is serial and slower than the matrix products around it. A long draw therefore
    takes only a seed from it; torch's threads fill streams whose seeds follow on from that one.
    """
    device = generators[0].device
    noise = torch.empty((len(generators), *shape), dtype=dtype, device=device)
    blocks = list(zip(noise.flatten(1), generators, strict=True))
    if device.type != "cpu":
        _fill(blocks, std)
    elif noise[0].numel() <= STREAM:
        _fill_in_threads(blocks, std)
    else:
        _fill_in_threads([stream for block in blocks for stream in _streams(*block)], std)
    return noise


def sign_bits(
    rows: int, channels: Sequence[int], generators: Sequence[torch.Generator]
) -> Sequence[Tensor]:
    """Draw a fair bit per row and channel for several layers of channels at once.

    Returns:
        The bits of each layer, packed into int32 words ``[K * rows, words, 1]``.
    """
    words = [-(-count // SIGNS) for count in channels]
    pairs = -(-rows * sum(words) // 2)  # an int64 draw costs no more than an int32 draw
    draws = torch.empty((len(generators), pairs), dtype=torch.int64, device=generators[0].device)
    for block, generator in zip(draws, generators, strict=True):
        block.random_(-(2**63), None, generator=generator)
    bits = draws.view(torch.int32)[:, : rows * sum(words)].split_with_sizes(
        [rows * w for w in words], 1
    )
    return [layer.reshape(-1, w, 1) for layer, w in zip(bits, words, strict=True)]


def sign_mask(bits: Tensor, channels: int) -> Tensor:
    """Unpack bits to ``[rows, channels]`` of int32: the sign bit of a float, set or not.

    Shifts by 0..31 bring every bit of a word to the place of the sign bit.
    """
    words = (bits << _shifts(bits.device)).flatten(1)
    mask = words if words.shape[1] == channels else words[:, :channels].contiguous()
    return mask.bitwise_and_(SIGN_BIT)


@cache
def _shifts(device: torch.device) -> Tensor:
    return torch.arange(SIGNS, dtype=torch.int32, device=device)


def _streams(block: Tensor, generator: torch.Generator) -> list[tuple[Tensor, torch.Generator]]:
    seed = int(torch.randint(2**32, (), generator=generator))
    starts = range(0, len(block), STREAM)
    seeded = [torch.Generator().manual_seed(seed + number) for number in range(len(starts))]
    return [(block[i : i + STREAM], source) for i, source in zip(starts, seeded, strict=True)]


def _fill(blocks: Sequence[tuple[Tensor, torch.Generator]], std: float) -> None:
    for block, generator in blocks:
        block.normal_(std=std, generator=generator)


def _fill_in_threads(blocks: Sequence[tuple[Tensor, torch.Generator]], std: float) -> None:
    size = sum(len(block) for block, _ in blocks)
    threads = max(1, min(torch.get_num_threads(), size // STREAM))
    helpers = [Thread(target=_fill, args=(blocks[i::threads], std)) for i in range(1, threads)]
    for helper in helpers:
        helper.start()
    _fill(blocks[::threads], std)
    for helper in helpers:
        helper.join()
