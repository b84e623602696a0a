"""Rows and products per replica: what the estimators are made of.

Shapes: x ``[k*r, *irrep, channels]``, rows replica-major; weight ``[k, out, in]``, one per replica.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

FEW_ROWS = 8
"""Below, a product is bound by reading the weight, which is then better the left factor."""


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
    if weight.shape[0] == 1:
        return torch.mm(as_rows(x).t(), as_rows(y))[None]
    return torch.bmm(_blocks(x, weight).mT, _blocks(y, weight))


def _blocks(x: Tensor, weight: Tensor) -> Tensor:
    """Rows of each replica, ``[k, r * irrep, channels]``."""
    return x.reshape(weight.shape[0], -1, x.shape[-1])
