"""Covariances of forces in one pass: the weights of a model's tensors, and the network on top."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from ase.data import atomic_numbers, chemical_symbols
from torch import Tensor

from blips.errors import InputError
from blips.onepass import OnePass
from blips.spread.network import Refinement
from blips.spread.tensors import Ingredients, feature_names

Weights = tuple[float, ...]


@dataclass(frozen=True)
class ForceSpread:
    """Weights A ... I of one model.

    Attributes:
        groups: number of groups of maps.
        weights: of all atoms together, [B], non-negative; see `feature_names`. They count for
            elements without weights of their own.
        quality: how well they did on structures that they were not fitted to, where measured.
        of_elements: weights of each atomic number.
        axes: whether there are weights of tensors along the axes.
        refinement: network that corrects the sum of the tensors.
    """

    groups: int
    weights: Weights
    quality: Mapping[str, float]
    of_elements: Mapping[int, Weights] = field(default_factory=dict[int, Weights])
    axes: bool = False
    refinement: Refinement | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Refuse weights that belong to other groups."""
        expected = len(feature_names(self.groups, self.axes))
        for weights in (self.weights, *self.of_elements.values()):
            if len(weights) != expected:
                raise InputError(
                    f"{len(weights)} weights for {expected} tensors of {self.groups} groups; "
                    "were they made by another version?"
                )

    def covariance(self, found: OnePass) -> Tensor:
        """Of every force, [N, 3, 3] (eV/A)^2."""
        ingredients = Ingredients.of(found, self.groups, self.axes)
        cov = ingredients.covariance(self.of_atoms(found.graph.numbers))
        if self.refinement is None:
            return cov
        with torch.no_grad():
            return self.refinement.to(cov.device)(ingredients.scene(cov))

    def of_atoms(self, numbers: Tensor) -> Tensor:
        """Weights of atoms with these atomic numbers, [N] -> [N, B]."""
        elements, row = torch.unique(numbers, return_inverse=True)
        rows = [self.of_elements.get(int(z), self.weights) for z in elements]
        table = torch.tensor(rows, dtype=torch.float64, device=numbers.device)
        return table.view(-1, len(self.weights)).index_select(0, row)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able description."""
        return {
            "groups": self.groups,
            "weights": list(self.weights),
            "quality": dict(self.quality),
            "elements": {chemical_symbols[z]: list(row) for z, row in self.of_elements.items()},
            "axes": self.axes,
            "refinement": None if self.refinement is None else self.refinement.to_dict(),
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """What `to_dict` described."""
        elements = saved.get("elements", {})  # earlier versions had none
        of_elements = {atomic_numbers[z]: tuple(row) for z, row in elements.items()}
        network = saved.get("refinement")
        return cls(
            saved["groups"],
            tuple(saved["weights"]),
            saved["quality"],
            of_elements,
            saved.get("axes", False),
            Refinement.from_dict(network) if network else None,
        )
