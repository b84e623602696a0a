"""Three estimators of one stochastic linear map.

The weights of the map are Gaussian, with a width that belongs to the row they are applied to:

    w ~ N(W, coef * W^2),    coef > 0 per row,    the bias is not random.

==================  ===========================================================================
``local_linear``    samples the outputs, independently for every row; rows must be scalars
``flipout_linear``  one weight noise per replica, decorrelated between rows by random signs;
                    exactly equivariant for rows with irrep axes
``frozen_linear``   one given weight noise per replica: a smooth, repeatable function
==================  ===========================================================================

Rows are replica-major: K blocks of R rows. A replica's noise depends on its own generator alone.
Derivatives of every order exist, also at ``h = 0``.

A large map is applied to some hundred rows at a time (``_Plan``). Each piece is an ordinary
differentiable graph whose intermediate results stay in the processor's cache, forward and backward.
All matrix products are torch's own, so that autograd skips those whose result nobody asked for.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from blips.bayes.random import normals, sign_bits, sign_mask
from blips.errors import InputError

T = TypeVar("T")

PIECE = 2**20
"""Largest number of elements in the input or output of a piece (4 MB in single precision)."""

VAR_FLOOR = 1e-12
"""The standard deviation is ``sqrt(var + floor) - sqrt(floor)``, smooth at zero variance."""


def local_linear(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    coef: Tensor,
    generators: Sequence[torch.Generator],
) -> Tensor:
    """Sample the outputs of the map (local reparametrisation).

    ``z = h W^T + b + eps * s(coef * (h^2)(W^2)^T)`` with eps ~ N(0, 1) per row and output, and
    ``s(var) = sqrt(var + floor) - sqrt(floor)``.

    Args:
        h: input, ``[K*R, in]``.
        weight: mean weights W, ``[out, in]``.
        bias: b, ``[out]`` or None.
        coef: relative variances, ``[K*R]``.
        generators: K generators on the device of ``h``.

    Returns:
        z, ``[K*R, out]``.
    """
    plan = _Plan(h, weight, len(generators))
    weight_square = weight * weight
    outputs: list[Tensor] = []
    for x, c, sources in zip(
        plan.rows(h), plan.rows(coef), plan.replicas(lambda k: generators[k]), strict=True
    ):
        mean = F.linear(x, weight, bias)  # [k*r, out]
        var = F.linear(_square(x, c), weight_square)  # [k*r, out]
        outputs.append(_perturb(mean, var, sources))
    return plan.join(outputs)


def flipout_linear(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    coef: Tensor,
    generators: Sequence[torch.Generator],
    deviation: Tensor | None = None,
) -> Tensor:
    """Sample one weight noise per replica, and random signs per row (flipout).

    ``z = h W^T + b + sqrt(coef) * r * ((h * s)(W * eps)^T)`` with eps ~ N(0, 1) of the weight's
    shape, and fair signs s, r per row and channel, the same for all components of an irrep. Every
    row sees exactly N(W, coef * W^2); rows are uncorrelated.

    Args:
        h: input, ``[K*R, *irrep, in]``.
        weight: mean weights W, ``[out, in]``.
        bias: b, ``[out]`` or None.
        coef: relative variances, ``[K*R]``.
        generators: K generators on the device of ``h``.
        deviation: ``W * eps``, ``[K, out, in]``, where it is kept between calls; None draws it.

    Returns:
        z, ``[K*R, *irrep, out]``.
    """
    plan = _Plan(h, weight, len(generators))
    if deviation is None:
        eps = normals(weight.shape, generators, weight.dtype)  # [K, out, in]
        deviations = plan.replicas(lambda k: weight * eps[k].squeeze(0))
    else:
        deviations = plan.replicas(lambda k: deviation[k].squeeze(0))
    signs = sign_bits(plan.rows_per_replica, (weight.shape[1], weight.shape[0]), generators)
    outputs: list[Tensor] = []
    for x, c, s, r, dev in zip(
        plan.rows(h),
        plan.rows(coef),
        plan.rows(signs[0]),
        plan.rows(signs[1]),
        deviations,
        strict=True,
    ):
        mean = F.linear(x, weight, bias)  # [k*r, *irrep, out]
        product = _batched_linear(_flip(x, c, s), dev)  # [k*r, *irrep, out]
        outputs.append(_add_flipped(mean, product, r))
    return plan.join(outputs)


def frozen_linear(
    h: Tensor, weight: Tensor, bias: Tensor | None, coef: Tensor, eps: Tensor
) -> Tensor:
    """Apply one given weight noise per replica to all of its rows.

    ``z = h W^T + b + sqrt(coef) * (h (W * eps)^T)``

    Args:
        h: input, ``[K*R, *irrep, in]``.
        weight: mean weights W, ``[out, in]``.
        bias: b, ``[out]`` or None.
        coef: relative variances, ``[K*R]``.
        eps: weight noise, ``[K, out, in]``.

    Returns:
        z, ``[K*R, *irrep, out]``.
    """
    plan = _Plan(h, weight, len(eps))
    scales = coef.sqrt().view(-1, *(1,) * (h.ndim - 1))
    outputs: list[Tensor] = []
    for x, scale, deviation in zip(
        plan.rows(h),
        plan.rows(scales),
        plan.replicas(lambda k: weight * eps[k].squeeze(0)),
        strict=True,
    ):
        outputs.append(F.linear(x, weight, bias) + _batched_linear(x * scale, deviation))
    return plan.join(outputs)


class _Plan:
    """How K blocks of R rows are cut into pieces: parts of one replica, or several whole ones.

    The cut of a replica depends on the shape of its own rows, never on K: neither does its noise.
    """

    def __init__(self, h: Tensor, weight: Tensor, replicas: int) -> None:
        if replicas == 0 or len(h) % replicas:
            raise InputError(
                f"{len(h)} rows cannot be split into {replicas} replicas of equal size; "
                "repeat the whole input once per replica."
            )
        self.rows_per_replica = len(h) // replicas
        width = math.prod(h.shape[1:-1]) * max(weight.shape)
        most = max(1, PIECE // width)  # rows of a piece
        group = max(1, most // max(1, self.rows_per_replica))  # replicas of a piece
        self._groups = _cut(replicas, group)
        self._parts = _cut(self.rows_per_replica, most)
        self._sizes = [k * rows for k in self._groups for rows in self._parts]

    def rows(self, x: Tensor) -> Sequence[Tensor]:
        """Cut ``[K*R, ...]`` into the rows of each piece."""
        return x.split_with_sizes(self._sizes) if len(self._sizes) > 1 else (x,)

    def replicas(self, take: Callable[[slice], T]) -> Sequence[T]:
        """Take for each piece what belongs to its replicas; pieces of one replica share it."""
        ends = accumulate(self._groups)
        taken = [take(slice(end - k, end)) for k, end in zip(self._groups, ends, strict=True)]
        return [item for item in taken for _ in self._parts]

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Put the rows of all pieces together."""
        return _join(self._sizes, pieces) if len(pieces) > 1 else pieces[0]


def _cut(total: int, most: int) -> list[int]:
    """Cut ``total`` into as few near-equal sizes as possible, none above ``most``."""
    parts = max(1, -(-total // most))
    return [(total + i) // parts for i in range(parts)]


def _batched_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Rows of replica k, ``[k*r, *irrep, in]``, times its own weight, ``[k, out, in]``.

    The weight of a single replica is ``[out, in]``.
    """
    if weight.ndim == 2:
        return F.linear(x, weight)
    blocks = x.reshape(len(weight), -1, x.shape[-1])
    return torch.bmm(blocks, weight.mT).view(*x.shape[:-1], weight.shape[1])


class _Join(Function):
    """Concatenate rows. The gradient is one split, where that of ``torch.cat`` is many slices."""

    @staticmethod
    def forward(ctx: Any, sizes: list[int], *pieces: Tensor) -> Tensor:
        ctx.sizes = sizes
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *grads[0].split_with_sizes(ctx.sizes)


class _Square(Function):
    """``y = scale * x^2``, scale per row; keeps nothing but its inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return (x * x).mul_(scale.unsqueeze(-1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        x, scale = ctx.saved_tensors
        half = grads[0] * x
        grad_scale = _row_dot(half, x) if ctx.needs_input_grad[1] else None
        return half * (2 * scale).unsqueeze(-1), grad_scale


class _Perturb(Function):
    """``z = mean + eps * (std - sqrt(floor))`` with ``std = sqrt(var + floor)``, in their memory.

    The second result, ``slope = dz/dvar = eps / (2 std)``, is all that the backward pass needs. Its
    own derivative, ``-slope / (2 std^2)``, only occurs in second derivatives of z; there eps is
    drawn again instead of being kept.
    """

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, var: Tensor, generators: Sequence[torch.Generator]
    ) -> tuple[Tensor, Tensor]:
        ctx.generators = [generator.clone_state() for generator in generators]
        half_eps = _half_eps(var, generators)
        std = var.add_(VAR_FLOOR).sqrt_()
        z = mean.addcmul_(half_eps, std, value=2).sub_(half_eps, alpha=2 * VAR_FLOOR**0.5)
        slope = torch.div(half_eps, std, out=std)
        ctx.mark_dirty(z, slope)
        ctx.save_for_backward(slope)
        ctx.set_materialize_grads(False)
        return z, slope

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        (slope,) = ctx.saved_tensors
        grad_z, grad_slope = grads
        grad_var = None if grad_z is None else grad_z * slope
        if grad_slope is not None:
            half_eps = _half_eps(slope, [generator.clone_state() for generator in ctx.generators])
            inverse_std = slope / half_eps.masked_fill_(half_eps == 0, 1)
            bend = grad_slope * (slope * inverse_std * inverse_std * -0.5)
            grad_var = bend if grad_var is None else grad_var + bend
        return grad_z, grad_var, None


class _Flip(Function):
    """``y = sqrt(coef) * sign * x``: coef per row (or None: 1), sign per row and channel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, coef: Tensor | None, bits: Tensor) -> Tensor:
        ctx.save_for_backward(None if coef is None else x, coef, bits)
        return _times_signs(x, coef, bits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, coef, bits = ctx.saved_tensors
        grad_x = _flip(grads[0], coef, bits)
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None
        return grad_x, _row_dot(grad_x.flatten(1), x.flatten(1)) / (2 * coef), None


class _AddFlipped(Function):
    """``z = mean + sign * x``, sign per row and channel."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, x: Tensor, bits: Tensor) -> Tensor:
        ctx.save_for_backward(bits)
        return _times_signs(x, None, bits).add_(mean)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (bits,) = ctx.saved_tensors
        return grads[0], _flip(grads[0], None, bits), None


def _half_eps(like: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    block = (len(like) // len(generators), like.shape[1])
    return normals(block, generators, like.dtype, std=0.5).view(like.shape)


def _times_signs(x: Tensor, coef: Tensor | None, bits: Tensor) -> Tensor:
    """``sqrt(coef) * sign * x``, a new tensor; in single precision a sign is the XOR of a bit."""
    mask = sign_mask(bits, x.shape[-1]).view(len(x), *(1,) * (x.ndim - 2), x.shape[-1])
    if x.dtype == torch.float32:
        out = mask if mask.shape == x.shape else None
        signed = torch.bitwise_xor(x.view(torch.int32), mask, out=out).view(torch.float32)
    else:
        signed = x * torch.where(mask == 0, 1.0, -1.0).to(x.dtype)
    return signed if coef is None else signed.mul_(coef.sqrt().view(-1, *(1,) * (x.ndim - 1)))


def _row_dot(x: Tensor, y: Tensor) -> Tensor:
    return torch.linalg.vecdot(x, y)  # pyright: ignore


# What follows gives the functions above their types, which ``Function.apply`` does not know.


def _join(sizes: list[int], pieces: Sequence[Tensor]) -> Tensor:
    return _Join.apply(sizes, *pieces)  # pyright: ignore


def _square(x: Tensor, scale: Tensor) -> Tensor:
    return _Square.apply(x, scale)  # pyright: ignore


def _perturb(mean: Tensor, var: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    return _Perturb.apply(mean, var, generators)[0]  # pyright: ignore


def _flip(x: Tensor, coef: Tensor | None, bits: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        return _Flip.apply(x, coef, bits)  # pyright: ignore
    return _times_signs(x, coef, bits)


def _add_flipped(mean: Tensor, x: Tensor, bits: Tensor) -> Tensor:
    return _AddFlipped.apply(mean, x, bits)  # pyright: ignore
