"""The sum of PaiNN's messages over edges, by compiled code where only first derivatives are asked.

Written with torch, a message is a dozen passes over tensors [E, 3, F], most of which do not fit the
processor's cache. ``messages.c`` goes over the edges once, forward and backward. It is compiled
when the package is installed on a machine with a C compiler, and serves single precision on the
processor; training, which differentiates forces, and everything else take the formula of torch.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from blips.backbones.base import gather_rows, scatter_sum
from blips.backbones.derivatives import only_first_derivatives
from blips.bayes.compiled import address, is_for_compiled, load_library


def summed_messages(
    filters: Tensor, sent: Tensor, carried: Tensor | None, unit: Tensor, edges: Tensor
) -> tuple[Tensor, Tensor]:
    """What all atoms receive: scalars [N, F] and vectors [N, 3, F].

        scalars_i = sum_j f0 s0_j,    vectors_i = sum_j (f1 s1_j u + f2 carried_j)

    Args:
        filters: f0, f1 (and f2 where vectors are carried) of every edge, [E, 2F or 3F].
        sent: s0, s1 of every atom, [N, 2F].
        carried: vectors of every atom, [N, 3, F], or None.
        unit: direction of every edge, [E, 3].
        edges: receivers and senders, [2, E].
    """
    compiling = torch.compiler.is_compiling()
    if not compiling and only_first_derivatives() and is_for_compiled(filters) and library():
        return _Messages.apply(filters, sent, carried, unit, edges)  # pyright: ignore
    receiver, sender = edges
    atoms, width = len(sent), sent.shape[1] // 2
    direct, *gate = filters.split(2 * width, dim=1)  # [E, 2F], [E, F]
    to_scalars, along_unit = (direct * gather_rows(sent, sender)).split(width, dim=1)  # [E, F]
    to_vectors = along_unit[:, None] * unit[:, :, None]  # [E, 3, F]
    if carried is not None:
        to_vectors = to_vectors + gate[0][:, None] * gather_rows(carried, sender)
    return scatter_sum(to_scalars, receiver, atoms), scatter_sum(to_vectors, receiver, atoms)


class _Messages(Function):
    """`summed_messages` by ``messages.c``."""

    @staticmethod
    def forward(
        ctx: Any,
        filters: Tensor,
        sent: Tensor,
        carried: Tensor | None,
        unit: Tensor,
        edges: Tensor,
    ) -> tuple[Tensor, Tensor]:
        given = [None if x is None else x.contiguous() for x in (filters, sent, carried, unit)]
        ctx.save_for_backward(*given, edges)
        atoms, width = len(sent), sent.shape[1] // 2
        found = sent.new_zeros(atoms, width), sent.new_zeros(atoms, 3, width)
        _call("blips_messages", [*given, *edges, *found], len(filters), width)
        return found

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        filters, sent, carried, unit, edges = ctx.saved_tensors
        by_sent = torch.zeros_like(sent)
        by_carried = None if carried is None else torch.zeros_like(carried)
        found = torch.empty_like(filters), by_sent, by_carried, torch.empty_like(unit)
        given = [*(grad.contiguous() for grad in grads), filters, sent, carried, unit]
        sizes = len(filters), sent.shape[1] // 2
        _call("blips_messages_backward", [*given, *edges, *found], *sizes)
        return *found, None


def _call(name: str, tensors: list[Tensor | None], *sizes: int) -> None:
    getattr(library(), name)(*map(address, tensors), *sizes)


@cache
def library() -> ctypes.CDLL | None:
    """The compiled ``messages.c``; None where it was not built."""
    return load_library(Path(__file__).parent, "_messages", _declare)


def _declare(library: ctypes.CDLL) -> None:
    pointer, size = ctypes.c_void_p, ctypes.c_ssize_t
    library.blips_messages.argtypes = [pointer] * 8 + [size] * 2
    library.blips_messages_backward.argtypes = [pointer] * 12 + [size] * 2
