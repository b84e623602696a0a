"""Predictions with error bars, and the Monte Carlo that makes them.

    mean = 1/K sum_k y_k,    epistemic std = sqrt( 1/(K-1) sum_k (y_k - mean)^2 )

The K samples run as one replicated batch, in chunks that fit a memory bound. Sample k is a
function of (seed, k), so the chunking does not change the result.

This module knows no model: it takes a function that evaluates samples. `BayesianPotential` and
the baselines stand on it (and import it, so that `potential.predict` can be a plain method).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from blips import keys
from blips.data.graph import Graph
from blips.errors import InputError

Array = np.ndarray
Outputs = dict[str, Tensor]
Sampler = Callable[[Graph, range], Outputs]  # (graph, sample numbers) -> [K * rows, ...]

PER_STRUCTURE = (keys.ENERGY, keys.STRESS)
PER_ATOM = (keys.ENERGIES, keys.FORCES, keys.POSITIONS)
SAVED_TO_PEAK = 2.5  # peak memory of a pass over the bytes that autograd saves in it


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

    def recalibrated(self, calibrators: Mapping[str, Any]) -> "Prediction":
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

    def _arrays(self) -> dict[str, Array]:
        skip = ("n_atoms", "method", "samples", "details")
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in skip}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def join(cls, parts: Sequence["Prediction"]) -> Self:
        """One prediction for the structures of all parts, in order."""
        if not parts:
            raise InputError("nothing to predict: the list of structures is empty")
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


class RunningMoments:
    """Mean and variance of samples that arrive in chunks (Chan's update, float64)."""

    def __init__(self, covariance: bool = False) -> None:
        self.count = 0
        self.covariance = covariance
        self._mean: Tensor | None = None
        self._squares: Tensor | None = None

    def add(self, samples: Tensor) -> None:
        """[K, ...], or [K, ..., 3] with `covariance` over the last axis."""
        samples = samples.detach().double()
        count, mean = samples.shape[0], samples.mean(0)
        squares = self._outer(samples - mean).sum(0)
        if self._mean is None or self._squares is None:
            self.count, self._mean, self._squares = count, mean, squares
            return
        total = self.count + count
        shift = mean - self._mean
        self._squares = self._squares + squares + self._outer(shift) * (self.count * count / total)
        self._mean = self._mean + shift * (count / total)
        self.count = total

    def _outer(self, deviation: Tensor) -> Tensor:
        if self.covariance:
            return deviation[..., :, None] * deviation[..., None, :]
        return deviation.square()

    @property
    def mean(self) -> Array:
        """[...]."""
        if self._mean is None:
            raise InputError("no samples were drawn; ask for at least one")
        return self._mean.cpu().numpy()

    @property
    def var(self) -> Array:
        """(K-1)-normalised variance, or covariance, [...]."""
        if self._squares is None or self.count < 2:
            raise InputError(f"a standard deviation needs at least 2 samples, got {self.count}")
        return (self._squares / (self.count - 1)).cpu().numpy()


def monte_carlo(
    sampler: Sampler,
    graph: Graph,
    samples: int,
    *,
    method: str,
    chunk: int,
    covariance: bool = False,
) -> Prediction:
    """Mean and deviation of `samples` samples on a batch of structures.

    Args:
        sampler: evaluates the samples of a range of numbers as one replicated batch.
        graph: the structures.
        samples: K >= 2.
        method: name for the result.
        chunk: at most so many samples at once.
        covariance: also the 3x3 covariance of the forces.
    """
    if samples < 2:
        raise InputError(
            f"samples={samples}: a deviation needs at least 2 samples; "
            'use method="map" for a prediction without error bars'
        )
    moments: dict[str, RunningMoments] = {}
    for first in range(0, samples, chunk):
        numbers = range(first, min(first + chunk, samples))
        for name, value in sampler(graph, numbers).items():
            wants_covariance = covariance and name == keys.FORCES
            moments.setdefault(name, RunningMoments(wants_covariance)).add(
                value.reshape(len(numbers), -1, *value.shape[1:])
            )
    arrays: dict[str, Array] = {}
    for name, moment in moments.items():
        arrays[name] = moment.mean
        if moment.covariance:
            arrays[f"{name}_cov"] = moment.var
            arrays[f"{name}_std"] = np.sqrt(np.diagonal(moment.var, axis1=-2, axis2=-1))
        else:
            arrays[f"{name}_std"] = np.sqrt(moment.var)
    return Prediction(
        n_atoms=atom_counts(graph),
        method=method,
        samples=samples,
        details={"chunk": chunk},
        **arrays,
    )


def point_prediction(outputs: Outputs, graph: Graph, method: str = "map") -> Prediction:
    """Prediction without error bars."""
    arrays: dict[str, Any] = {
        name: value.detach().double().cpu().numpy() for name, value in outputs.items()
    }
    return Prediction(n_atoms=atom_counts(graph), method=method, samples=0, **arrays)


def atom_counts(graph: Graph) -> Array:
    """Number of atoms of each structure, [S]."""
    return torch.bincount(graph.structure, minlength=graph.num_structures).cpu().numpy()


class MemoryGauge:
    """How many samples of a graph fit a memory bound.

    A pass needs bytes for its rows (edges and nodes) and for the noise of its weights. The bytes
    that autograd keeps for a row are measured on the first graph that comes, and remembered.

    Args:
        weight_bytes: size of the weights that each sample draws anew.
    """

    def __init__(self, weight_bytes: int = 0) -> None:
        self.weight_bytes = 2 * weight_bytes  # the noise, and its product with the weights
        self._bytes_per_row: float | None = None

    def chunk(self, graph: Graph, samples: int, limit: float, run_once: Callable[[], Any]) -> int:
        """Samples at once, at least 1, such that a pass stays under `limit` bytes."""
        rows = graph.num_nodes + graph.num_edges
        if self._bytes_per_row is None:
            self._bytes_per_row = SAVED_TO_PEAK * saved_bytes(run_once) / rows
        fits = int(limit / (self.weight_bytes + self._bytes_per_row * rows))
        return max(1, min(samples, fits))


def saved_bytes(run: Callable[[], Any]) -> int:
    """Bytes of distinct storages that autograd saves while `run` runs."""
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with torch.enable_grad(), hooks:
        run()
    return sum(storages.values())
