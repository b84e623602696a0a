"""Radial bases and cutoff envelopes, functions of the interatomic distance r alone."""

import math

import torch
from torch import Tensor, nn


def cosine_cutoff(distance: Tensor, cutoff: float) -> Tensor:
    """Evaluate the envelope f(r) = (1 + cos(pi r / rc)) / 2 for r < rc, else 0, [E] A -> [E].

    f and f' vanish at rc.
    """
    inside = (distance < cutoff).to(distance.dtype)
    return 0.5 * (1.0 + torch.cos(math.pi * distance / cutoff)) * inside


class BesselBasis(nn.Module):
    """b_n(r) = sin(n pi r / rc) / r, n = 1..B (DimeNet, PaiNN)."""

    frequencies: Tensor

    def __init__(self, num_basis: int, cutoff: float) -> None:
        super().__init__()
        frequencies = math.pi / cutoff * torch.arange(1, num_basis + 1, dtype=torch.float64)
        self.register_buffer("frequencies", frequencies.to(torch.get_default_dtype()))

    def forward(self, distance: Tensor) -> Tensor:
        """Evaluate the basis, [E] A -> [E, B] 1/A."""
        distance = distance[:, None]
        return torch.sin(self.frequencies * distance) / distance


class GaussianBasis(nn.Module):
    """b_n(r) = exp(-(r - c_n)^2 / (2 w^2)), centres c_n evenly from 0 to rc, w their spacing."""

    centers: Tensor

    def __init__(self, num_basis: int, cutoff: float) -> None:
        super().__init__()
        self.register_buffer("centers", torch.linspace(0.0, cutoff, num_basis))
        self.width = cutoff / max(num_basis - 1, 1)

    def forward(self, distance: Tensor) -> Tensor:
        """Evaluate the basis, [E] A -> [E, B]."""
        return torch.exp(-0.5 * ((distance[:, None] - self.centers) / self.width) ** 2)
