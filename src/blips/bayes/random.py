"""Random normals and random signs from explicit generators, one per replica.

Block k of every draw depends on generator k alone: the numbers are the same however many replicas
are drawn at once, and however many threads draw them.
"""

from collections.abc import Sequence
from threading import Thread

import torch
from torch import Tensor

STREAM = 2**16
"""A longer draw on the CPU is cut into streams of this many normals, each with its own seed."""

SIGNS = 32
"""Signs in one int32 word."""


def normals(
    shape: Sequence[int], generators: Sequence[torch.Generator], dtype: torch.dtype
) -> Tensor:
    """Draw standard normals ``[K, *shape]`` on the device of the K generators.

    A CPU generator is serial and slower than the matrix products around it. From a long draw it
    only takes a seed; torch's threads then fill streams whose seeds follow on from that one.
    """
    device = generators[0].device
    noise = torch.empty((len(generators), *shape), dtype=dtype, device=device)
    if noise[0].numel() <= STREAM or device.type != "cpu":
        for block, generator in zip(noise, generators, strict=True):
            block.normal_(generator=generator)
    else:
        _fill_in_threads(
            [
                (stream, seed + number)
                for block, seed in zip(noise, _seeds(generators), strict=True)
                for number, stream in enumerate(block.view(-1).split(STREAM))
            ]
        )
    return noise


def sign_bits(rows: int, channels: int, generators: Sequence[torch.Generator]) -> Tensor:
    """Draw one fair bit per row and channel, packed into int32 words ``[K * rows, words]``."""
    words = -(-channels // SIGNS)
    pairs = -(-rows * words // 2)  # int64 draws cost no more than int32 draws
    draws = torch.empty(len(generators), pairs, dtype=torch.int64, device=generators[0].device)
    for block, generator in zip(draws, generators, strict=True):
        block.random_(-(2**63), None, generator=generator)
    return draws.view(torch.int32)[:, : rows * words].reshape(-1, words)


def with_signs(magnitude: Tensor, bits: Tensor, channels: int) -> Tensor:
    """Give ``magnitude >= 0`` (``[rows, 1]`` or a scalar) the signs of ``[rows, channels]`` bits.

    Shifting a word by 0..31 brings each of its bits to the sign bit of a float in turn.
    """
    if magnitude.dtype != torch.float32:
        signs = with_signs(torch.ones((), device=bits.device), bits, channels)
        return magnitude * signs.to(magnitude.dtype)
    shifts = torch.arange(SIGNS, dtype=torch.int32, device=bits.device)
    words = (bits.unsqueeze(-1) << shifts).flatten(1).narrow(1, 0, channels)
    return torch.copysign(magnitude, words.view(torch.float32))


def _seeds(generators: Sequence[torch.Generator]) -> list[int]:
    draws = [torch.randint(2**32, (), generator=generator) for generator in generators]
    return [int(draw) for draw in draws]


def _fill(streams: Sequence[tuple[Tensor, int]]) -> None:
    for stream, seed in streams:
        stream.normal_(generator=torch.Generator().manual_seed(seed))


def _fill_in_threads(streams: Sequence[tuple[Tensor, int]]) -> None:
    threads = min(torch.get_num_threads(), len(streams))
    helpers = [Thread(target=_fill, args=(streams[i::threads],)) for i in range(1, threads)]
    for helper in helpers:
        helper.start()
    _fill(streams[::threads])
    for helper in helpers:
        helper.join()
