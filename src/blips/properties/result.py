"""What a property calculation returns: values with error bars, by quantity.

The std is taken about the value of the plain model, the posterior's mean, as everywhere:

    std = sqrt( 1/M sum_k (y_k - y)^2 )

over the members that succeeded; `failures` says which did not, and why.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from blips.errors import BlipsError
from blips.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = np.ndarray
Values = dict[str, Array | float]
STEP = 1e-3  # of the derivatives by which changes are propagated to first order


class PropertyError(BlipsError):
    """A calculation that did not come to its end: no minimum, no convergence."""

    exit_code = 1


@dataclass(frozen=True)
class Property:
    """One quantity."""

    name: str  # such as "bulk_modulus"
    value: Array | float  # of the plain model, [...]
    std: Array | float  # over the members, [...]: what data leave open, no floor, not calibrated
    members: Array  # values of the members that succeeded, [M, ...]
    units: str  # of all of them

    @classmethod
    def of(cls, name: str, value: Array | float, members: Array, units: str) -> "Property":
        """Make a property whose std is that of its members; NaN where there is none."""
        if len(members) == 0:
            std = np.full_like(np.asarray(value, dtype=float), np.nan)
        else:
            std = np.sqrt(np.square(members - value).mean(axis=0))
        if np.ndim(value) == 0:
            return cls(name, float(value), float(std), members, units)
        return cls(name, np.asarray(value), std, members, units)

    def scaled(self, factor: float, factor_std: float = 0.0) -> "Property":
        """Multiply with a factor that has an error of its own, such as one for softening."""
        std = np.hypot(factor * np.asarray(self.std), factor_std * np.asarray(self.value))
        std = float(std) if np.ndim(self.value) == 0 else std
        return Property(self.name, factor * self.value, std, factor * self.members, self.units)

    def __str__(self) -> str:
        """Return name, value, std and units."""
        if np.ndim(self.value) == 0:
            return f"{self.name} = {self.value:.5g} ± {self.std:.2g} {self.units}".rstrip()
        return f"{self.name} {np.shape(self.value)} ± {np.max(self.std):.2g} {self.units}".rstrip()


@dataclass(frozen=True)
class Properties(Mapping[str, Property]):
    """The quantities of one calculation, by name."""

    kind: str  # "elastic", "phonons", ...
    method: str  # "linear" (first order, from the plain model's geometries) or "members"
    quantities: Mapping[str, Property]  # by name
    failures: Mapping[int, str] = field(default_factory=dict)  # member -> why it has no value
    details: Mapping[str, Any] = field(default_factory=dict)  # what else is worth keeping

    def __getitem__(self, name: str) -> Property:
        """Return one quantity."""
        return self.quantities[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the quantities."""
        return iter(self.quantities)

    def __len__(self) -> int:
        """Return the number of quantities."""
        return len(self.quantities)

    def __str__(self) -> str:
        """Return one line for each quantity, and one for what failed."""
        lines = [str(one) for one in self.values()]
        lines += self.details.get("notes", [])
        lines += [f"member {number} failed: {why}" for number, why in self.failures.items()]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return everything, JSON-able."""
        return _plain(
            {
                "kind": self.kind,
                "method": self.method,
                "quantities": {name: vars(one) for name, one in self.items()},
                "failures": dict(self.failures),
                "details": dict(self.details),
            }
        )

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Properties":
        """Restore what `to_dict` returned, also through JSON; lists of `details` become arrays."""
        quantities: dict[str, Property] = {}
        for name, one in content["quantities"].items():
            members = np.array(one["members"], dtype=float)
            value, std = _array(one["value"]), _array(one["std"])
            quantities[name] = Property(name, value, std, members, one["units"])
        failures = {int(number): why for number, why in content["failures"].items()}
        details = {name: _array(value) for name, value in content["details"].items()}
        return cls(content["kind"], content["method"], quantities, failures, details)

    def save(self, path: str | Path) -> None:
        """Write everything as JSON."""
        write_atomically(Path(path), json.dumps(self.to_dict(), indent=1).encode())

    def plot(self) -> "Figure":
        """Plot values, members and error bars with matplotlib."""
        from blips.properties.plots import plot

        return plot(self)


def propagated(function: Callable[[Array], Values], base: Array, changes: Array) -> list[Values]:
    """Compute `function` of base + change for each member, to first order in the change.

    Args:
        function: of an array in the shape of `base`; it has to be smooth.
        base: [...].
        changes: [K, ...].
    """
    value = function(base)
    found: list[Values] = []
    for change in changes:
        moved = function(base + STEP * change)
        found.append({name: at + (moved[name] - at) / STEP for name, at in value.items()})
    return found


def _array(content: Any) -> Any:
    """Turn lists of numbers into arrays, null into NaN; leave everything else."""
    if content is None:
        return float("nan")
    if not isinstance(content, list):
        return content
    try:
        return np.array(content, dtype=float)
    except (ValueError, TypeError):
        return content


def _plain(content: Any) -> Any:
    """Convert to JSON-able values; numbers that are not finite become null."""
    if isinstance(content, Mapping):
        return {str(key): _plain(value) for key, value in content.items()}
    if isinstance(content, list | tuple | np.ndarray):
        return [_plain(value) for value in content]
    if isinstance(content, np.generic):
        return _plain(content.item())
    if isinstance(content, float) and not np.isfinite(content):
        return None
    return content
