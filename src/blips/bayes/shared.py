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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from blips.bayes.algebra import times_transposed
from blips.bayes.kernels import flip, shared_noise, shared_slopes


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
class EdgeRows:
    """Rows [K * E, C] that are functions of the lengths of E edges, the same for K samples.

    To torch it is the tensor of these rows; a Bayesian map takes it as it is.

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

    @property
    def ndim(self) -> int:
        """Rows and channels."""
        return 2

    def rows(self) -> Tensor:
        """The tensor, [K * E, C]."""
        return _Rows.apply(self.length, self.value, self.slope)  # pyright: ignore

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        _types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Any operation of torch on the tensor of the rows."""
        plain = [x.rows() if isinstance(x, cls) else x for x in args]
        return function(*plain, **(kwargs or {}))


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
    value, slope, weight = h.value, h.slope, weight.detach()
    mean = F.linear(value, weight, None if bias is None else bias.detach())  # [E, out]
    groups = len(deviation)
    flipped = [flip(x.repeat(groups, 1), bits_in) for x in (value, slope)]  # [G * E, in]
    noise, noise_slope = (times_transposed(x, deviation) for x in flipped)  # [G * E, out]
    return _SharedFlipout.apply(  # pyright: ignore
        h.length, coef, mean, F.linear(slope, weight), noise, noise_slope, group, bits_out
    )


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
    """``z = m + sqrt(coef) r u`` with m and u functions of the lengths, given with their slopes."""

    @staticmethod
    def forward(
        ctx: Any,
        length: Tensor,
        coef: Tensor,
        mean: Tensor,
        mean_slope: Tensor,
        noise: Tensor,
        noise_slope: Tensor,
        group: Tensor,
        bits: Tensor,
    ) -> Tensor:
        root = coef.sqrt()
        ctx.save_for_backward(root, mean_slope, noise, noise_slope, group, bits)
        return shared_noise(mean, noise, group, bits, root)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        root, mean_slope, noise, noise_slope, group, bits = ctx.saved_tensors
        by_length, by_root = shared_slopes(
            grads[0], mean_slope, noise, noise_slope, group, bits, root
        )
        return by_length, by_root.div_(root + root), *(None,) * 6
