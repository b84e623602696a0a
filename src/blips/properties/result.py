"""What a property calculation returns: values with error bars, by quantity.

The std is taken about the value of the plain model, the posterior's mean, as everywhere:

    std = sqrt( 1/M sum_k (y_k - y)^2 )

over the members that succeeded; `failures` says which did not, and why.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from blips.errors import BlipsError
from blips.files import jsonable, write_json

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
        value = np.asarray(value, dtype=float)
        std = np.full_like(value, np.nan)
        if len(members):
            std = np.sqrt(np.square(members - value).mean(axis=0))
        return cls(name, value[()], std[()], members, units)  # numbers where there are no axes

    def scaled(self, factor: float, factor_std: float = 0.0) -> "Property":
        """Multiply with a factor that has an error of its own, such as one for softening."""
        std = np.hypot(factor * self.std, factor_std * self.value)
        return Property(self.name, factor * self.value, std, factor * self.members, self.units)

    def __str__(self) -> str:
        """Return name, value, std and units; of an array its shape and largest std."""
        what = f"= {self.value:.5g}" if np.ndim(self.value) == 0 else str(np.shape(self.value))
        return f"{self.name} {what} ± {np.max(self.std):.2g} {self.units}".rstrip()


@dataclass(frozen=True)
class Properties(Mapping[str, Property]):
    """The quantities of one calculation, by name."""

    kind: str  # "elastic", "phonons", ...
    method: str  # "linear" (first order, from the plain model's geometries) or "members"
    quantities: Mapping[str, Property]  # by name
    failures: Mapping[int, str] = field(default_factory=dict)  # member -> why it has no value
    details: Mapping[str, Any] = field(default_factory=dict)  # what else is worth keeping

    def __getitem__(self, name: str) -> Property:
        return self.quantities[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.quantities)

    def __len__(self) -> int:
        return len(self.quantities)

    def __str__(self) -> str:
        lines = [str(one) for one in self.values()]
        lines += self.details.get("notes", [])
        lines += [f"member {number} failed: {why}" for number, why in self.failures.items()]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return everything, JSON-able."""
        quantities = {name: vars(one) for name, one in self.items()}
        return jsonable(vars(self) | {"quantities": quantities})

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Properties":
        """Restore what `to_dict` returned, also through JSON; lists of `details` become arrays."""
        quantities = {
            name: Property(**{key: _array(value) for key, value in one.items()})
            for name, one in content["quantities"].items()
        }
        failures = {int(number): why for number, why in content["failures"].items()}
        details = {name: _array(value) for name, value in content["details"].items()}
        return cls(content["kind"], content["method"], quantities, failures, details)

    def save(self, path: str | Path) -> None:
        """Write everything as JSON."""
        write_json(path, self.to_dict())

    def plot(self) -> "Figure":
        """Plot values, members and error bars with matplotlib."""
        from blips.properties.plots import plot

        return plot(self)


def propagated(function: Callable[[Array], Values], base: Array, changes: Array) -> list[Values]:
    """Compute `function` of base + change for each member, to first order in the change.

    `base` [...] is what the (smooth) function takes, `changes` are [K, ...].
    """
    value = function(base)
    moved = (function(base + STEP * change) for change in changes)
    return [{name: at + (one[name] - at) / STEP for name, at in value.items()} for one in moved]


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
