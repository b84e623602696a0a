"""Signs, rows and products per replica: what the estimators are made of.

Shapes: x ``[k*r, *irrep, channels]``, rows replica-major; weight ``[k, out, in]``, one per replica.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from blips.bayes.random import sign_mask

FEW_ROWS = 8
"""Below, a product is bound by reading the weight, which is then better the left factor."""


def signs_of(bits: Tensor, x: Tensor) -> Tensor:
    """What `flip` wants to know for x: in single precision a sign is the XOR of a bit."""
    mask = sign_mask(bits, x.shape[-1])
    if x.ndim > 2:
        mask = mask.view(mask.shape[0], *(1,) * (x.ndim - 2), mask.shape[1])
    return mask if x.dtype == torch.float32 else torch.where(mask < 0, -1.0, 1.0).to(x.dtype)


def flip(x: Tensor, signs: Tensor) -> Tensor:
    """``x * signs``, in the memory of the signs where it fits."""
    out = signs if signs.shape == x.shape else None
    if x.dtype != torch.float32:
        return torch.mul(x, signs, out=out)
    return torch.bitwise_xor(x.view(torch.int32), signs, out=out).view(torch.float32)


def flip_(x: Tensor, signs: Tensor) -> Tensor:
    """``x * signs`` in the memory of x."""
    if x.dtype != torch.float32:
        return x.mul_(signs)
    x.view(torch.int32).bitwise_xor_(signs)
    return x


def sign_factors(bits: Tensor, x: Tensor) -> Tensor:
    """1 or -1 for every element of x."""
    return flip(torch.ones_like(x), signs_of(bits, x))


def per_row(values: Tensor, x: Tensor) -> Tensor:
    """One value per row in a shape that multiplies x."""
    return values.view(-1, *(1,) * (x.ndim - 1))


def row_dot(x: Tensor, y: Tensor, memory: Tensor | None = None) -> Tensor:
    """Sum over all but the rows of ``x * y``; overwrites what the memory held."""
    return torch.mul(x, y, out=memory).flatten(1).sum(1)


def as_rows(x: Tensor) -> Tensor:
    """``[k*r * irrep, channels]``."""
    return x if x.ndim == 2 else x.flatten(0, -2)


def times_transposed(x: Tensor, weight: Tensor) -> Tensor:
    """``x weight^T`` of each replica."""
    if weight.shape[0] == 1:
        return F.linear(x, weight[0])
    blocks = _blocks(x, weight)
    if blocks.shape[1] < FEW_ROWS:
        product = torch.bmm(weight, blocks.mT).mT.contiguous()
    else:
        product = torch.bmm(blocks, weight.mT)
    return product.view(*x.shape[:-1], weight.shape[1])


def times(x: Tensor, weight: Tensor) -> Tensor:
    """``x weight`` of each replica."""
    if weight.shape[0] == 1:
        return x @ weight[0]
    return torch.bmm(_blocks(x, weight), weight).view(*x.shape[:-1], weight.shape[2])


def outer(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """``x^T y`` of each replica, like the weight."""
    return torch.bmm(_blocks(x, weight).mT, _blocks(y, weight))


def _blocks(x: Tensor, weight: Tensor) -> Tensor:
    """Rows of each replica, ``[k, r * irrep, channels]``."""
    return x.reshape(weight.shape[0], -1, x.shape[-1])
