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

A large map is applied to some hundred rows at a time (``Plan``), whose intermediate results stay in
the processor's cache, forward and backward.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from blips.bayes.algebra import times_transposed
from blips.bayes.functions import flipout, local
from blips.bayes.pieces import Plan
from blips.bayes.random import BitSource, normals, quick_normals, sign_bits


def local_linear(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    coef: Tensor,
    generators: Sequence[torch.Generator],
    bits: BitSource | None = None,
) -> Tensor:
    """Sample the outputs of the map (local reparametrisation).

    ``z = h W^T + b + sqrt(coef) * eps * sqrt((h^2)(W^2)^T)`` with eps ~ N(0, 1) per row and output.

    Args:
        h: input, ``[K*R, in]``.
        weight: mean weights W, ``[out, in]``.
        bias: b, ``[out]`` or None.
        coef: relative variances, ``[K*R]``.
        generators: K generators on the device of ``h``.
        bits: where the noise comes from, if maps share it; None draws it from the generators.

    Returns:
        z, ``[K*R, out]``.
    """
    plan = Plan(h, weight, len(generators))
    bits = bits or BitSource(generators)
    eps = quick_normals(bits, plan.rows_per_replica, weight.shape[0], h.dtype)  # [K*R, out]
    if plan.is_whole:
        return local(h, weight, bias, coef, eps)
    pieces = zip(plan.rows(h), plan.rows(coef), plan.rows(eps), strict=True)
    # .data: every piece is written to, which is no change of the others
    return plan.join([local(x, weight, bias, c, e.data) for x, c, e in pieces])


def flipout_linear(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    coef: Tensor,
    generators: Sequence[torch.Generator],
    deviation: Tensor | None = None,
    bits: BitSource | None = None,
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
        deviation: ``W * eps``, ``[G, out, in]``, where it is given: each serves K / G replicas in
            turn, which then differ in their signs. None draws one per replica.
        bits: where the signs come from, if maps share it; None draws them from the generators.

    Returns:
        z, ``[K*R, *irrep, out]``.
    """
    eps = None
    if deviation is None:
        eps = normals(weight.shape, generators, weight.dtype)  # [K, out, in]
        deviation = weight.detach() * eps
    bits = bits or BitSource(generators)
    bits_out, bits_in = sign_bits(bits, h.shape[0] // len(generators), *weight.shape)
    plan = Plan(h, weight, len(deviation))
    if plan.is_whole:
        return flipout(h, weight, bias, coef, deviation, eps, bits_in, bits_out)
    noises = plan.replicas(lambda k: (deviation[k], None if eps is None else eps[k]))
    outputs: list[Tensor] = []
    for x, c, s, r, noise in zip(
        plan.rows(h),
        plan.rows(coef),
        plan.rows(bits_in),
        plan.rows(bits_out),
        noises,
        strict=True,
    ):
        outputs.append(flipout(x, weight, bias, c, *noise, s, r))
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
    plan = Plan(h, weight, len(eps))
    scales = coef.sqrt().view(-1, *(1,) * (h.ndim - 1))
    outputs: list[Tensor] = []
    for x, scale, deviation in zip(
        plan.rows(h),
        plan.rows(scales),
        plan.replicas(lambda k: weight * eps[k]),
        strict=True,
    ):
        outputs.append(F.linear(x, weight, bias) + times_transposed(x * scale, deviation))
    return plan.join(outputs)
