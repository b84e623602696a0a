"""Rows of candidates: what their labels would say about the weights; see `blips.active.rules`."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from ase import Atoms
from torch import Tensor

from blips import keys
from blips.active.frames import digest
from blips.backbones.base import atomistic
from blips.bayes.condition import Spectrum
from blips.bayes.noise import seeded_generator
from blips.data.structures import batches_of
from blips.inference.linearise import Linearised
from blips.inference.monte_carlo import kept_num_threads
from blips.inference.rows import BATCH_ATOMS, components, random_sums
from blips.potential import BayesianPotential


@kept_num_threads(1)
def candidate_rows(
    potential: BayesianPotential, structures: Sequence[Atoms], *, rows: int, seed: int = 0
) -> np.ndarray:
    """Return the rows b of structures: the energy first, then forces, [S, 1 + rows, d].

    Forces are random sums u . F with u = +-1 / sqrt(rows), whose outer products add up to those of
    all components on average; all components where a structure has at most `rows`, with rows of
    zeros for those that it lacks. The seed counts with the geometry: equal structures have equal
    rows. The potential must be conditioned, with its evidence.
    """
    passes = _passes(potential, structures, rows, seed)
    return np.concatenate([found for _, found, _, _ in passes])


@kept_num_threads(1)
def labelled_rows(
    potential: BayesianPotential, structures: Sequence[Atoms], *, rows: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of labelled structures and what the mean lacks along them.

    Rows [S, 1 + rows, d] as `candidate_rows` has them; label minus mean of the energy (eV) and of
    the same sums of forces (eV/A), [S, 1 + rows].
    """
    parts, lacking = [], []
    for batch, found, along, linearised in _passes(potential, structures, rows, seed):
        energies = np.array([atoms.get_potential_energy() for atoms in batch])
        forces = np.concatenate([atoms.get_forces() for atoms in batch])
        labels = {keys.ENERGY: energies, keys.FORCES: forces}
        means = {key: linearised.outputs[key].detach().double() for key in labels}
        energy, force = (torch.as_tensor(labels[key]).to(means[key]) - means[key] for key in labels)
        missing = energy.new_zeros(found.shape[:2])
        missing[:, 0] = energy
        for place, u in enumerate(along, 1):
            missing[:, place] = linearised.graph.sum_over_structures((u * force).sum(dim=1))
        parts.append(found)
        lacking.append(missing.cpu().numpy())
    return np.concatenate(parts), np.concatenate(lacking)


def _passes(
    potential: BayesianPotential, structures: Sequence[Atoms], rows: int, seed: int
) -> Iterator[tuple[Sequence[Atoms], np.ndarray, list[Tensor], Linearised]]:
    """Yield batches, their white rows, the directions u of their forces [N, 3], and the pass."""
    posterior = potential.conditioned()
    spectrum: Any = posterior.spectrum  # a campaign keeps the evidence
    for batch in batches_of(structures, BATCH_ATOMS):
        graph = atomistic(potential.backbone).graph(batch)
        linearised = potential.linear_model()(graph, depth="rows")
        generators = [seeded_generator("candidates", seed, digest(atoms)) for atoms in batch]
        sizes = graph.node_counts()
        few = (3 * sizes <= rows).repeat_interleave(sizes)[:, None]  # [N, 1]
        both = zip(components(graph, rows), random_sums(graph, rows, generators), strict=False)
        along = [torch.where(few, u, sums) for u, sums in both]
        of_energy = linearised.energy_rows()  # [S, d]
        found = of_energy.new_zeros(len(batch), 1 + rows, of_energy.shape[1])
        found[:, 0] = of_energy
        for place, row in enumerate(linearised.rows_along(keys.FORCES, along), 1):
            found[:, place] = row
        yield batch, whitened(spectrum, posterior.scale.ratio, found), along, linearised


def whitened(spectrum: Spectrum, ratio: float, rows: Tensor) -> np.ndarray:
    """Return rows in units of the label noise, whitened under the posterior, [..., d] float64.

    With Lambda^-1 = tau^2 (I - sum_j u_j u_j^T l_j / (l_j + r)) and s^2 = r tau^2,

        b Lambda^(-1/2) / s = (b - sum_j u_j (u_j . b) (1 - sqrt(r / (l_j + r)))) / sqrt(r)
    """
    flat = rows.detach().double().reshape(-1, rows.shape[-1])
    return (spectrum.draws(flat, ratio) / ratio**0.5).reshape(rows.shape).cpu().numpy()
