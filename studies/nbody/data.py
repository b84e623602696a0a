"""Charged particles as a graph, and simulations of them as a data set that `blips.fit` takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from blips.data.dataset import Batch
from blips.data.graph import Graph
from blips.errors import InputError

POSITIONS = "positions"  # [N, 3], what models of particles predict


@dataclass(frozen=True)
class ParticleGraph(Graph):
    """Charged particles, every one connected to every other of its simulation."""

    velocities: Tensor  # [N, 3]
    charges: Tensor  # [N]

    @classmethod
    def from_arrays(cls, positions: Tensor, velocities: Tensor, charges: Tensor) -> Self:
        """Make a batch of M simulations of n particles: [M, n, 3], [M, n, 3], [M, n]."""
        if positions.shape != velocities.shape or positions.shape[2:] != (3,):
            raise InputError(
                f"positions {tuple(positions.shape)} and velocities {tuple(velocities.shape)} "
                "must both be [simulations, particles, 3]"
            )
        if charges.shape != positions.shape[:2]:
            raise InputError(
                f"charges {tuple(charges.shape)} must be one for each particle, "
                f"{tuple(positions.shape[:2])}"
            )
        simulations, particles = positions.shape[:2]
        receiver, sender = (~torch.eye(particles, dtype=torch.bool)).nonzero().T
        offsets = particles * torch.arange(simulations)[:, None]
        edges = torch.stack([(receiver + offsets).flatten(), (sender + offsets).flatten()])
        return cls(
            positions=positions.reshape(-1, 3),
            edge_index=edges.to(positions.device),
            structure=torch.arange(simulations, device=positions.device).repeat_interleave(
                particles
            ),
            num_structures=simulations,
            velocities=velocities.reshape(-1, 3),
            charges=charges.reshape(-1),
        )

    def turned(self, rotation: Tensor) -> Self:
        """Copy after a rotation of positions and velocities."""
        turned = super().turned(rotation)
        return replace(turned, velocities=self.velocities @ rotation.T)


class ParticleData:
    """Simulations of n particles: state now, and positions later as targets.

    Args:
        positions: [M, n, 3].
        velocities: [M, n, 3].
        charges: [M, n] or [M, n, 1].
        targets: positions to predict, [M, n, 3].
        dtype: of the tensors; torch's default where None.
        source: for messages.
    """

    def __init__(
        self,
        positions: Tensor | np.ndarray,
        velocities: Tensor | np.ndarray,
        charges: Tensor | np.ndarray,
        targets: Tensor | np.ndarray,
        dtype: torch.dtype | None = None,
        source: str = "simulations",
    ) -> None:
        arrays = (positions, velocities, charges, targets)
        states = [torch.as_tensor(a, dtype=dtype or torch.get_default_dtype()) for a in arrays]
        shape = states[0].shape
        shapes = [shape, shape, shape[:2], shape]
        if states[2].ndim == 3:
            states[2] = states[2].squeeze(-1)
        if len(shape) != 3 or [s.shape for s in states] != shapes:
            raise InputError(
                f"{source}: positions, velocities, charges and targets have the shapes "
                f"{', '.join(str(tuple(np.shape(a))) for a in arrays)}; expected [M, n, 3], "
                "[M, n, 3], [M, n] and [M, n, 3]"
            )
        self.positions, self.velocities, self.charges, self.targets = states
        self.source = source

    def __len__(self) -> int:
        return len(self.positions)

    def name_of(self, index: int) -> str:
        """Return number of the simulation."""
        return f"{self.source}, simulation {index}"

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return a batch of the simulations with these numbers, in this order."""
        rows = torch.as_tensor(indices)
        state = (self.positions[rows], self.velocities[rows], self.charges[rows])
        targets = {POSITIONS: self.targets[rows].reshape(-1, 3)}
        return Batch(ParticleGraph.from_arrays(*state), targets, tuple(indices))
