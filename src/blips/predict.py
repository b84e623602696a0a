"""Predictions with error bars: what every model's `predict` returns.

This module knows no model. `BayesianPotential` and the baselines stand on it (and import it, so
that `potential.predict` can be a plain method).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from blips import keys
from blips.backbones.base import Backbone
from blips.data.graph import Graph
from blips.errors import InputError

Array = np.ndarray
Outputs = dict[str, Tensor]

PER_STRUCTURE = (keys.ENERGY, keys.STRESS)
PER_ATOM = (keys.ENERGIES, keys.FORCES, keys.POSITIONS)


class Calibrator(Protocol):
    """Recalibrates standard deviations; `blips.uq.calibrate` has three kinds."""

    def apply(self, std: Array) -> Array:
        """Recalibrated standard deviations, same shape and unit."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """JSON-able description."""
        ...


@runtime_checkable
class Model(Protocol):
    """A potential with error bars: a Bayesian potential or a baseline.

    Attributes:
        calibration: quantity ("energy", "forces", ...) -> object with `apply(std)`.
    """

    calibration: dict[str, Calibrator]

    @property
    def backbone(self) -> Backbone:
        """The model (one of the models) that predicts; it builds the graphs."""
        ...

    @property
    def predict(self) -> Callable[..., "Prediction"]:
        """Predict structures or a graph: (atoms, *, method, samples, seed, stress, calibrated)."""
        ...


@dataclass(frozen=True)
class Prediction:
    """Means and standard deviations for S structures with N atoms in all.

    Per-atom arrays are joined over the structures; `prediction[i]` is that of structure i.
    A quantity that was not asked for, or a deviation that does not exist, is None. `*_std` is the
    epistemic standard deviation, `*_aleatoric_std` the noise of the data where the model has one,
    `*_total_std` the root of the sum of their squares (law of total variance).
    """

    n_atoms: Array  # [S]
    method: str  # "map", "mc", "frozen", ...
    samples: int  # K, 0 for "map"
    energy: Array | None = None  # [S] eV
    energy_std: Array | None = None  # [S] eV
    energies: Array | None = None  # [N] eV
    energies_std: Array | None = None  # [N] eV
    forces: Array | None = None  # [N, 3] eV/A
    forces_std: Array | None = None  # [N, 3] eV/A
    forces_cov: Array | None = None  # [N, 3, 3] (eV/A)^2, on request
    stress: Array | None = None  # [S, 3, 3] eV/A^3
    stress_std: Array | None = None  # [S, 3, 3] eV/A^3
    positions: Array | None = None  # [N, 3] for particle dynamics
    positions_std: Array | None = None  # [N, 3]
    energy_aleatoric_std: Array | None = None  # [S] eV
    forces_aleatoric_std: Array | None = None  # [N, 3] eV/A
    details: Mapping[str, Any] = field(default_factory=dict)  # e.g. chunk size, calibration

    def __post_init__(self) -> None:
        """No deviation leaves a model that is negative or not a number."""
        for name, value in vars(self).items():
            if value is not None and name.endswith("_std") and not (value >= 0).all():
                raise InputError(
                    f"the model has no usable {name} for structures "
                    f"{', '.join(map(str, self._structures_of(name, ~(value >= 0))))} (counted "
                    "from 0): NaN. Do atoms overlap, or is the model damaged?"
                )

    def __len__(self) -> int:
        """S."""
        return len(self.n_atoms)

    def __getitem__(self, index: int) -> "Prediction":
        """Prediction of one structure."""
        index = range(len(self))[index]
        first = int(self.n_atoms[:index].sum())
        atoms = slice(first, first + int(self.n_atoms[index]))
        changes: dict[str, Any] = {"n_atoms": self.n_atoms[index : index + 1]}
        for name, value in self._arrays().items():
            per_structure = name.removesuffix("_std").removesuffix("_aleatoric") in PER_STRUCTURE
            changes[name] = value[index : index + 1] if per_structure else value[atoms]
        return Prediction(method=self.method, samples=self.samples, details=self.details, **changes)

    @property
    def energy_total_std(self) -> Array | None:
        """Epistemic and aleatoric together, [S] eV."""
        return _total_std(self.energy_std, self.energy_aleatoric_std)

    @property
    def forces_total_std(self) -> Array | None:
        """Epistemic and aleatoric together, [N, 3] eV/A."""
        return _total_std(self.forces_std, self.forces_aleatoric_std)

    def array(self, name: str) -> Array:
        """The array of that name, or an error where the prediction has none."""
        value = getattr(self, name)
        if value is None:
            raise InputError(f"the prediction has no {name}; ask predict for it")
        return value

    def summary(self) -> dict[str, Any]:
        """What matters of each structure, as lists for JSON; forces by their largest sigma."""
        found: dict[str, Any] = {
            "structures": len(self),
            "method": self.method,
            "samples": self.samples,
        }
        if self.energy is not None:
            found[keys.ENERGY] = self.energy.tolist()
        if self.energy_total_std is not None:
            found[keys.ENERGY_UNCERTAINTY] = self.energy_total_std.tolist()
        if self.forces_total_std is not None:
            by_atom = np.linalg.norm(self.forces_total_std, axis=1)  # [N]
            first = np.cumsum(self.n_atoms) - self.n_atoms
            found["largest_force_uncertainty"] = np.maximum.reduceat(by_atom, first).tolist()
        return found

    def recalibrated(self, calibrators: Mapping[str, Calibrator]) -> "Prediction":
        """Total deviations passed through `calibrators[quantity].apply`, where there is one.

        Epistemic and aleatoric deviations keep their ratio.
        """
        changes: dict[str, Any] = {}
        calibrated: list[str] = []
        for quantity, calibrator in calibrators.items():
            names = (f"{quantity}_std", f"{quantity}_aleatoric_std")
            parts = {name: getattr(self, name, None) for name in names}
            total = _total_std(*parts.values())
            if total is None:
                continue
            after = calibrator.apply(total)
            share = {
                k: np.divide(v, total, out=np.ones_like(total), where=total > 0)
                for k, v in parts.items()
                if v is not None
            }
            changes |= {name: after * part for name, part in share.items()}
            calibrated.append(quantity)
        if not changes:
            return self
        return replace(self, details={**self.details, "calibrated": tuple(calibrated)}, **changes)

    def _structures_of(self, name: str, where: Array, most: int = 10) -> list[int]:
        """Numbers of the first structures that a mask over the array of that name concerns."""
        rows = where.reshape(len(where), -1).any(axis=1)
        if name.removesuffix("_std").removesuffix("_aleatoric") not in PER_STRUCTURE:
            owner = np.repeat(np.arange(len(self.n_atoms)), self.n_atoms)
            return np.unique(owner[rows]).tolist()[:most]
        return np.flatnonzero(rows).tolist()[:most]

    def _arrays(self) -> dict[str, Array]:
        skip = ("n_atoms", "method", "samples", "details")
        return {k: value for k, value in vars(self).items() if value is not None and k not in skip}

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """One prediction for the structures of all parts, in order."""
        if not parts:
            raise InputError("nothing to predict: the list of structures is empty")
        if len(parts) == 1:
            return parts[0]
        arrays = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("n_atoms", *parts[0]._arrays())
        }
        first = parts[0]
        return cls(method=first.method, samples=first.samples, details=first.details, **arrays)


def _total_std(epistemic: Array | None, aleatoric: Array | None) -> Array | None:
    if epistemic is None or aleatoric is None:
        return epistemic if aleatoric is None else aleatoric
    return np.sqrt(epistemic**2 + aleatoric**2)


def point_prediction(outputs: Outputs, graph: Graph, method: str = "map") -> Prediction:
    """Prediction without error bars."""
    arrays: dict[str, Any] = {
        name: value.double().numpy(force=True) for name, value in outputs.items()
    }
    return Prediction(n_atoms=atom_counts(graph), method=method, samples=0, **arrays)


def atom_counts(graph: Graph) -> Array:
    """Number of atoms of each structure, [S]."""
    if graph.num_structures == 1:
        return np.array([graph.num_nodes])
    return torch.bincount(graph.structure, minlength=graph.num_structures).cpu().numpy()
