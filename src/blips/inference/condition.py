"""Condition the weights of a potential on structures: rows in, posterior out.

Structures are read in batches and leave only their sum of outer products, so memory is bounded by
the square of the dimension, whatever the number of structures. Several processes take every n-th
structure each and add their sums.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from ase import Atoms
from torch import Tensor

from blips import keys
from blips.backbones.base import AtomisticBackbone
from blips.bayes.condition import Evidence, Spectrum
from blips.bayes.random import seeded_generator
from blips.data.labels import Labels, available, extract
from blips.errors import InputError, TooLargeError
from blips.inference.linearise import ChosenMaps, CoefficientFunction, Linearised
from blips.inference.posterior import Scale
from blips.inference.rows import components, force_rows, random_sums
from blips.inference.scale import (
    RELATIVE_RATIOS,
    choose_ratio,
    fit_factor,
    fit_floor,
    fit_scale_and_floor,
)
from blips.memory import available_bytes

BATCH_ATOMS = 256
VALID_ROWS = 24  # force components of each validation structure, at most
VANISHING = 1e-6  # rows that are smaller by this factor than the largest direction are rounding
MATRICES = 4  # of dimension x dimension float64, that are alive at once at worst


class Seen(NamedTuple):
    """Evidence of some structures, how many there were and which elements they have."""

    evidence: Evidence
    structures: int
    numbers: frozenset[int]

    def joined(self, evidence: Evidence, structures: int, numbers: frozenset[int]) -> "Seen":
        """What was seen before, and this."""
        whole = Evidence(evidence.dimension)
        whole.merge(evidence)
        whole.merge(self.evidence)
        return Seen(whole, structures + self.structures, numbers | self.numbers)


def collect(
    backbone: AtomisticBackbone,
    maps: ChosenMaps,
    structures: Iterable[Atoms],
    *,
    rows: int,
    seed: int,
    first: int = 0,
    coefficients_of: CoefficientFunction | None = None,
) -> Seen:
    """Rows of energies and forces of all structures, summed.

    Args:
        backbone: the model.
        maps: whose weights are conditioned.
        structures: geometries; read one batch at a time.
        rows: force rows of a structure: its components where it has at most so many, else so many
            random sums.
        seed: of the random sums.
        first: number of the first structure, for its random numbers.
        coefficients_of: the inference network, where noise depends on the rows.
    """
    check_memory(maps.sketch.size)
    rank, world = (dist.get_rank(), dist.get_world_size()) if _parallel() else (0, 1)
    evidence, count, numbers = Evidence(maps.sketch.size), 0, set[int]()
    for batch in _batches(structures):
        own = [(count + k, atoms) for k, atoms in enumerate(batch) if (count + k) % world == rank]
        count += len(batch)
        numbers.update(int(number) for atoms in batch for number in atoms.numbers)
        for few in (True, False):  # all components, or random sums
            group = [(k, atoms) for k, atoms in own if (3 * len(atoms) <= rows) is few]
            if not group:
                continue
            graph = backbone.graph([atoms for _, atoms in group])
            linearised = Linearised(
                backbone, graph, maps, coefficients=coefficients_of, depth="rows"
            )
            evidence.add(linearised.energy_rows())
            generators = [seeded_generator("rows", seed, first + k) for k, _ in group]
            directions = components(graph, rows) if few else random_sums(graph, rows, generators)
            for _, row in force_rows(linearised, directions):
                evidence.add(row)
    if count == 0:
        raise InputError("no structures to condition on; give at least one geometry")
    if world > 1:
        evidence = _added_over_processes(evidence)
    return Seen(evidence, count, frozenset(numbers))


def check_memory(dimension: int) -> None:
    """Refuse a dimension whose matrices do not fit the machine."""
    needed, there = MATRICES * 8.0 * dimension**2, available_bytes()
    if needed > there:
        largest = int((there / (MATRICES * 8.0)) ** 0.5)
        raise TooLargeError(
            f"a posterior of {dimension} dimensions needs about {needed / 1e9:.3g} GB, and "
            f"{there / 1e9:.3g} GB are free; use dimension={largest} or less"
        )


def fit_scale(
    backbone: AtomisticBackbone,
    maps: ChosenMaps,
    evidence: Evidence,
    valid: Sequence[Atoms],
    *,
    seed: int,
    labels: Labels | None = None,
    coefficients_of: CoefficientFunction | None = None,
) -> Scale:
    """Ratio, scale and floors by the likelihood of validation errors.

    Args:
        backbone: the model.
        maps: whose weights are conditioned.
        evidence: of the conditioning structures.
        valid: labelled structures, neither trained nor tested on.
        seed: of the choice of force components.
        labels: names and units of the labels.
        coefficients_of: the inference network, where noise depends on the rows.
    """
    has = set(keys_of(valid, labels))
    spectrum = evidence.spectrum()
    ratios = RELATIVE_RATIOS * evidence.mean_square
    found = _valid_rows(backbone, maps, spectrum, ratios, valid, has, seed, labels, coefficients_of)
    of_fit = found.forces if keys.FORCES in has else found.energy
    fits = [fit_scale_and_floor(var, of_fit.error) for var in of_fit.var]
    ratio = choose_ratio(ratios, np.array([fit.nll for fit in fits]), len(valid))
    near = int(np.abs(np.log(ratios / ratio)).argmin())
    ratio, best = float(ratios[near]), fits[near]
    floor, factor = {keys.FORCES: best.floor}, 1.0
    if keys.ENERGY in has:
        var = best.scale**2 * found.energy.var[near]
        factor = fit_factor(var, found.energy.error)
        floor[keys.ENERGY] = fit_floor(factor**2 * var, found.energy.error, found.sizes)
    if keys.FORCES not in has:  # no force label: the energy's misfit of an atom over 1 A
        floor[keys.FORCES] = floor[keys.ENERGY]
    return Scale(ratio, best.scale, floor, factor)


def keys_of(valid: Sequence[Atoms], labels: Labels | None) -> list[str]:
    """Quantities that all validation structures have labels of; an error where there are none."""
    if not valid:
        raise InputError("the list of validation structures is empty; error bars need some labels")
    has = set[str].intersection(*(set(available(atoms, labels)) for atoms in valid))
    has &= {keys.ENERGY, keys.FORCES}
    if not has:
        raise InputError(
            "the validation structures have neither energies nor forces in common; the scale of "
            "error bars needs labels (geometries are enough for the conditioning structures)"
        )
    return sorted(has)


class _Errors(NamedTuple):
    var: np.ndarray  # [ratios, n] for a scale of 1
    error: np.ndarray  # [n]


class _ValidRows(NamedTuple):
    energy: _Errors
    forces: _Errors
    sizes: np.ndarray  # [S] number of atoms


def _valid_rows(
    backbone: AtomisticBackbone,
    maps: ChosenMaps,
    spectrum: Spectrum,
    ratios: np.ndarray,
    valid: Sequence[Atoms],
    has: set[str],
    seed: int,
    labels: Labels | None,
    coefficients_of: CoefficientFunction | None,
) -> _ValidRows:
    """Variances for all ratios, and errors, of energies and of force components."""
    grid = torch.as_tensor(ratios)
    least = VANISHING * float(spectrum.values.max()) ** 0.5
    var: dict[str, list[Tensor]] = {keys.ENERGY: [], keys.FORCES: []}
    error: dict[str, list[Tensor]] = {keys.ENERGY: [], keys.FORCES: []}
    generator = seeded_generator("valid rows", seed)
    for batch in _batches(valid):
        graph = backbone.graph(batch)
        forces = keys.FORCES in has
        depth = "rows" if forces else "members"
        linearised = Linearised(
            backbone, graph, maps, coefficients=coefficients_of, forces=forces, depth=depth
        )
        known = [extract(atoms, sorted(has), labels) for atoms in batch]
        if keys.ENERGY in has:
            target = torch.tensor([float(one[keys.ENERGY]) for one in known], dtype=torch.float64)
            var[keys.ENERGY].append(spectrum.variances(linearised.energy_rows(), grid))
            error[keys.ENERGY].append(linearised.outputs[keys.ENERGY].double() - target)
        if not forces:
            continue
        target = torch.as_tensor(np.concatenate([one[keys.FORCES] for one in known]))
        difference = linearised.outputs[keys.FORCES].double() - target  # [N, 3]
        for along, row in force_rows(linearised, components(graph, VALID_ROWS, generator)):
            off = graph.sum_over_structures((along.u * difference).sum(dim=1))[along.present]
            moves = row.norm(dim=1) > least  # forces that vanish by symmetry say nothing
            var[keys.FORCES].append(spectrum.variances(row[moves], grid))
            error[keys.FORCES].append(off[moves])
    joined = {
        name: _Errors(torch.cat(var[name], dim=1).numpy(), torch.cat(error[name]).numpy())
        if var[name]
        else _Errors(np.zeros((len(ratios), 0)), np.zeros(0))
        for name in var
    }
    sizes = np.array([len(atoms) for atoms in valid], dtype=float)
    return _ValidRows(joined[keys.ENERGY], joined[keys.FORCES], sizes)


def _batches(structures: Iterable[Atoms]) -> Iterator[list[Atoms]]:
    """Structures with at most `BATCH_ATOMS` atoms together, or single ones."""
    batch: list[Atoms] = []
    for atoms in structures:
        if batch and sum(map(len, batch)) + len(atoms) > BATCH_ATOMS:
            yield batch
            batch = []
        batch.append(atoms)
    if batch:
        yield batch


def _parallel() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _added_over_processes(evidence: Evidence) -> Evidence:
    """The sum of the evidence of all processes."""
    gram, count = evidence.gram().clone(), torch.tensor([evidence.count])
    dist.all_reduce(gram)
    dist.all_reduce(count)
    return Evidence.of_gram(gram, int(count))
