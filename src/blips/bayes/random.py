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
"""A longer draw on the CPU is cut into streams of this many normals, each with its own seed."""

SIGNS = 32
"""Signs in one int32 word."""


def normals(
    shape: Sequence[int],
    generators: Sequence[torch.Generator],
    dtype: torch.dtype,
    std: float = 1.0,
) -> Tensor:
    """Draw normals ``[K, *shape]`` of mean 0 on the device of the K generators.

    A CPU generator is serial and slower than the matrix products around it. From a long draw it
    only takes a seed; torch's threads then fill streams whose seeds follow on from that one.
    """
    device = generators[0].device
    noise = torch.empty((len(generators), *shape), dtype=dtype, device=device)
    if noise.numel() <= STREAM * len(generators) or device.type != "cpu":
        for block, generator in zip(noise, generators, strict=True):
            block.normal_(std=std, generator=generator)
        return noise
    streams: list[tuple[Tensor, int]] = []
    for block, generator in zip(noise, generators, strict=True):
        seed = int(torch.randint(2**32, (), generator=generator))
        starts = range(0, block.numel(), STREAM)
        flat = block.view(-1)
        streams += [(flat[i : i + STREAM], seed + n) for n, i in enumerate(starts)]
    _fill_in_threads(streams, std)
    return noise


def sign_bits(rows: int, channels: int, generators: Sequence[torch.Generator]) -> Tensor:
    """Draw a fair bit per row and channel, packed into int32 words ``[K * rows, words, 1]``."""
    words = -(-channels // SIGNS)
    pairs = -(-rows * words // 2)  # an int64 draw costs no more than an int32 draw
    draws = torch.empty((len(generators), pairs), dtype=torch.int64, device=generators[0].device)
    for block, generator in zip(draws, generators, strict=True):
        block.random_(-(2**63), None, generator=generator)
    return draws.view(torch.int32)[:, : rows * words].reshape(-1, words, 1)


def with_signs(magnitude: Tensor, bits: Tensor, channels: int) -> Tensor:
    """Give ``magnitude >= 0`` (``[rows, 1]`` or ``[1]``) random signs: ``[rows, channels]``.

    Shifts by 0..31 bring every bit of a word to the place of a float's sign bit.
    """
    signs = (bits << _shifts(bits.device)).view(torch.float32).flatten(1)
    if signs.shape[1] > channels:
        signs = signs[:, :channels]
    return torch.copysign(magnitude, signs, out=signs if signs.dtype == magnitude.dtype else None)


@cache
def _shifts(device: torch.device) -> Tensor:
    return torch.arange(SIGNS, dtype=torch.int32, device=device)


def _fill_in_threads(streams: Sequence[tuple[Tensor, int]], std: float) -> None:
    def fill(part: Sequence[tuple[Tensor, int]]) -> None:
        for stream, seed in part:
            stream.normal_(std=std, generator=torch.Generator().manual_seed(seed))

    threads = min(torch.get_num_threads(), len(streams))
    helpers = [Thread(target=fill, args=(streams[i::threads],)) for i in range(1, threads)]
    for helper in helpers:
        helper.start()
    fill(streams[::threads])
    for helper in helpers:
        helper.join()
