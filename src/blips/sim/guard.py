"""Guards: stop a simulation before the potential extrapolates too far.

A guard looks at a structure and the uncertainties that a `blips.Calculator` gives for it, and says
what is wrong, if anything:

| limit | compared with |
|---|---|
| `force_std`, eV/A | the largest atomic force std, root of the summed component variances |
| `energy_std_per_atom`, eV | energy std over the number of atoms |
| `closest`, fraction | shortest distance over the sum of the covalent radii of its two atoms |
| `farthest`, A | distance of the atom that is farthest from its nearest neighbour |

A limit on the std can be given as an error rate instead: with normal errors, |error| exceeds
`error` with probability `rate` when std = error / Phi^-1(1 - rate / 2), see `std_for`.
"""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from ase import Atoms
from ase.data import covalent_radii
from vesin import NeighborList

from blips import keys
from blips.data.neighbours import check_extent
from blips.errors import InputError

SEARCH_RADIUS = 6.0  # A


@dataclass(frozen=True)
class Finding:
    """What a guard objects to, in words and numbers.

    Attributes:
        limit: name of the limit.
        value: what was found.
        allowed: the limit.
        text: for people.
    """

    limit: str
    value: float
    allowed: float
    text: str


@dataclass(frozen=True)
class Guard:
    """Limits of a simulation; None leaves one out.

    Attributes:
        force_std: largest atomic force std, eV/A.
        energy_std_per_atom: largest energy std per atom, eV.
        closest: shortest distance in units of the sum of covalent radii.
        farthest: longest distance of an atom to its nearest neighbour, A, below 6.
    """

    force_std: float | None = None
    energy_std_per_atom: float | None = None
    closest: float | None = 0.4
    farthest: float | None = None

    def __post_init__(self) -> None:
        """Refuse limits that nothing can keep."""
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise InputError(f"the guard's limit {name} is {value}; expected a positive number")
        if self.farthest is not None and self.farthest >= SEARCH_RADIUS:
            raise InputError(f"farthest is {self.farthest} A; expected less than {SEARCH_RADIUS}")

    def check(self, atoms: Atoms) -> list[Finding]:
        """List everything that is wrong with a structure that has a `blips.Calculator`."""
        found = self._exploded(atoms)
        if found:
            return found  # no use in asking a model for such a structure
        if self.force_std is not None:
            std = np.linalg.norm(_property(atoms, keys.FORCES_UNCERTAINTY), axis=1)  # [N]
            worst = int(std.argmax())
            where = f"on atom {worst} ({atoms.symbols[worst]})"
            found += _above("force_std", float(std[worst]), self.force_std, "eV/A", where)
        if self.energy_std_per_atom is not None:
            std_per_atom = float(_property(atoms, keys.ENERGY_UNCERTAINTY)) / len(atoms)
            found += _above(
                "energy_std_per_atom", std_per_atom, self.energy_std_per_atom, "eV", "per atom"
            )
        return found

    def _exploded(self, atoms: Atoms) -> list[Finding]:
        if not np.isfinite(atoms.positions).all():
            text = "positions are not finite numbers: the geometry has exploded"
            return [Finding("geometry", float("nan"), 0.0, text)]
        alone = len(atoms) == 1 and not atoms.pbc.any()
        if alone or (self.closest is None and self.farthest is None):
            return []
        try:
            check_extent(atoms.positions, atoms.cell.array, atoms.pbc, SEARCH_RADIUS)
        except InputError as error:
            return [Finding("geometry", float("inf"), 0.0, str(error))]
        first, second, distance = NeighborList(
            cutoff=SEARCH_RADIUS, full_list=True, sorted=False
        ).compute(atoms.positions, atoms.cell.array, atoms.pbc, "ijd")
        found: list[Finding] = []
        if self.closest is not None and len(distance):
            radii = covalent_radii[atoms.numbers]
            relative = distance / (radii[first] + radii[second])
            k = int(relative.argmin())
            if relative[k] < self.closest:
                text = (
                    f"atoms {first[k]} and {second[k]} are {distance[k]:.2f} A apart, "
                    f"{relative[k]:.2f} of their covalent radii (limit {self.closest:g})"
                )
                found.append(Finding("closest", float(relative[k]), self.closest, text))
        if self.farthest is not None:
            nearest = np.full(len(atoms), np.inf)
            np.minimum.at(nearest, first, distance)
            k = int(nearest.argmax())
            if nearest[k] > self.farthest:
                text = (
                    f"atom {k} ({atoms.symbols[k]}) has no neighbour within {self.farthest:g} A: "
                    "it has left the structure"
                )
                found.append(Finding("farthest", float(nearest[k]), self.farthest, text))
        return found


def std_for(error: float, rate: float) -> float:
    """Give the std at which a calibrated normal error exceeds `error` with probability `rate`."""
    if not (error > 0 and 0 < rate < 1):
        raise InputError(
            f"an error of {error} at a rate of {rate} is no limit; expected a positive error and a "
            "rate between 0 and 1, e.g. 0.5 eV/A at 0.05"
        )
    return error / NormalDist().inv_cdf(1.0 - rate / 2.0)


def _property(atoms: Atoms, name: str) -> np.ndarray:
    calculator = atoms.calc
    if calculator is None or name not in getattr(calculator, "implemented_properties", ()):
        raise InputError(
            f"a guard needs {name}, which the structure's calculator does not give; "
            "set atoms.calc = blips.Calculator(potential)"
        )
    return np.asarray(calculator.get_property(name, atoms))


def _above(limit: str, value: float, allowed: float, unit: str, where: str) -> list[Finding]:
    if value <= allowed:
        return []
    quantity = "force std" if limit == "force_std" else "energy std"
    text = f"{quantity} {value:.3g} {unit} {where} exceeds {allowed:.3g} {unit}"
    return [Finding(limit, value, allowed, text)]
