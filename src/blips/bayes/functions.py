"""The estimators on one piece of rows, as autograd functions: few passes over memory, little kept.

First derivatives are written out, in place. Where they shall be differentiable in turn
(``create_graph``), flipout's gradients of input and coefficient are one more such function, which
is what training on forces needs; all else is left to autograd and the plain formula. Derivatives
of every order exist.

Shapes: h ``[k*r, *irrep, in]``, weight ``[out, in]``, coef ``[k*r]``, deviation D and its normals
eps ``[k, out, in]``, z ``[k*r, *irrep, out]``; rows are replica-major.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from blips.bayes.algebra import as_rows, outer, times, times_transposed
from blips.bayes.kernels import (
    add_flipped_,
    add_local_,
    flip,
    flip_,
    flip_and_dot,
    multiply_and_dot,
    per_row,
    row_dot,
)

VAR_FLOOR = 1e-12
"""Added to the variance of unit coefficient: its root is smooth where the input vanishes."""

Tensors = Sequence[Tensor | None]
Grads = tuple[Tensor | None, ...]


class _Local(Function):
    """``z = h W^T + b + sqrt(coef) eps sqrt(v)`` with ``v = (h^2)(W^2)^T + floor``.

    Keeps ``slope = 2 dz/dv = sqrt(coef) eps / sqrt(v)``, in the memory of eps.
    """

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, bias: Tensor | None, coef: Tensor, eps: Tensor
    ) -> Tensor:
        var = F.linear(h * h, weight * weight)
        ctx.save_for_backward(h, weight, bias, coef, eps)
        return add_local_(F.linear(h, weight, bias), eps, var, VAR_FLOOR, coef)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        h, weight, _, coef, slope = saved = ctx.saved_tensors
        if torch.is_grad_enabled():
            return by_autograd(_local_again, saved, needed(ctx, saved), grads)
        _, needs_weight, needs_bias = needed(ctx, saved[:3])
        grad_z = grads[0]
        grad_var = grad_z * slope  # twice the gradient of v
        grad_h = torch.mm(grad_var, weight * weight)
        grad_weight = None
        if needs_weight:
            grad_weight = torch.mm(grad_var.t(), h * h).mul_(weight).addmm_(grad_z.t(), h)
        grad_coef = multiply_and_dot(grad_h, h, coef)
        grad_bias = grad_z.sum(0) if needs_bias else None
        return grad_h.addmm_(grad_z, weight), grad_weight, grad_bias, grad_coef, None


def _local_again(
    h: Tensor, weight: Tensor, bias: Tensor | None, coef: Tensor, slope: Tensor
) -> Tensor:
    """The value of `_Local`, differentiable at any order."""
    std = (F.linear(h * h, weight * weight) + VAR_FLOOR).sqrt()
    root = per_row(coef.sqrt(), h)
    eps = slope * (std / root).detach()
    return F.linear(h, weight, bias) + root * eps * std


class _Flipout(Function):
    """``z = h W^T + b + sqrt(coef) r ((s h) D^T)``; ``D = W eps``, a constant where eps is None.

    D is given with its value; what depends on the weight through it counts as the weight's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        coef: Tensor,
        deviation: Tensor,
        eps: Tensor | None,
        bits_in: Tensor,
        bits_out: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(h, weight, bias, coef, deviation, eps, bits_in, bits_out)
        noise = times_transposed(flip(h, bits_in), deviation)
        return add_flipped_(F.linear(h, weight, bias), noise, bits_out, coef)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        h, weight, _, coef, deviation, eps, bits_in, bits_out = saved = ctx.saved_tensors
        _, needs_weight, needs_bias = needed(ctx, saved[:3])
        grad_z = grads[0]
        if torch.is_grad_enabled():
            if needs_weight or needs_bias:
                return by_autograd(_flipout_again, saved, needed(ctx, saved), grads)
            grad_h, grad_coef = _flipout_grads(grad_z, h, weight, *saved[3:])
            return grad_h, None, None, grad_coef, None, None, None, None
        noise = flip(grad_z, bits_out, coef)
        grad_weight = grad_bias = None
        if needs_weight:
            grad_weight = _weight_grad(grad_z, h, noise, flip(h, bits_in), eps)
        grad_h = times(noise, deviation)
        del noise
        grad_coef = flip_and_dot(grad_h, bits_in, h, coef)
        as_rows(grad_h).addmm_(as_rows(grad_z), weight)
        if needs_bias:
            grad_bias = as_rows(grad_z).sum(0)
        return grad_h, grad_weight, grad_bias, grad_coef, None, None, None, None


def _flipout_again(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    coef: Tensor,
    deviation: Tensor,
    eps: Tensor | None,
    bits_in: Tensor,
    bits_out: Tensor,
) -> Tensor:
    """The value of `_Flipout`, differentiable at any order."""
    deviation = deviation if eps is None else weight * eps
    noise = times_transposed(h * _signs(bits_in, h), deviation)
    noise = noise * _signs(bits_out, noise)
    return F.linear(h, weight, bias) + per_row(coef.sqrt(), h) * noise


class _FlipoutGrads(Function):
    """Gradients of `_Flipout`'s input, ``g W + q``, and coefficient, ``<h, q> / (2 coef)``.

    ``q = s ((sqrt(coef) r g) D)``, with g the gradient of the output.
    """

    @staticmethod
    def forward(
        ctx: Any,
        grad_z: Tensor,
        h: Tensor,
        weight: Tensor,
        coef: Tensor,
        deviation: Tensor,
        eps: Tensor | None,
        bits_in: Tensor,
        bits_out: Tensor,
    ) -> tuple[Tensor, Tensor]:
        q = times(flip(grad_z, bits_out, coef), deviation)
        grad_coef = flip_and_dot(q, bits_in, h, coef)
        ctx.save_for_backward(grad_z, h, weight, coef, deviation, eps, bits_in, bits_out, q)
        grad_h = torch.addmm(as_rows(q), as_rows(grad_z), weight).view_as(h)
        return grad_h, grad_coef

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        *inputs, q = ctx.saved_tensors
        grad_z, h, weight, coef, deviation, eps, bits_in, bits_out = inputs
        needs = needed(ctx, inputs)
        if torch.is_grad_enabled():
            return by_autograd(_flipout_grads_again, inputs, needs, grads)
        by_h, by_coef = grads
        per_coef = by_coef / (coef + coef)  # [k*r]
        by_q = flip_(torch.addcmul(by_h, h, per_row(per_coef, h)), bits_in)
        by_z = flip(times_transposed(by_q, deviation), bits_out, coef)
        for_h = q * per_row(per_coef, h) if needs[1] else None
        for_weight = for_coef = None
        if needs[2]:
            for_weight = _weight_grad(grad_z, by_h, flip(grad_z, bits_out, coef), by_q, eps)
        if needs[3]:
            for_coef = row_dot(grad_z, by_z) - 2 * per_coef * row_dot(h, q)
            for_coef.div_(coef + coef)
        as_rows(by_z).addmm_(as_rows(by_h), weight.t())
        return by_z, for_h, for_weight, for_coef, None, None, None, None


def _flipout_grads_again(
    grad_z: Tensor,
    h: Tensor,
    weight: Tensor,
    coef: Tensor,
    deviation: Tensor,
    eps: Tensor | None,
    bits_in: Tensor,
    bits_out: Tensor,
) -> tuple[Tensor, Tensor]:
    """The value of `_FlipoutGrads`, differentiable at any order."""
    deviation = deviation if eps is None else weight * eps
    noise = per_row(coef.sqrt(), h) * grad_z * _signs(bits_out, grad_z)
    q = times(noise, deviation) * _signs(bits_in, h)
    return grad_z @ weight + q, (q * h).flatten(1).sum(1) / (coef + coef)


def _weight_grad(
    rows_out: Tensor, rows_in: Tensor, noise_out: Tensor, noise_in: Tensor, eps: Tensor | None
) -> Tensor:
    """Gradient of W: outer products of rows, and those of the noise times eps."""
    if eps is None:
        return torch.mm(as_rows(rows_out).t(), as_rows(rows_in))
    by_deviation = outer(noise_out, noise_in, eps).mul_(eps)
    by_noise = by_deviation[0] if len(eps) == 1 else by_deviation.sum(0)
    return by_noise.addmm_(as_rows(rows_out).t(), as_rows(rows_in))


def _signs(bits: Tensor, x: Tensor) -> Tensor:
    """1 or -1 for every element of x."""
    return flip(torch.ones_like(x), bits)


# ---------------------------------------------------------------------------------- autograd


def needed(ctx: Any, inputs: Tensors) -> list[bool]:
    """Which inputs' gradients the running backward pass asks for.

    ``ctx.needs_input_grad`` says which could be asked for: also those of the weights while forces
    are computed.
    """
    nodes = iter(ctx.next_functions)  # of the inputs that are tensors
    return [x is not None and _will_run(next(nodes)[0]) for x in inputs]


def _will_run(node: Any) -> bool:
    try:
        return node is not None and torch._C._will_engine_execute_node(node)  # pyright: ignore
    except RuntimeError:  # a leaf whose gradient was asked for by name
        return True


def by_autograd(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Tensors,
    needs: Sequence[bool],
    grads: Sequence[Tensor],
) -> Grads:
    """Differentiable gradients of ``function(*inputs)``."""
    with torch.enable_grad():
        # aliases, so that the history that one input shares with another is not counted
        aliases = [None if x is None else x.view_as(x) for x in inputs]
        asked = [x for x, need in zip(aliases, needs, strict=True) if need and x is not None]
        outputs = function(*aliases)
        found = iter(torch.autograd.grad(outputs, asked, grads, create_graph=True))
    return tuple(next(found) if need else None for need in needs)


# What follows gives the functions above their types, which ``Function.apply`` does not know.


def local(h: Tensor, weight: Tensor, bias: Tensor | None, coef: Tensor, eps: Tensor) -> Tensor:
    """``h W^T + b + sqrt(coef) * eps * sqrt((h^2)(W^2)^T + floor)``; takes the memory of eps."""
    return _Local.apply(h, weight, bias, coef, eps)  # pyright: ignore


def flipout(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    coef: Tensor,
    deviation: Tensor,
    eps: Tensor | None,
    bits_in: Tensor,
    bits_out: Tensor,
) -> Tensor:
    """``h W^T + b + sqrt(coef) * r * ((h * s) D^T)``, the signs s, r packed into bits.

    The deviation is ``D = W eps``; without eps it is a constant.
    """
    return _Flipout.apply(  # pyright: ignore
        h, weight, bias, coef, deviation, eps, bits_in, bits_out
    )


def _flipout_grads(*inputs: Tensor | None) -> tuple[Tensor, Tensor]:
    return _FlipoutGrads.apply(*inputs)  # pyright: ignore
