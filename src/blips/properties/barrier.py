r"""Barriers with error bars: the nudged elastic band of ASE, or a path as it is.

    barrier = E(top) - E(first),     d barrier_k = ( b(top) - b(first) ) . v_k

to first order at the plain model's path, as its top and its ends are stationary. What a member
errs by at both geometries cancels, and what it errs by in opposite ways adds up; error bars of the
two energies, added as if they were independent, know neither. Members who run their own band
start from the plain model's.

The misfit of the forces is in no member. If it were the same all along the path, of std a(s) in the
path's direction, the energy would be off by the integral of a(s) ds: `details["misfit_std"]`, an
upper bound, as misfit that changes its sign along the path cancels.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from ase import Atoms
from ase.geometry import find_mic
from ase.mep import NEB
from ase.optimize import FIRE

from blips.errors import InputError
from blips.potential import BayesianPotential
from blips.properties.calculation import Calculation, Surface
from blips.properties.result import Properties, Values

Array = np.ndarray
UNITS = {"barrier": "eV", "reverse_barrier": "eV", "reaction_energy": "eV"}
FMAX = 0.05  # eV/A, of the band


def barrier(
    potential: BayesianPotential,
    path: Sequence[Atoms],
    *,
    band: bool = True,
    images: int = 7,
    **options: Any,
) -> Properties:
    """Compute the barrier between the ends of a path, both ways, and the energy between them.

    A path is the two ends, or also images between them. The ends are relaxed, and a climbing band
    between them (of `images` with its ends, where the path has the ends alone), unless `band` is
    False: then the path is taken as it is, such as a scan of an angle. Options are those of
    `Calculation`; fmax and steps are also those of the band.

    Returns:
        Quantities of `UNITS`; `details["energies"]` [images], `details["member_energies"]`
        [K, images] and `details["misfit_std"]` [images], from the first image on, are profiles
        along the plain model's path, eV.
    """
    run = Calculation(potential, **{"fmax": FMAX, **options})
    if len(path) < 2 or any(list(one.symbols) != list(path[0].symbols) for one in path):
        raise InputError("a path needs at least two structures with the same atoms in one order")
    mean = [atoms.copy() for atoms in path]
    if band:
        mean = climbing_band(run, run.plain, _images(mean, images))
    energies = run.plain(mean).array("energy")
    details: dict[str, Any] = {"energies": energies}
    changes = np.empty(0)
    if potential.posterior is not None or run.method == "linear":
        changes = run.energy_changes(mean)  # [K, images]
        details["member_energies"] = energies + run.energy_factor * changes
        prediction = potential.predict(mean, samples=2, seed=run.seed)
        details["misfit_std"] = misfit_along(mean, prediction.forces_aleatoric_std)
        details["notes"] = notes = []
        if misfit := details["misfit_std"][energies.argmax()]:
            notes.append(f"misfit of the forces along the path, in no member: ± {misfit:.2g} eV")
        if prediction.in_domain is not None and not prediction.in_domain.all():
            notes.append(
                "the path leaves the data's domain (prediction.in_domain): no error bar holds there"
            )

    def first_order() -> list[Values]:
        top = int(energies.argmax())
        return [heights(energies + change, top) for change in changes]

    def of_member(surface: Surface) -> Values:
        own_path = climbing_band(run, surface, mean) if band else mean
        return heights(surface(own_path).array("energy"))

    return run.finished("barrier", UNITS, heights(energies), first_order, of_member, details)


def heights(energies: Array, top: int | None = None) -> Values:
    """Compute barriers and reaction energy of a profile [images], eV, from its highest image."""
    highest = float(energies.max() if top is None else energies[top])
    first, last = float(energies[0]), float(energies[-1])
    return {
        "barrier": highest - first,
        "reverse_barrier": highest - last,
        "reaction_energy": last - first,
    }


def misfit_along(path: Sequence[Atoms], forces_std: Array | None) -> Array:
    """Integrate a std of forces [images * N, 3] along a path, from its first image, [images] eV."""
    along = np.zeros(len(path))
    if forces_std is not None:
        std = forces_std.reshape(len(path), -1, 3)
        steps = np.diff([atoms.positions for atoms in path], axis=0)  # [images - 1, N, 3]
        cell, pbc = path[0].cell, path[0].pbc
        steps = np.array([find_mic(step, cell, pbc)[0] for step in steps])  # type: ignore[arg-type]
        middle = (std[1:] + std[:-1]) / 2
        along[1:] = np.sqrt(np.square(middle * steps).sum(axis=(1, 2))).cumsum()
    return along


def climbing_band(run: Calculation, surface: Surface, path: Sequence[Atoms]) -> list[Atoms]:
    """Relax the ends, then the band between them; all images of a step are one batch."""
    ends = run.relaxed(surface, [path[0], path[-1]])
    images = [ends[0], *(atoms.copy() for atoms in path[1:-1]), ends[1]]
    band = NEB(images, climb=True, method="improvedtangent", allow_shared_calculator=False)
    optimiser = FIRE(band, logfile=None)  # type: ignore[arg-type]
    run.minimise(surface, [(optimiser, images)], "the band did not converge")
    return images


def _images(path: list[Atoms], count: int) -> list[Atoms]:
    """Interpolate between two ends; a longer path is kept."""
    if len(path) > 2:
        return path
    if count < 3:
        raise InputError(f"images={count}; a band needs at least 3, its ends among them")
    images = [path[0], *(path[0].copy() for _ in range(count - 2)), path[1]]
    NEB(images, method="improvedtangent").interpolate(mic=bool(path[0].pbc.any()))
    return images
