r"""First-order variance of a scalar output, from the gradients of one backward pass.

A Bayesian map with weights W + sqrt(coef) W eps moves its output z by dz = sqrt(coef) (W eps) h.
To first order in eps the scalar E moves by sum_rows (dE/dz) dz, a linear function of independent
standard normal numbers, so its variance is a sum of squares. With g = dE/dz:

    Var E = sum_rows coef sum_uv W_vu^2 (sum_c h_cu g_cv)^2

for rows with noise of their own. u, v count the channels in and out, c the components of an irrep
(one for scalars, where it is coef g^2 . (h^2)(W^2)^T). Row by row it says which edges and atoms
the uncertainty comes from.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from blips.bayes.linear import Product


def row_variances(product: Product, coef: Tensor) -> Tensor:
    """Compute the variance that each row of a product adds, with its own noise, [rows].

    Args:
        product: one matrix applied to rows, and dE/dz.
        coef: of the rows, [rows].
    """
    h, g = product.h.detach(), product.gradient.detach()
    weight_square = product.weight.detach().square()
    if h.ndim == 2:
        return coef * (F.linear(h.square(), weight_square) * g.square()).sum(dim=1)
    h, g = h.flatten(1, -2), g.flatten(1, -2)  # [rows, dim, in], [rows, dim, out]
    total = torch.zeros_like(coef)
    for a in range(h.shape[1]):
        for b in range(a + 1):
            both = F.linear(h[:, a] * h[:, b], weight_square) * g[:, a] * g[:, b]
            total = total + (1.0 if a == b else 2.0) * both.sum(dim=1)
    return (coef * total).clamp_min(0.0)  # rounding may leave a small negative number
