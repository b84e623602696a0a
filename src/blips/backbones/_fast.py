"""PaiNN's messages by compiled code, where only first derivatives are asked for.

Written with torch, a message is a dozen passes over tensors [E, 3, F], most of which do not fit the
processor's cache. ``messages.c`` goes over the edges once, forward and backward: energies are the
same to the last bit, and a prediction of 36 atoms takes half the time, whether of posterior means
or of the conditioned posterior (results/benchmarks/ablation.md). It is compiled when the package
is installed on a machine with a C compiler, called by ctypes, and serves single precision on the
processor. Training, which differentiates forces, and everything else take the formula of
`blips.backbones.painn`.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from blips.backbones.derivatives import first_only

MANY_THREADS = 4  # with more, torch's passes over a large tensor beat one pass on one thread
LARGE = 2**17  # elements of a tensor that torch spreads over threads with profit


def is_for_compiled(x: Tensor) -> bool:
    """Return whether the compiled code, on one thread, is available and fastest for x."""
    if torch.compiler.is_compiling() or not first_only.get():
        return False
    if x.dtype is not torch.float32 or not x.is_cpu or _library() is None:
        return False
    return x.numel() <= LARGE or torch.get_num_threads() <= MANY_THREADS


class CompiledMessages(Function):
    """Sum messages as `blips.backbones.painn.summed_messages` does."""

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
        edges = edges.contiguous()  # its rows are read by their addresses
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
    addresses = (None if x is None else x.data_ptr() for x in tensors)
    getattr(_library(), name)(*addresses, *sizes)


@cache
def _library() -> ctypes.CDLL | None:
    """Load the compiled ``messages.c``; None where it was not built."""
    pointer, size = ctypes.c_void_p, ctypes.c_ssize_t
    for path in Path(__file__).parent.glob("_messages*.so"):
        try:
            library = ctypes.CDLL(str(path))
            library.blips_messages.argtypes = [pointer] * 8 + [size] * 2
            library.blips_messages_backward.argtypes = [pointer] * 12 + [size] * 2
        except (OSError, AttributeError):  # of another machine, of another version
            continue
        return library
    return None
