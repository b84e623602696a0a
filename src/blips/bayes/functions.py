"""Elementwise parts of the estimators as autograd functions that keep little memory.

Matrix products are torch's own, so that autograd skips those whose result nobody asked for; these
functions are all that stands between them. Each is differentiable any number of times.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from blips.bayes.random import normals, sign_mask

VAR_FLOOR = 1e-12
"""The standard deviation is ``sqrt(var + floor) - sqrt(floor)``, smooth at zero variance."""


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
        grad_x = flip(grads[0], coef, bits)
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
        return grads[0], flip(grads[0], None, bits), None


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


def square(x: Tensor, scale: Tensor) -> Tensor:
    """``scale * x^2``, scale per row."""
    return _Square.apply(x, scale)  # pyright: ignore


def perturb(mean: Tensor, var: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """``mean + eps * s(var)`` with fresh standard normals eps; takes the memory of both."""
    return _Perturb.apply(mean, var, generators)[0]  # pyright: ignore


def flip(x: Tensor, coef: Tensor | None, bits: Tensor) -> Tensor:
    """``sqrt(coef) * sign * x``."""
    if torch.is_grad_enabled():
        return _Flip.apply(x, coef, bits)  # pyright: ignore
    return _times_signs(x, coef, bits)


def add_flipped(mean: Tensor, x: Tensor, bits: Tensor) -> Tensor:
    """``mean + sign * x``."""
    return _AddFlipped.apply(mean, x, bits)  # pyright: ignore
