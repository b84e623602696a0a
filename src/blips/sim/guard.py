"""Guards: what a simulation does where the potential begins to extrapolate.

A guard looks at a structure and at the standard deviations that a potential gives for it:

| largest atomic force std | what happens |
|---|---|
| up to `low` | the simulation goes on |
| above `low` | it goes on, and the frame is saved for labelling (`blips.sim.frames`) |
| above `high`, or no number | it stops |

The std of an atom's force is the root of its summed component variances, eV/A. Other limits stop:

| limit | compared with |
|---|---|
| `energy_std_per_atom`, eV | energy std over the number of atoms |
| `closest`, fraction | shortest distance over the sum of the covalent radii of its two atoms |
| `farthest`, A | distance of the atom that is farthest from its nearest neighbour |

An atom outside the domain of the potential (`Prediction.in_domain`: another atom far closer than
any that was seen, or an unknown element) stops wherever a std is looked at: its std means nothing.

Both thresholds can be given as error rates instead, see `Guard.by_error_rate`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Self

import numpy as np
from ase import Atoms
from ase.data import covalent_radii

from blips import keys
from blips.data.neighbours import search
from blips.errors import InputError

SEARCH_RADIUS = 6.0  # A


@dataclass(frozen=True)
class Finding:
    """What a guard objects to, in words and numbers."""

    limit: str  # its name
    value: float  # what was found
    allowed: float
    text: str  # for people
    stops: bool = True  # ends the simulation; if not, the frame is worth a label


def stop_reason(findings: Sequence[Finding]) -> str:
    """Say why a simulation stops; empty if it does not."""
    return "; ".join(finding.text for finding in findings if finding.stops)


@dataclass(frozen=True)
class Guard:
    """Limits of a simulation; None leaves one out."""

    low: float | None = None  # largest atomic force std above which frames are saved, eV/A
    high: float | None = None  # ... above which the simulation stops, eV/A
    energy_std_per_atom: float | None = None  # largest one, eV
    closest: float | None = 0.4  # shortest distance in units of the sum of covalent radii
    farthest: float | None = None  # distance of an atom to its nearest neighbour, A, below 6

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise InputError(f"the guard's limit {name} is {value}; expected a positive number")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise InputError(
                f"the guard saves above {self.low:g} and stops above {self.high:g} eV/A; expected "
                "low < high"
            )
        if self.farthest is not None and self.farthest >= SEARCH_RADIUS:
            raise InputError(f"farthest is {self.farthest} A; expected less than {SEARCH_RADIUS}")

    @classmethod
    def by_error_rate(
        cls, error: float, low: float | None = None, high: float | None = None, **others: Any
    ) -> Self:
        """Set both thresholds as the expected share of atomic force errors above `error`, eV/A.

        From a share of `low`, such as 0.01, frames are saved; from `high`, such as 0.1, the
        simulation stops. Others are limits of other kinds.
        """
        stds = [None if rate is None else std_for(error, rate) for rate in (low, high)]
        return cls(*stds, **others)

    @property
    def needs_std(self) -> list[str]:
        """Result keys of the std that limits are set on."""
        of_forces = self.low is not None or self.high is not None
        of_energy = self.energy_std_per_atom is not None
        return [keys.FORCES_UNCERTAINTY] * of_forces + [keys.ENERGY_UNCERTAINTY] * of_energy

    def check(self, atoms: Atoms) -> list[Finding]:
        """List what is wrong with a structure that has a `blips.Calculator`."""
        found = self.check_geometry(atoms)  # no use in asking a model for an exploded structure
        if found or not self.needs_std:
            return found
        return self.check_std(atoms, results_with(atoms, self.needs_std))

    def check_std(self, atoms: Atoms, results: Mapping[str, Any]) -> list[Finding]:
        """Compare std of forces [N, 3] (eV/A) and energy (eV) with their limits; see the domain."""
        found: list[Finding] = []
        if keys.FORCES_UNCERTAINTY in self.needs_std:
            std = np.linalg.norm(results[keys.FORCES_UNCERTAINTY], axis=1)  # [N]
            worst = int(std.argmax())  # NaN counts as the largest
            value, where = float(std[worst]), f"eV/A on atom {worst} ({atoms.symbols[worst]})"
            limit = self.low if self.high is None or value <= self.high else self.high
            if limit is not None and not value <= limit:  # so that NaN exceeds every limit
                stops = limit == self.high or bool(np.isnan(value))
                text = f"force std {value:.3g} {where} exceeds {limit:.3g} eV/A"
                found.append(Finding("force_std", value, limit, text, stops))
        limit = self.energy_std_per_atom
        if limit is not None:
            value = float(results[keys.ENERGY_UNCERTAINTY]) / len(atoms)
            if not value <= limit:
                text = f"energy std {value:.3g} eV per atom exceeds {limit:.3g} eV"
                found.append(Finding("energy_std_per_atom", value, limit, text))
        inside = results.get(keys.IN_DOMAIN)  # [N]
        if inside is not None and not inside.all():
            outside = np.flatnonzero(~inside)
            text = (
                f"atom {outside[0]} ({atoms.symbols[outside[0]]}) is outside the domain of the "
                "potential: of an unknown element, or far closer to another atom than any that was "
                "seen"
            )
            found.append(Finding("domain", float(len(outside)), 0.0, text))
        return found

    def check_geometry(self, atoms: Atoms) -> list[Finding]:
        """List what is wrong with the positions alone."""
        if not np.isfinite(atoms.positions).all():
            text = "positions are not finite numbers: the geometry has exploded"
            return [Finding("geometry", float("nan"), 0.0, text)]
        alone = len(atoms) == 1 and not atoms.pbc.any()
        if alone or self.closest is self.farthest is None:
            return []
        try:
            first, second, distance = search(atoms, SEARCH_RADIUS, "ijd")
        except InputError as error:
            return [Finding("geometry", float("inf"), 0.0, str(error))]
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
    """Return the std at which a share `rate` of force errors is expected above `error`, eV/A.

    An error that is normal along one direction exceeds `error` with probability `rate` where
    std = error / Phi^-1(1 - rate / 2). Of all directions that an atom's error can take with this
    std, that is the worst case for rates up to 0.2. The share is as true as the std is calibrated.
    """
    if not (error > 0 and 0 < rate < 1):
        raise InputError(
            f"an error of {error} at a rate of {rate} is no limit; expected a positive error and a "
            "rate between 0 and 1, e.g. 0.5 eV/A at 0.05"
        )
    return error / NormalDist().inv_cdf(1.0 - rate / 2.0)


def results_with(atoms: Atoms, names: Sequence[str]) -> Mapping[str, Any]:
    """Return results of a structure's `blips.Calculator`, these uncertainties among them."""
    calculator: Any = atoms.calc
    for name in names:
        if name not in getattr(calculator, "implemented_properties", ()):
            raise InputError(
                f"a guard needs {name}, which the structure's calculator does not give; "
                "set atoms.calc = blips.Calculator(potential)"
            )
        calculator.get_property(name, atoms)
    return calculator.results
