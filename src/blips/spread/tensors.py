r"""Covariance of forces in one pass, out of the energy's variance and the geometry.

One backward pass gives every atom's share v_g of the energy's variance, for groups g of maps (in
the order in which the model applies them). What noise of an atom does to forces acts along the
bonds. With unit vectors u_ij and distances r_ij of an atom's neighbours and windows
w(r) = exp(-r^2 / a^2), the covariance of its force is modelled as a sum of six kinds of positive
tensors,

    Cov_i = sum_g  A_g  v_gi 1
                 + B_ga sum_j w_a(r_ij) v_gj u_ij u_ij^T     noise of a neighbour, along the bond
                 + C_ga v_gi b_i b_i^T,  b_i = sum_j w_a(r_ij) u_ij     all bonds together
                 + D_ga v_gi sum_j w_a(r_ij)^2 u_ij u_ij^T              each bond by itself
          + E  coef_i F_i F_i^T                              noise in proportion to the force
          + G_a coef_i sum_j w_a(r_ij) (F_i . u_ij)^2 u_ij u_ij^T     to its part along each bond
          + sum_x (sum_g H_gx v_gi + I_x coef_i) e_x e_x^T      along the axes x

with weights A ... I >= 0 for each element that atom i may be; the last line is for models without
symmetry (ORB) alone. They are numbers of a model, found once by non-negative least squares against
its own samples (`distil`), without any labels. The result is positive, turns with the structure
(but for the last line, as the forces of such models), and grows with the posterior's coefficients
as the true covariance does.

The alternative, derivatives of forces by the noise along random directions, costs as much as a
Monte Carlo sample for each direction and is as noisy as that (see the study fast-uncertainty).
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from blips import keys
from blips.data.graph import AtomGraph
from blips.onepass import OnePass
from blips.spread.geometry import Geometry, outer
from blips.spread.network import Scene

WINDOWS = (1.2, 2.5)  # a, A: bonds of hydrogen, and longer ones
GROUPS = 6  # at most
WINDOW_KINDS = ("B", "C", "D")
NUM_IN_WINDOWS = len(WINDOWS) * len(WINDOW_KINDS)


@dataclass(frozen=True)
class Ingredients:
    """What the tensors are made of; float64.

    Attributes:
        shares: v, [N, G] eV^2.
        forces: [N, 3] eV/A.
        coef: mean coefficient of an atom's rows, [N].
        graph: neighbours.
        axes: whether there are tensors H and I: the model has no symmetry.
        features: of the atoms, for a network, where a direct model gives them; else [N, 0].
    """

    shares: Tensor
    forces: Tensor
    coef: Tensor
    graph: AtomGraph
    axes: bool
    features: Tensor

    @classmethod
    def of(cls, found: OnePass, groups: int = GROUPS, axes: bool = False) -> Self:
        """Shares of `groups` groups of maps (fewer if there are fewer maps)."""
        forces = found.outputs[keys.FORCES].double()
        features = forces[:, :0] if found.features is None else found.features.double()
        return cls(found.shares(groups), forces, found.atom_coef(), found.graph, axes, features)

    def to(self, device: torch.device | str) -> Self:
        """On that device."""
        return replace(
            self,
            shares=self.shares.to(device),
            forces=self.forces.to(device),
            coef=self.coef.to(device),
            graph=self.graph.to(device),
            features=self.features.to(device),
        )

    def basis(self) -> Tensor:
        """All tensors, [B, N, 3, 3]; see `feature_names` for their order."""
        s = self.shares.T[..., None, None]  # [G, N, 1, 1]
        unit = torch.eye(3, dtype=s.dtype, device=s.device)
        parts = [s * unit]
        geometry = Geometry.of(self.graph)
        for a in WINDOWS:
            together, apart = geometry.together(a), geometry.apart(a)
            of_senders = self.shares.index_select(0, geometry.sender).unbind(1)  # [E] each
            parts.append(torch.stack([geometry.along_bonds(a, share) for share in of_senders]))
            parts.append(s * together)
            parts.append(s * apart)
        if self.axes:
            parts += [s * outer(axis[None]) for axis in unit]
        return torch.cat([*parts, torch.stack(self._proportional(geometry))])

    def covariance(self, weights: Tensor) -> Tensor:
        """Sum of the tensors with weights of each atom, [N, B] -> [N, 3, 3]; none is made alone."""
        groups, geometry = self.shares.shape[1], Geometry.of(self.graph)
        by_group, last = weights.tensor_split([-num_alone(self.axes)], dim=1)
        own, *rest = by_group.split(groups, dim=1)  # [N, G] each
        unit = torch.eye(3, dtype=weights.dtype, device=weights.device)
        total = self._of_atoms(own) * unit
        for weight, tensor in zip(last.unbind(1), self._proportional(geometry), strict=True):
            total = total + weight[:, None, None] * tensor
        of_windows, of_axes = rest[:NUM_IN_WINDOWS], rest[NUM_IN_WINDOWS:]
        for weight, axis in zip(of_axes, unit if self.axes else (), strict=True):
            total = total + self._of_atoms(weight) * outer(axis[None])
        of_senders = self.shares.index_select(0, geometry.sender)  # [E, G]
        for a, (along, together, apart) in zip(WINDOWS, batched_threes(of_windows), strict=True):
            scale = (along.index_select(0, geometry.receiver) * of_senders).sum(dim=1)  # [E]
            total = total + geometry.along_bonds(a, scale)
            total = total + self._of_atoms(together) * geometry.together(a)
            total = total + self._of_atoms(apart) * geometry.apart(a)
        return total

    def scene(self, cov: Tensor) -> Scene:
        """What a network needs to correct this covariance."""
        return Scene.of(
            self.graph.numbers,
            self.shares,
            self.forces,
            self.coef,
            cov,
            Geometry.of(self.graph),
            self.features if self.axes else None,
        )

    def _of_atoms(self, weights: Tensor) -> Tensor:
        """Sum over groups of weight times share, [N, G] -> [N, 1, 1]."""
        return (weights * self.shares).sum(dim=1)[:, None, None]

    def _proportional(self, geometry: Geometry) -> list[Tensor]:
        """Tensors of the force, of its parts along bonds, and of the axes, [N, 3, 3] each."""
        tensors = [outer(self.forces), *(geometry.of_parts(a, self.forces) for a in WINDOWS)]
        if self.axes:
            unit = torch.eye(3, dtype=self.coef.dtype, device=self.coef.device)
            tensors += [outer(axis[None]) for axis in unit]
        return [self.coef[:, None, None] * tensor for tensor in tensors]


def feature_names(groups: int, axes: bool = False) -> list[str]:
    """Name of each tensor of `Ingredients.basis`, in order."""
    names = [f"A{g}" for g in range(groups)]
    names += [f"{k}{g} {a}" for a in WINDOWS for k in WINDOW_KINDS for g in range(groups)]
    names += [f"H{g} {x}" for x in ("xyz" if axes else "") for g in range(groups)]
    names += ["E", *(f"G {a}" for a in WINDOWS)]
    return names + [f"I {x}" for x in ("xyz" if axes else "")]


def num_alone(axes: bool = False) -> int:
    """How many tensors belong to no group: E, G, and I along the axes."""
    return 1 + len(WINDOWS) + (3 if axes else 0)


def batched_threes(items: list[Tensor]) -> list[list[Tensor]]:
    """Items in threes."""
    return [items[k : k + 3] for k in range(0, len(items), 3)]
