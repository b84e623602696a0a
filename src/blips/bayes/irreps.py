"""Equivariant linear maps: one matrix for each pair of irreps, stored as one layer.

The features of a row are the channels of several irreps side by side, each irrep with `mul`
channels of 2l + 1 components, [rows, mul * (2l + 1)] with the components inside. An equivariant
map mixes channels of the same irrep and never their components:

    z_t = b_t + sum over blocks k into t of  W_k h_s(k),     W_k [out, in], h_s [rows, 2l + 1, in]

Every block is an ordinary linear map with an irrep axis. Its weights get the posterior
N(W_k, coef W_k^2) with the layer's one coefficient per row, and signs and noise that are constant
over the components, so each sample is exactly as equivariant as the layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from blips.bayes.linear import Kind, Product
from blips.bayes.noise import Noise
from blips.errors import InputError


class Block(NamedTuple):
    """One matrix of an equivariant map.

    The irrep is `scalar` where it is invariant under rotation and reflection (a pseudoscalar is
    not), so that noise may be drawn for its outputs (the local estimator).
    """

    weight: Tensor  # [out, in], with all normalisation, differentiable
    source: slice  # columns of the input, in * dim of them
    target: slice  # columns of the output, out * dim of them
    dim: int  # components of the irrep, 2l + 1
    scalar: bool


def _no_bias(_layer: nn.Module) -> None:
    return None


@dataclass(frozen=True)
class BlockKind(Kind):
    """A class of layers that are a set of blocks.

    Blocks with the same target add up; columns that no block reaches are zero. Two sources are
    either the same columns or have none in common, and so are two targets.
    """

    blocks: Callable[[nn.Module], Sequence[Block]]
    width: Callable[[nn.Module], int]  # number of columns of the output
    bias: Callable[[nn.Module], Tensor | None] = _no_bias  # added to the output, [width]

    def sample(self, layer: nn.Module, name: str, h: Tensor, noise: Noise) -> Tensor:
        """Compute the output for weights drawn by `noise`, [rows, columns] -> [rows, width]."""
        if h.ndim != 2:
            raise InputError(
                f"{name!r} got an input of shape {tuple(h.shape)}; an equivariant Bayesian map "
                "needs [rows, channels and components]"
            )
        blocks = self.blocks(layer)
        coef = noise.coefficients_of(name, h.shape[0])
        inputs = _columns(h, [block.source for block in blocks])
        outputs: dict[int, list[Tensor]] = {}
        for k, (x, block) in enumerate(zip(inputs, blocks, strict=True)):
            if not block.scalar:
                x = _channels(x, block.dim).contiguous()  # [rows, dim, in]
            z = noise.linear(f"{name}[{k}]", x, block.weight, None, coef)
            if not block.scalar:
                z = z.mT.flatten(1)  # [rows, out * dim]
            outputs.setdefault(block.target.start, []).append(z)
        z = _side_by_side(h, outputs, self.width(layer))
        bias = self.bias(layer)
        return z if bias is None else z + bias

    def products(self, layer: nn.Module, name: str, h: Tensor, gradient: Tensor) -> list[Product]:
        """Return one product for each block, [rows, 2l + 1, channels]."""
        return [
            Product(
                f"{name}[{k}]",
                _channels(h[:, block.source], block.dim),
                block.weight,
                _channels(gradient[:, block.target], block.dim),
            )
            for k, block in enumerate(self.blocks(layer))
        ]

    def shapes(self, layer: nn.Module, name: str) -> dict[str, tuple[int, ...]]:
        """Return [out, in] of each block."""
        blocks = self.blocks(layer)
        return {f"{name}[{k}]": tuple(block.weight.shape) for k, block in enumerate(blocks)}


def _channels(columns: Tensor, dim: int) -> Tensor:
    """Reshape [rows, channels * dim] -> [rows, dim, channels]."""
    return columns.reshape(len(columns), columns.shape[1] // dim, dim).mT


def _columns(h: Tensor, slices: Sequence[slice]) -> list[Tensor]:
    """Split h into the columns of each slice, at once, so that gradients are joined once."""
    ends = sorted({0, h.shape[1]} | {s.start for s in slices} | {s.stop for s in slices})
    sizes = [stop - start for start, stop in pairwise(ends)]
    pieces = dict(zip(ends, h.split_with_sizes(sizes, dim=1), strict=False))
    return [pieces[s.start] for s in slices]


def _side_by_side(h: Tensor, outputs: dict[int, list[Tensor]], width: int) -> Tensor:
    """Sum the terms that begin at each column into [rows, width], zero where there are none."""
    parts: list[Tensor] = []
    column = 0
    for start, terms in sorted(outputs.items()):
        if start > column:
            parts.append(h.new_zeros(h.shape[0], start - column))
        parts.append(reduce(torch.add, terms))
        column = start + parts[-1].shape[1]
    if column < width:
        parts.append(h.new_zeros(h.shape[0], width - column))
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
