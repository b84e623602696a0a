"""Rows in pieces that stay in the processor's cache, and together again."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from blips.errors import InputError

T = TypeVar("T")

PIECE = 2**20
"""Largest number of elements in the input or output of a piece (4 MB in single precision)."""


class Plan:
    """How K blocks of R rows are cut into pieces: parts of one replica, or several whole ones.

    The cut of a replica depends on the shape of its own rows, never on K: neither does its noise.
    """

    def __init__(self, h: Tensor, weight: Tensor, replicas: int) -> None:
        rows = h.shape[0]
        if replicas == 0 or rows % replicas:
            raise InputError(
                f"{rows} rows cannot be split into {replicas} replicas of equal size; "
                "repeat the whole input once per replica."
            )
        self.rows_per_replica = rows // replicas
        width = math.prod(h.shape[1:-1]) * max(weight.shape)
        most = max(1, PIECE // width)  # rows of a piece
        group = max(1, most // max(1, self.rows_per_replica))  # replicas of a piece
        self._groups = _cut(replicas, group)
        self._parts = _cut(self.rows_per_replica, most)
        self._sizes = [k * rows for k in self._groups for rows in self._parts]

    @property
    def is_whole(self) -> bool:
        """Whether all rows are one piece."""
        return len(self._sizes) == 1

    def rows(self, x: Tensor) -> Sequence[Tensor]:
        """Cut ``[K*R, ...]`` into the rows of each piece."""
        return (x,) if self.is_whole else x.split_with_sizes(self._sizes)

    def replicas(self, take: Callable[[slice], T]) -> Sequence[T]:
        """Take for each piece what belongs to its replicas; pieces of one replica share it."""
        ends = accumulate(self._groups)
        taken = [take(slice(end - k, end)) for k, end in zip(self._groups, ends, strict=True)]
        return [item for item in taken for _ in self._parts]

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Put the rows of all pieces together."""
        return pieces[0] if self.is_whole else _join(self._sizes, pieces)


def _cut(total: int, most: int) -> list[int]:
    """Cut ``total`` into as few near-equal sizes as possible, none above ``most``."""
    parts = max(1, -(-total // most))
    return [(total + i) // parts for i in range(parts)]


class _Join(Function):
    """Concatenate rows. The gradient is one split, where that of ``torch.cat`` is many slices."""

    @staticmethod
    def forward(ctx: Any, sizes: list[int], *pieces: Tensor) -> Tensor:
        ctx.sizes = sizes
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *grads[0].split_with_sizes(ctx.sizes)


def _join(sizes: list[int], pieces: Sequence[Tensor]) -> Tensor:
    return _Join.apply(sizes, *pieces)  # pyright: ignore
