"""Rows of candidates: what their labels would say about the weights; see `blips.active.rules`."""

from collections.abc import Sequence

import numpy as np
import torch
from ase import Atoms
from torch import Tensor

from blips.active.database import CampaignError
from blips.active.frames import digest
from blips.backbones.base import atomistic
from blips.bayes.condition import GaussianPosterior
from blips.bayes.noise import seeded_generator
from blips.data.structures import batches_of
from blips.inference.rows import BATCH_ATOMS, components, force_rows, random_sums
from blips.potential import BayesianPotential


def candidate_rows(
    potential: BayesianPotential,
    structures: Sequence[Atoms],
    *,
    rows: int,
    seed: int = 0,
    energies: bool = True,
) -> np.ndarray:
    """Return the rows b of structures: the energy first, then forces, [S, 1 + rows, d].

    Forces are random sums u . F with u = +-1 / sqrt(rows), whose outer products add up to those of
    all components on average; all components where a structure has at most `rows`, with rows of
    zeros for those that it lacks.

    Args:
        potential: conditioned, with its evidence.
        structures: geometries.
        rows: force rows of each.
        seed: of the random sums, with the geometry: equal structures have equal rows.
        energies: whether energies are labelled too; else their rows are left out.
    """
    gaussian = _gaussian(potential)
    parts: list[np.ndarray] = []
    for batch in batches_of(structures, BATCH_ATOMS):
        generators = [seeded_generator("candidates", seed, digest(atoms)) for atoms in batch]
        found = _rows_of_batch(potential, batch, rows, generators)  # [S, 1 + rows, d]
        parts.append(whitened(gaussian, found if energies else found[:, 1:]))
    return np.concatenate(parts)


def _rows_of_batch(
    potential: BayesianPotential,
    batch: Sequence[Atoms],
    rows: int,
    generators: Sequence[torch.Generator],
) -> Tensor:
    graph = atomistic(potential.backbone).graph(batch)
    linearised = potential.linear_model()(graph, depth="rows")
    of_energy = linearised.energy_rows()  # [S, d]
    found = of_energy.new_zeros(len(batch), 1 + rows, of_energy.shape[1])
    found[:, 0] = of_energy
    few = torch.tensor([3 * len(atoms) <= rows for atoms in batch])
    for place, (along, row) in enumerate(force_rows(linearised, components(graph, rows)), 1):
        found[along.present & few, place] = row[few[along.present]]
    if not bool(few.all()):
        sums = force_rows(linearised, random_sums(graph, rows, generators))
        for place, (_, row) in enumerate(sums, 1):
            found[~few, place] = row[~few]
    return found


def whitened(gaussian: GaussianPosterior, rows: Tensor) -> np.ndarray:
    """Return rows in units of the label noise, whitened under the posterior, [..., d] float64.

    With Lambda^-1 = tau^2 (I - sum_j u_j u_j^T l_j / (l_j + r)) and s^2 = r tau^2,

        b Lambda^(-1/2) / s = (b - sum_j u_j (u_j . b) (1 - sqrt(r / (l_j + r)))) / sqrt(r)
    """
    spectrum, ratio = gaussian.spectrum, gaussian.ratio
    flat = rows.detach().reshape(-1, rows.shape[-1])
    return (spectrum.draws(flat, ratio) / ratio**0.5).reshape(rows.shape).cpu().numpy()


def _gaussian(potential: BayesianPotential) -> GaussianPosterior:
    gaussian = potential.conditioned().gaussian
    if gaussian is None:
        raise CampaignError(
            "the rules information and expected_reduction need the posterior itself, not draws "
            "alone; condition the model on structures, or set select.rule to force_std"
        )
    return gaussian
