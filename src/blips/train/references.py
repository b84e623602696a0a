"""Energies per element: what a model starts training with, and what two sets disagree about.

Total energies of two levels of theory differ mostly by a constant for each element, which no force
depends on. A released model keeps its own energies and gets corrections to them, fitted to what
it leaves of the labels; a set at another level of theory is moved to where the model is.
"""

from collections.abc import Mapping, Sequence

import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.data import atomic_numbers

from blips import keys
from blips.backbones.base import AtomisticBackbone, Backbone, graph_batches
from blips.backbones.foreign import ForeignBackbone
from blips.config import RunConfig
from blips.data.elements import fit_reference_energies
from blips.data.labels import Labels, available, extract
from blips.train.objective import plain_outputs


def set_reference_energies(
    backbone: AtomisticBackbone, structures: Sequence[Atoms], settings: RunConfig
) -> None:
    """Set energies per element; of a released model, corrections to its own."""
    chosen = settings.data.reference_energies
    if chosen == "none" or settings.training.freeze_backbone:
        return
    labels = Labels(**settings.data.labels.model_dump())
    if isinstance(chosen, dict):
        shift = {atomic_numbers[symbol]: energy for symbol, energy in chosen.items()}
    elif settings.training.weights.energy == 0 and not _have_energies(structures, labels):
        return
    elif isinstance(backbone, ForeignBackbone):
        backbone.reference.set({})
        shift = unexplained_energies(backbone, structures, labels)
    else:
        shift = fit_reference_energies(structures, labels=labels)
    backbone.reference.set(shift)


def unexplained_energies(
    backbone: Backbone, structures: Sequence[Atoms], labels: Labels | None = None
) -> dict[int, float]:
    """Energy per element (eV) that is left when a model's energies are taken from the labels."""
    found: list[Atoms] = []
    for atoms in structures:
        graph = next(graph_batches(backbone, atoms, 1))
        with torch.no_grad():
            energy = plain_outputs(backbone, graph, forces=False)[keys.ENERGY]
        rest = float(extract(atoms, (keys.ENERGY,), labels)[keys.ENERGY]) - float(energy)
        copy = atoms.copy()
        copy.calc = SinglePointCalculator(copy, energy=rest)
        found.append(copy)
    return fit_reference_energies(found)


def moved(
    structures: Sequence[Atoms],
    shift: Mapping[int, float],
    quantities: Sequence[str] = (keys.ENERGY, keys.FORCES),
    labels: Labels | None = None,
) -> list[Atoms]:
    """Copies whose energies are without `shift`, with labels in eV and A under ASE's names."""
    copies: list[Atoms] = []
    for atoms in structures:
        found = extract(atoms, quantities, labels)
        if keys.ENERGY in found:
            found[keys.ENERGY] = found[keys.ENERGY] - sum(shift[int(z)] for z in atoms.numbers)
        copy = atoms.copy()
        copy.calc = SinglePointCalculator(copy, **found)
        copies.append(copy)
    return copies


def _have_energies(structures: Sequence[Atoms], labels: Labels) -> bool:
    return all(keys.ENERGY in available(atoms, labels) for atoms in structures)
