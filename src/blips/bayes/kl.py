r"""Kullback-Leibler divergence between the posterior of a weight and its prior.

    posterior N(theta, coef theta^2),  prior N(0, rho theta^2),  rho = p / (1 - p)
    KL(coef) = 1/2 [ (coef + 1) / rho + log(rho / coef) - 1 ]

It does not depend on theta, is least at coef = rho, and is there 1 / (2 rho) (the means differ).
The paper prints it without the factor 1/2.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from blips.errors import InputError, refuse_unknown


def prior_coefficient(prior_dropout: float) -> float:
    """Compute rho = p / (1 - p) of the prior's dropout rate p in (0, 1)."""
    if not 0.0 < prior_dropout < 1.0:
        raise InputError(
            f"prior_dropout is {prior_dropout}; expected a rate between 0 and 1 (exclusive), "
            "e.g. 0.5 to train from scratch, 0.01 for pretrained weights"
        )
    return prior_dropout / (1.0 - prior_dropout)


def mean_kl_per_weight(coef: Tensor, rho: float) -> Tensor:
    """Average the KL of a weight, [(coef + 1) / rho + log(rho / coef) - 1] / 2, in nats."""
    return 0.5 * ((coef.mean() + 1.0) / rho + math.log(rho) - 1.0 - coef.log().mean())


def kl_divergence(
    coefficients: Mapping[str, Tensor],
    roles: Mapping[str, str],
    rho: float,
    *,
    reduction: str = "mean",
    num_weights: Mapping[str, int] | None = None,
    num_data: int | None = None,
) -> Tensor:
    """Compute the KL of all Bayesian maps as one number, from their coefficients [rows].

    "mean" is the mean over rows and maps of a row type, summed over row types (the paper's code;
    its lambda refers to this). "elbo" is the sum over weights of the row mean, over `num_data`.
    """
    refuse_unknown("KL reduction", reduction, ("mean", "elbo"))
    present = {name: coef for name, coef in coefficients.items() if coef.numel() > 0}
    if not present:  # of isolated atoms, which have no edges
        return torch.zeros(())
    if reduction == "mean":
        by_role: dict[str, list[Tensor]] = {}
        for name, coef in present.items():
            by_role.setdefault(roles[name], []).append(coef)
        terms = [mean_kl_per_weight(torch.cat(group), rho) for group in by_role.values()]
        return torch.stack(terms).sum()
    if num_weights is None or num_data is None:
        raise InputError('reduction "elbo" needs num_weights (by map) and num_data')
    terms = [num_weights[name] * mean_kl_per_weight(coef, rho) for name, coef in present.items()]
    return torch.stack(terms).sum() / num_data
