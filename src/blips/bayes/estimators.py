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

Large maps are applied to a few hundred rows at a time. Each piece is an ordinary differentiable
graph whose intermediate results stay in the processor's cache, forward and backward; its matrix
products are torch's own, so that autograd skips those whose result nobody asked for.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from blips.bayes.random import normals, sign_bits, with_signs
from blips.errors import InputError

PIECE = 2**19
"""Largest number of elements in the input or output of a piece (2 MB in single precision)."""

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
    floor = weight.new_full((len(weight),), VAR_FLOOR / 4)
    outputs: list[Tensor] = []
    for x, c, replicas in zip(plan.split(h), plan.split(coef), plan.replicas, strict=True):
        mean = F.linear(x, weight, bias)  # [k*r, out]
        quarter_var = F.linear(_square(x, c / 4), weight_square, floor)  # [k*r, out]
        outputs.append(_perturb(mean, quarter_var, generators[replicas]))
    return plan.join(outputs)


def flipout_linear(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    coef: Tensor,
    generators: Sequence[torch.Generator],
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

    Returns:
        z, ``[K*R, *irrep, out]``.
    """
    plan = _Plan(h, weight, len(generators))
    outputs_count, inputs_count = weight.shape
    deviation = weight * normals(weight.shape, generators, weight.dtype)  # [K, out, in]
    bits_in = sign_bits(plan.rows, inputs_count, generators)
    bits_out = sign_bits(plan.rows, outputs_count, generators)
    one = coef.new_ones(())
    outputs: list[Tensor] = []
    for x, scale, s, r, replicas in zip(
        plan.split(h),
        plan.split(coef.sqrt()),
        plan.split(bits_in),
        plan.split(bits_out),
        plan.replicas,
        strict=True,
    ):
        product = _linear_per_replica(_flip(x, scale, s), deviation[replicas])
        outputs.append(F.linear(x, weight, bias) + _flip(product, one, r))
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
    deviation = weight * eps  # [K, out, in]
    scale = coef.sqrt().reshape(-1, *(1,) * (h.ndim - 1))
    outputs: list[Tensor] = []
    for x, c, replicas in zip(plan.split(h), plan.split(scale), plan.replicas, strict=True):
        product = _linear_per_replica(x * c, deviation[replicas])
        outputs.append(F.linear(x, weight, bias) + product)
    return plan.join(outputs)


class _Plan:
    """How K blocks of R rows are cut into pieces: parts of one replica, or several whole ones.

    The cut within a replica depends on the shapes of its own data only, never on K.
    """

    def __init__(self, h: Tensor, weight: Tensor, replicas: int) -> None:
        if replicas == 0 or len(h) % replicas:
            raise InputError(
                f"{len(h)} rows cannot be split into {replicas} replicas of equal size; "
                "repeat the whole input once per replica."
            )
        self.rows = len(h) // replicas
        irrep = h[0].numel() // h.shape[-1] if len(h) else 1
        most = max(1, PIECE // (irrep * max(weight.shape)))  # rows of a piece
        if self.rows > most:
            parts = -(-self.rows // most)
            self.sizes = [len(part) for part in torch.arange(self.rows).tensor_split(parts)]
            self.replicas = [slice(k, k + 1) for k in range(replicas) for _ in self.sizes]
            self.sizes *= replicas
        else:
            group = most // max(1, self.rows)
            starts = range(0, replicas, group)
            self.replicas = [slice(k, min(k + group, replicas)) for k in starts]
            self.sizes = [self.rows * (part.stop - part.start) for part in self.replicas]

    def split(self, rows: Tensor) -> Sequence[Tensor]:
        return rows.split(self.sizes) if len(self.sizes) > 1 else (rows,)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        return _join(self.sizes, pieces) if len(pieces) > 1 else pieces[0]


def _linear_per_replica(x: Tensor, weight: Tensor) -> Tensor:
    """Rows of replica k ``[k*r, *irrep, in]`` times its own weight ``[k, out, in]``."""
    if len(weight) == 1:
        return F.linear(x, weight[0])
    blocks = x.reshape(len(weight), -1, x.shape[-1])
    return torch.bmm(blocks, weight.mT).view(*x.shape[:-1], weight.shape[1])


class _Join(Function):
    """Concatenate rows; its gradient is one split (that of ``torch.cat`` is many slices)."""

    @staticmethod
    def forward(ctx: Any, sizes: list[int], *pieces: Tensor) -> Tensor:
        ctx.sizes = sizes
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *grads[0].split(ctx.sizes)


class _Square(Function):
    """``y = scale * x^2``, scale per row; saves nothing but its inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return (x * x).mul_(scale.unsqueeze(-1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        grad_x = grads[0] * x
        grad_scale = torch.linalg.vecdot(grad_x, x)
        return grad_x * (2 * scale).unsqueeze(-1), grad_scale


class _Flip(Function):
    """``y = scale * sign * x``, scale per row, sign per row and channel, packed in bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, bits: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, scale, bits)
        signed = with_signs(scale.unsqueeze(-1), bits, x.shape[-1])
        return x * signed.view(len(x), *(1,) * (x.ndim - 2), -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, scale, bits = ctx.saved_tensors
        grad_x = _flip(grads[0], scale, bits)
        if x is None:
            return grad_x, None, None
        return grad_x, torch.linalg.vecdot(grad_x.flatten(1), x.flatten(1)) / scale, None


class _Perturb(Function):
    """``z = mean + eps * (sqrt(var + floor) - sqrt(floor))`` from ``q = (var + floor) / 4``.

    The second result, ``slope = dz/dq = eps / sqrt(q)``, is what the backward pass needs; its own
    derivative ``-slope / (2 q)`` is only needed for second derivatives of z and draws eps again.
    """

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, q: Tensor, generators: Sequence[torch.Generator]
    ) -> tuple[Tensor, Tensor]:
        ctx.generators = [generator.clone_state() for generator in generators]
        noise = _noise(q, generators)
        slope = torch.rsqrt(q).mul_(noise)
        z = mean.addcmul_(q, slope, value=2).sub_(noise, alpha=VAR_FLOOR**0.5)
        ctx.mark_dirty(mean)
        ctx.save_for_backward(slope)
        ctx.set_materialize_grads(False)
        return z, slope

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        (slope,) = ctx.saved_tensors
        grad_z, grad_slope = grads
        grad_q = None if grad_z is None else grad_z * slope
        if grad_slope is not None:
            noise = _noise(slope, [generator.clone_state() for generator in ctx.generators])
            inverse_q = (slope / noise.masked_fill_(noise == 0, 1)).square()
            bend = grad_slope * slope * inverse_q * -0.5
            grad_q = bend if grad_q is None else grad_q + bend
        return grad_z, grad_q, None


def _noise(like: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    block = (len(like) // len(generators), like.shape[1])
    return normals(block, generators, like.dtype).view(like.shape)


def _join(sizes: list[int], pieces: Sequence[Tensor]) -> Tensor:
    return _Join.apply(sizes, *pieces)  # pyright: ignore


def _square(x: Tensor, scale: Tensor) -> Tensor:
    return _Square.apply(x, scale)  # pyright: ignore


def _flip(x: Tensor, scale: Tensor, bits: Tensor) -> Tensor:
    return _Flip.apply(x, scale, bits)  # pyright: ignore


def _perturb(mean: Tensor, q: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    z, _ = _Perturb.apply(mean, q, generators)  # pyright: ignore
    return z
