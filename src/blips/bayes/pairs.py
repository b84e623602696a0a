"""Maps of pairs of nodes, on the nodes: a node is in many pairs, but multiplied once.

The first map of a message network acts on rows [a_i, a_j, c_ij]: features of two nodes, and of
their pair. With the columns of the weight split in the same way, W = [W_1 W_2 W_3],

    h_ij W^T = (a W_1^T)_i + (a W_2^T)_j + c_ij W_3^T

and the variance of local reparametrisation is the same sum of squares,

    v_ij = (h_ij^2)(W^2)^T = (a^2 (W_1^2)^T)_i + (a^2 (W_2^2)^T)_j + c_ij^2 (W_3^2)^T:

products with N rows in place of E, forward and backward. The noise is drawn for every pair, as it
would be without.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from blips.bayes.compiled import address
from blips.bayes.functions import VAR_FLOOR, Grads, by_autograd, needed
from blips.bayes.kernels import add_local_, library_for, row_dot
from blips.bayes.lazy import LazyRows
from blips.bayes.random import BitSource, quick_normals


@dataclass(frozen=True)
class PairRows(LazyRows):
    """Rows [E, 2 H + C]: of the first node, the second node, and the pair itself.

    Attributes:
        node: a, [N, H].
        pair: c, [E, C].
        edges: first and second node of each pair, [2, E].
    """

    node: Tensor
    pair: Tensor
    edges: Tensor

    @property
    def shape(self) -> torch.Size:
        """[E, 2 H + C]."""
        return torch.Size((len(self.pair), 2 * self.node.shape[1] + self.pair.shape[1]))

    def rows(self) -> Tensor:
        """The tensor, [E, 2 H + C]."""
        ends = (self.node.index_select(0, end) for end in self.edges)
        return torch.cat([*ends, self.pair], dim=1)


def local_of_pairs(
    h: PairRows,
    weight: Tensor,
    bias: Tensor | None,
    coef: Tensor,
    generators: Sequence[torch.Generator],
    bits: BitSource | None = None,
) -> Tensor:
    """`blips.bayes.estimators.local_linear` of such rows, with the same noise, [E, out]."""
    bits = bits or BitSource(generators)
    pairs = len(h.pair) // len(generators)
    eps = quick_normals(bits, pairs, weight.shape[0], weight.dtype)
    inputs = (h.node, h.pair, weight, bias, coef, eps, h.edges)
    return _LocalOfPairs.apply(*inputs)  # pyright: ignore


class _LocalOfPairs(Function):
    """As `blips.bayes.functions._Local`, whose gradients are summed over the pairs of a node.

    Keeps ``slope = 2 dz/dv = sqrt(coef) eps / sqrt(v)``, in the memory of eps.
    """

    @staticmethod
    def forward(
        ctx: Any,
        node: Tensor,
        pair: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        coef: Tensor,
        eps: Tensor,
        edges: Tensor,
    ) -> Tensor:
        ends, own = _split(weight, node.shape[1])
        var = F.linear(pair * pair, own * own)
        add_ends_(var, F.linear(node * node, ends * ends), edges)
        mean = F.linear(pair, own, bias)
        add_ends_(mean, F.linear(node, ends), edges)
        ctx.save_for_backward(node, pair, weight, bias, coef, eps, edges, var)
        return add_local_(mean, eps, var, VAR_FLOOR, coef)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        *inputs, var = ctx.saved_tensors
        if torch.is_grad_enabled():
            return by_autograd(_local_of_pairs_again, inputs, needed(ctx, inputs), grads)
        node, pair, weight, _, coef, slope, edges = inputs
        _, needs_pair, needs_weight, needs_bias = needed(ctx, inputs[:4])
        ends, own = _split(weight, node.shape[1])
        grad_z = grads[0]
        grad_var = grad_z * slope  # twice the gradient of v
        grad_coef = row_dot(grad_var, var).div_(coef + coef)
        at_ends = sum_at_ends(grad_z, edges, len(node))  # [N, 2 out]
        var_at_ends = sum_at_ends(grad_var, edges, len(node))
        grad_node = torch.mm(var_at_ends, ends * ends).mul_(node).addmm_(at_ends, ends)
        grad_pair = grad_weight = None
        if needs_pair:
            grad_pair = torch.mm(grad_var, own * own).mul_(pair).addmm_(grad_z, own)
        if needs_weight:
            of_ends = torch.mm(var_at_ends.t(), node * node).mul_(ends).addmm_(at_ends.t(), node)
            of_own = torch.mm(grad_var.t(), pair * pair).mul_(own).addmm_(grad_z.t(), pair)
            grad_weight = torch.cat([*of_ends.chunk(2), of_own], dim=1)
        grad_bias = grad_z.sum(0) if needs_bias else None
        return grad_node, grad_pair, grad_weight, grad_bias, grad_coef, None, None


def _local_of_pairs_again(
    node: Tensor,
    pair: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    coef: Tensor,
    slope: Tensor,
    edges: Tensor,
) -> Tensor:
    """The value of `_LocalOfPairs`, differentiable at any order."""
    h = PairRows(node, pair, edges).rows()
    std = (F.linear(h * h, weight * weight) + VAR_FLOOR).sqrt()
    root = coef.sqrt()[:, None]
    eps = slope * (std / root).detach()
    return F.linear(h, weight, bias) + root * eps * std


def _split(weight: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The weights of both nodes below each other, [2 out, H], and those of the pair, [out, C]."""
    ends = torch.cat([weight[:, :width], weight[:, width : 2 * width]])
    return ends, weight[:, 2 * width :]


def add_ends_(z: Tensor, ends: Tensor, edges: Tensor) -> Tensor:
    """Add to every pair what its nodes bring: ends [N, 2 out], for the first and the second."""
    if (library := library_for(z)) is not None:
        ends, edges = ends.contiguous(), edges.contiguous()
        library.blips_add_ends(address(ends), address(edges), address(z), *z.shape)
        return z
    for end, part in zip(edges, ends.chunk(2, dim=1), strict=True):
        z += part.index_select(0, end)
    return z


def sum_at_ends(z: Tensor, edges: Tensor, nodes: int) -> Tensor:
    """What the pairs of every node give it, first and second: [E, out] -> [N, 2 out]."""
    found = z.new_zeros(nodes, 2 * z.shape[1])
    if (library := library_for(z)) is not None:
        z, edges = z.contiguous(), edges.contiguous()
        library.blips_sum_at_ends(address(z), address(edges), address(found), *z.shape)
        return found
    for end, part in zip(edges, found.chunk(2, dim=1), strict=True):
        part.index_add_(0, end, z)
    return found
