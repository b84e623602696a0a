"""Energies per element: what a model starts training with, and what two sets disagree about.

Total energies of two levels of theory differ mostly by a constant for each element, which no force
depends on. A released model keeps its own energies and gets corrections to them, fitted to what
it leaves of the labels (`blips.inference.alignment` has the formula); a set at another level of
theory is moved to where the model is.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.data import atomic_numbers, chemical_symbols

from blips import keys
from blips.backbones.base import AtomisticBackbone, Backbone, ReferenceEnergies, atomistic
from blips.backbones.derivatives import plain_outputs
from blips.backbones.foreign import ForeignBackbone
from blips.config import RunConfig
from blips.conversion import bayesianize
from blips.data.labels import Labels, available, extract
from blips.data.sanity import warn_of_labels
from blips.data.structures import batches_of
from blips.errors import ConfigError
from blips.inference.alignment import Alignment, element_counts, fit_alignment
from blips.inference.scale import keys_of
from blips.potential import BayesianPotential
from blips.train.checkpoint import Saveable
from blips.train.objective import Wrapper


def set_reference_energies(
    backbone: AtomisticBackbone, structures: Iterable[Atoms], settings: RunConfig
) -> None:
    """Set energies per element; of a released model, corrections to its own.

    Labels are those of the backbone. Structures may be read more than once, one at a time.
    """
    chosen, labels = settings.data.reference_energies, backbone.labels
    if chosen == "none" or settings.training.freeze_backbone:
        return
    if isinstance(chosen, dict):
        _set_given(backbone.reference, chosen, structures)
        return
    if settings.training.weights.energy == 0 and not all(
        keys.ENERGY in available(atoms, labels) for atoms in structures
    ):
        return
    if isinstance(backbone, ForeignBackbone):
        backbone.reference.set({})
        shift = unexplained_energies(backbone, structures, labels).by_number()
    else:
        shift = fit_reference_energies(structures, labels=labels)
    backbone.reference.set(shift)


def settle_reference_energies(
    backbone: AtomisticBackbone,
    structures: Sequence[Atoms],
    settings: RunConfig,
) -> None:
    """Shift energies per element by what a trained model leaves of those of its structures.

    Forces count so much more in most losses that training leaves a constant of some meV/atom.
    """
    training = settings.training
    fitted = settings.data.reference_energies == "fit" and not training.freeze_backbone
    if fitted and training.weights.energy > 0:
        shift = unexplained_energies(backbone, structures, backbone.labels).shift
        backbone.reference.shift += torch.as_tensor(shift).to(backbone.reference.shift)


def _set_given(
    reference: ReferenceEnergies, chosen: Mapping[str, float], structures: Iterable[Atoms]
) -> None:
    """Set the energies of a configuration, which must have all elements of the structures."""
    if unknown := sorted(chosen.keys() - set(chemical_symbols[1:])):
        raise ConfigError(f"{', '.join(unknown)} in data.reference_energies: no such element")
    trained = {int(number) for atoms in structures for number in set(atoms.numbers)}
    if lacking := sorted({chemical_symbols[number] for number in trained} - chosen.keys()):
        raise ConfigError(
            f"data.reference_energies lacks {', '.join(lacking)} of the training structures; give "
            "an energy in eV for every element"
        )
    reference.set({atomic_numbers[symbol]: energy for symbol, energy in chosen.items()})
    for number in range(len(reference.known)):
        reference.known[number] = number in trained


def fit_reference_energies(
    structures: Iterable[Atoms], labels: Labels | None = None
) -> dict[int, float]:
    """Fit the energy of each element to energies of structures, eV by atomic number.

        e = argmin_e  sum_s ( E_s - sum_z n_sz e_z )^2,   of least norm where that is not unique

    with n_sz atoms of element z in structure s (all of one stoichiometry do not decide it).
    """
    counts = element_counts(structures)  # [S, 119]
    energies = [extract(atoms, (keys.ENERGY,), labels)[keys.ENERGY] for atoms in structures]
    present = np.flatnonzero(counts.any(axis=0))
    fitted, *_ = np.linalg.lstsq(counts[:, present].astype(float), energies, rcond=None)
    return dict(zip(present.tolist(), fitted.tolist(), strict=True))


def unexplained_energies(
    backbone: Backbone,
    structures: Iterable[Atoms],
    labels: Labels | None = None,
    var: np.ndarray | None = None,
) -> Alignment:
    """Fit the energies per element that a model leaves of those of structures.

    `var` are variances of the model's energies, [S] eV^2; None for zero.
    """
    energies: list[float] = []
    for batch in batches_of(structures):
        graph = atomistic(backbone).graph(batch)
        with torch.no_grad():
            energies += plain_outputs(backbone, graph, forces=False)[keys.ENERGY].tolist()
    targets = [float(extract(atoms, (keys.ENERGY,), labels)[keys.ENERGY]) for atoms in structures]
    return fit_alignment(element_counts(structures), np.subtract(targets, energies), var)


def align(
    potential: BayesianPotential,
    structures: Sequence[Atoms],
    labels: Labels | None = None,
    var: np.ndarray | None = None,
) -> Alignment:
    """Shift a potential's energies per element to the labels', and keep the uncertainty.

    Forces stay as they are. Arguments as for `unexplained_energies`.
    """
    backbone = atomistic(potential.backbone)
    found = unexplained_energies(backbone, structures, labels, var)
    if found.structures < len(found.numbers):
        warnings.warn(
            f"{found.structures} labelled structures have {len(found.numbers)} elements, too many "
            f"to tell their energies apart: {found}. Error bars of energies count this; with "
            f"{2 * len(found.numbers)} or more structures they would be smaller",
            stacklevel=2,
        )
    reference = backbone.reference.shift
    reference += torch.as_tensor(found.shift).to(reference)
    potential.alignment = found
    return found


def conditioned(
    model: Saveable,
    structures: Sequence[Atoms],
    valid: Sequence[Atoms] | None,
    *,
    anew: bool = False,
    shift: bool = True,
    labels: Labels | None = None,
    **options: Any,
) -> BayesianPotential:
    """Condition a model on geometries, with labelled ones for the scale of its error bars.

    What it was conditioned on before is forgotten if `anew`. Energies per element of a released
    model are fitted to those of `valid` if `shift`. Options are those of `condition`.
    """
    if isinstance(model, Wrapper):
        raise ConfigError(f"this is a {model.kind}, which has error bars of its own")
    potential = bayesianize(model) if isinstance(model, Backbone) else model
    if anew:
        potential.posterior = None
    warn_of_labels(valid or (), labels)
    has = () if valid is None else keys_of(valid, labels)
    released = isinstance(model, Backbone) and model.pretrained
    if valid is None or not (shift and released and keys.ENERGY in has):
        potential.condition(structures, valid=valid, labels=labels, **options)
    elif keys.FORCES not in has:  # aligned first: else elements' energies would count as errors
        align(potential, valid, labels)
        potential.condition(structures, valid=valid, labels=labels, **options)
    else:
        forces = moved(valid, {}, (keys.FORCES,), labels)
        potential.condition(structures, valid=forces, labels=Labels(), **options)
        std = potential.predict(valid, method="onepass", forces=False).array("energy_std")
        align(potential, valid, labels, std**2)
    return potential


def moved(
    structures: Sequence[Atoms],
    shift: Mapping[str, float],
    quantities: Sequence[str] = (keys.ENERGY, keys.FORCES),
    labels: Labels | None = None,
) -> list[Atoms]:
    """Copy structures with `shift` (eV by element) off their energies; labels as ASE has them."""
    copies: list[Atoms] = []
    for atoms in structures:
        found = extract(atoms, quantities, labels)
        if keys.ENERGY in found:
            found[keys.ENERGY] = found[keys.ENERGY] - sum(shift[symbol] for symbol in atoms.symbols)
        copy = atoms.copy()
        copy.calc = SinglePointCalculator(copy, **found)
        copies.append(copy)
    return copies
