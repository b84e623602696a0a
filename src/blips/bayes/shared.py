"""What the samples of a prediction share: everything that the lengths of edges decide.

K samples of a structure have one geometry. A function f of the length r of an edge (the radial
basis, the widths that the inference network gives) has the same value in all of them; its gradient
has not, as each sample hands another one back. With the slope f'(r), made once,

    dE_k/dr += sum_c dE_k/df_c f'_c(r)

is all that a sample needs of it. A map of such rows is shared as well. Its flipout samples,

    z_k = f W^T + b + sqrt(coef) r_k ((s f) D^T),

differ in their signs r_k alone where samples with one deviation D also have the signs s in common:
they stay uncorrelated, and no matrix product is left for a sample, forward or backward.

For first derivatives: training goes the plain way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from blips.bayes.algebra import times_transposed
from blips.bayes.kernels import flip, shared_noise_, shared_slopes_
from blips.bayes.lazy import LazyRows

PIECE = 2**19
"""Elements of a product that is made at once (2 MB in single precision)."""


def with_slope(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Value and derivative of a function that acts on every element of x, [E] -> [E, ...].

    The gradient of <v, f(x)> is v f'(x), whose gradient by v is f'(x): no state that threads share.
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        value = function(x)
        probe = torch.zeros_like(value, requires_grad=True)
        (gradient,) = torch.autograd.grad(value, x, probe, create_graph=True)
        (slope,) = torch.autograd.grad(gradient.sum(), probe)
    return value.detach(), slope


@dataclass(frozen=True)
class EdgeRows(LazyRows):
    """Rows [K * E, C] that are functions of the lengths of E edges, the same for K samples.

    Attributes:
        value: of one sample, [E, C].
        slope: derivatives by the lengths, [E, C].
        length: of the edges of all samples, [K * E]; gradients go there.
    """

    value: Tensor
    slope: Tensor
    length: Tensor

    @classmethod
    def of(cls, function: Callable[[Tensor], Tensor], length: Tensor, samples: int) -> "EdgeRows":
        """Rows `function(length)`, from the first of `samples` equal blocks of lengths."""
        return cls(*with_slope(function, length[: len(length) // samples]), length)

    @property
    def shape(self) -> torch.Size:
        """[K * E, C]."""
        return torch.Size((len(self.length), self.value.shape[1]))

    def rows(self) -> Tensor:
        """The tensor, [K * E, C]."""
        return _Rows.apply(self.length, self.value, self.slope)  # pyright: ignore


def shared_flipout(
    h: EdgeRows,
    weight: Tensor,
    bias: Tensor | None,
    coef: Tensor,
    deviation: Tensor,
    group: Tensor,
    bits_in: Tensor,
    bits_out: Tensor,
) -> Tensor:
    """Flipout samples of a map of shared rows, [K * E, out].

    Args:
        h: the rows.
        weight: means W, [out, in]; no gradients reach it.
        bias: b, [out] or None.
        coef: relative variances, [K * E].
        deviation: D = W eps, [G, out, in].
        group: the deviation of each sample, [K] of int64.
        bits_in: signs s of each group, packed, [G * E, words, 1].
        bits_out: signs r of each sample, packed, [K * E, words, 1].
    """
    weights = (weight.detach(), None if bias is None else bias.detach(), deviation)
    inputs = (h.length, coef, h.value, h.slope, *weights, group, bits_in, bits_out)
    return _SharedFlipout.apply(*inputs)  # pyright: ignore


class _Rows(Function):
    """Value of every sample's rows; the gradient by the length is a product with the slope."""

    @staticmethod
    def forward(ctx: Any, length: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return value.repeat(len(length) // max(1, len(value)), 1)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        blocks = grads[0].view(-1, *slope.shape)
        return (blocks * slope).sum(-1).flatten(), None, None


class _SharedFlipout(Function):
    """``z = m + sqrt(coef) r u`` with ``m = f W^T + b`` and ``u = (s f) D^T``.

    Products are made for some rows at a time, which stay in the processor's cache, and are made
    again for the backward pass instead of kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        length: Tensor,
        coef: Tensor,
        value: Tensor,
        slope: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        deviation: Tensor,
        group: Tensor,
        bits_in: Tensor,
        bits_out: Tensor,
    ) -> Tensor:
        root = coef.sqrt()
        ctx.save_for_backward(root, value, slope, weight, deviation, group, bits_in, bits_out)
        z = value.new_empty(len(length), weight.shape[0])
        for rows in _pieces(len(value), weight.shape[0]):
            mean = F.linear(value[rows], weight, bias)  # [R, out]
            noise = _noise(value, rows, deviation, bits_in)  # [G * R, out]
            shared_noise_(z, rows.start, mean, noise, group, bits_out, root)
        return z

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        root, value, slope, weight, deviation, group, bits_in, bits_out = ctx.saved_tensors
        grad, by_length, by_root = (
            grads[0].contiguous(),
            torch.empty_like(root),
            torch.empty_like(root),
        )
        for rows in _pieces(len(value), weight.shape[0]):
            mean_slope = F.linear(slope[rows], weight)
            noise, noise_slope = (_noise(x, rows, deviation, bits_in) for x in (value, slope))
            slopes = (mean_slope, noise, noise_slope)
            shared_slopes_(by_length, by_root, rows.start, grad, *slopes, group, bits_out, root)
        return by_length, by_root.div_(root + root), *(None,) * 8


def _pieces(rows: int, width: int) -> list[slice]:
    """Parts of so many rows whose products have at most `PIECE` elements."""
    most = max(1, PIECE // width)
    return [slice(first, min(first + most, rows)) for first in range(0, rows, most)]


def _noise(x: Tensor, rows: slice, deviation: Tensor, bits_in: Tensor) -> Tensor:
    """``(s x) D^T`` of some rows for each of G deviations, [G * R, out]."""
    groups = len(deviation)
    bits = bits_in.view(groups, len(x), *bits_in.shape[1:])[:, rows].flatten(0, 1)
    return times_transposed(flip(x[rows].repeat(groups, 1), bits), deviation)
