r"""Three estimators of one stochastic linear map.

The weights of the map are Gaussian, with a width that belongs to the row they are applied to:

    w ~ N(W, coef W^2),    coef > 0 for each row,    the bias b is not random.

    local     z = h W^T + b + eps sqrt(coef (h^2)(W^2)^T)      eps ~ N(0, 1) per row and output
    flipout   z = h W^T + b + sqrt(coef) (s h)(W eps)^T        eps ~ N(0, 1) per weight, and signs
                                                               s = +-1 per row and input channel
    frozen    z = h W^T + b + sqrt(coef) h (W eps)^T           eps is given

Under local and flipout every row sees exactly N(W, coef W^2), and rows are uncorrelated: s eps is
normal as eps is, and signs of two rows agree as often as not. (Wen et al. 2018 have signs of the
outputs, too, which change neither; without them means and noise are one product.) Local
draws noise for every output, so its rows must be scalars. Flipout's noise and signs are the same
for all components of an irrep, so each sample is exactly equivariant; and it is smooth at h = 0. A
frozen draw is one smooth function, the same at every call.

Rows are replica-major, K blocks of R rows. A replica is one posterior sample: its noise depends on
its own generator alone, and is independent of all others.

| symbol | variable | shape |
|---|---|---|
| h | `h` | [K R, *irrep, in] |
| W, b | `weight`, `bias` | [out, in], [out] or None |
| coef | `coef` | [K R] |
| eps (flipout, frozen) | `eps` | [K, out, in] |
| z | returned | [K R, *irrep, out] |
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from blips.errors import InputError

VAR_FLOOR = 1e-12  # of the variance of unit coefficient: a smooth root where the input vanishes


def local_linear(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    coef: Tensor,
    generators: Sequence[torch.Generator],
) -> Tensor:
    """Sample the outputs of the map (local reparametrisation), [K R, out]."""
    rows = _rows_per_replica(h, len(generators))
    eps = normals((rows, len(weight)), generators, h.dtype).flatten(0, 1)  # [K R, out]
    floor = weight.new_full((len(weight),), VAR_FLOOR)
    var = F.linear(h * h, weight * weight, floor)  # of unit coefficient
    return F.linear(h, weight, bias) + eps * (coef[:, None] * var).sqrt()


def flipout_linear(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    coef: Tensor,
    generators: Sequence[torch.Generator],
) -> Tensor:
    """Sample one weight noise per replica, and random signs per row (flipout)."""
    rows = _rows_per_replica(h, len(generators))
    eps = normals(weight.shape, generators, weight.dtype)
    sign = signs((rows, weight.shape[1]), generators, h.dtype).flatten(0, 1)  # [K R, in]
    return _means_and_noise(h, weight, bias, coef.sqrt()[:, None] * sign, eps)


def frozen_linear(
    h: Tensor, weight: Tensor, bias: Tensor | None, coef: Tensor, eps: Tensor
) -> Tensor:
    """Apply one given weight noise per replica to all of its rows."""
    _rows_per_replica(h, len(eps))
    return _means_and_noise(h, weight, bias, coef.sqrt()[:, None], eps)


def _means_and_noise(
    h: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, eps: Tensor
) -> Tensor:
    """Compute ``h W^T + b + (scale h)(W eps_k)^T`` for the rows of each replica as one product."""
    scale = scale.view(len(h), *(1,) * (h.ndim - 2), scale.shape[1])  # as for every component
    h = torch.cat([h, h * scale], dim=-1)  # [K R, *irrep, 2 in]
    weights = torch.cat([weight.expand_as(eps), weight * eps], dim=-1)  # [K, out, 2 in]
    if len(weights) == 1:
        return F.linear(h, weights[0], bias)
    blocks = h.reshape(len(weights), -1, h.shape[-1])  # [K, R * irrep, 2 in]
    weights = weights.mT  # [K, 2 in, out]
    z = torch.bmm(blocks, weights) if bias is None else torch.baddbmm(bias, blocks, weights)
    return z.view(*h.shape[:-1], weights.shape[2])


def _rows_per_replica(h: Tensor, replicas: int) -> int:
    if replicas == 0 or len(h) % replicas:
        raise InputError(
            f"{len(h)} rows cannot be split into {replicas} replicas of equal size; "
            "repeat the whole input once per replica."
        )
    return len(h) // replicas


def normals(
    shape: Sequence[int], generators: Sequence[torch.Generator], dtype: torch.dtype
) -> Tensor:
    """Draw standard normals, [K, *shape], on the device of the K generators."""
    out = torch.empty((len(generators), *shape), dtype=dtype, device=generators[0].device)
    for block, generator in zip(out, generators, strict=True):
        block.normal_(generator=generator)
    return out


def signs(
    shape: Sequence[int], generators: Sequence[torch.Generator], dtype: torch.dtype
) -> Tensor:
    """Draw fair signs, 1 or -1, [K, *shape], on the device of the K generators.

    A random word holds 64 signs: products with powers of two bring each bit of it in turn to the
    place of a float's sign bit. That is eight times as fast as a random number for each sign.
    """
    count, device = math.prod(shape), generators[0].device
    words = torch.empty((len(generators), -(-count // 64)), dtype=torch.int64, device=device)
    for block, generator in zip(words, generators, strict=True):
        block.random_(-(2**63), None, generator=generator)
    powers = 1 << torch.arange(32, device=device)  # 2^31 wraps around to the sign bit of an int32
    bits = words.view(torch.int32)[..., None] * powers.to(torch.int32)  # [K, words, 32]
    sign_bit, one = -(2**31), 0x3F800000  # of float32, as int32
    values = bits.bitwise_and_(sign_bit).bitwise_or_(one).view(torch.float32).flatten(1)
    return values[:, :count].reshape(len(generators), *shape).to(dtype)
