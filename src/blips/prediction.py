"""What every model's `predict` returns: means and standard deviations, and ways to look at them.

This module knows no model. `BayesianPotential` and the baselines stand on it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import numpy as np
from ase import Atoms
from ase.calculators.calculator import all_properties
from ase.calculators.singlepoint import SinglePointCalculator
from ase.stress import full_3x3_to_voigt_6_stress
from torch import Tensor

from blips import keys
from blips.backbones.base import Backbone
from blips.data.graph import Graph
from blips.data.labels import Labels, available
from blips.errors import InputError, require

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Array = np.ndarray
Outputs = dict[str, Tensor]

PER_STRUCTURE = ("n_atoms", keys.ENERGY, keys.STRESS)
UNCERTAIN = (keys.ENERGY, keys.STRESS, keys.ENERGIES, keys.FORCES)  # quantities that ASE knows
UNCERTAINTIES = tuple(f"{name}_uncertainty" for name in UNCERTAIN)
SHOWN = 5  # structures in a notebook


class Calibrator(Protocol):
    """Recalibrates standard deviations; `blips.uq.calibrate` has two kinds."""

    def apply(self, std: Array) -> Array:
        """Return recalibrated standard deviations, same shape and unit."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able description."""
        ...


@runtime_checkable
class Model(Protocol):
    """A potential with error bars: a Bayesian potential or a baseline."""

    calibration: dict[str, Calibrator]  # by quantity: "energy", "forces", ...

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
    stress: Array | None = None  # [S, 3, 3] eV/A^3
    stress_std: Array | None = None  # [S, 3, 3] eV/A^3
    energy_aleatoric_std: Array | None = None  # [S] eV
    forces_aleatoric_std: Array | None = None  # [N, 3] eV/A
    in_domain: Array | None = None  # [N] bool, False where the model cannot know anything
    others: Mapping[str, Array] = field(default_factory=dict)  # [N, ...] by name, see `of`
    details: Mapping[str, Any] = field(default_factory=dict)  # e.g. chunk size, calibration

    @classmethod
    def of(cls, arrays: Mapping[str, Array], **about: Any) -> Self:
        """Make a prediction of these arrays, by the names of the attributes.

        What else a backbone predicts, one row for each node (say "charges" and "charges_std"), goes
        to `others`.
        """
        attributes = {each.name for each in fields(cls)}
        known = {name: array for name, array in arrays.items() if name in attributes}
        others = {name: array for name, array in arrays.items() if name not in attributes}
        return cls(**known, others=others, **about)

    def __post_init__(self) -> None:
        """Refuse a std that is negative or not a number."""
        for name, value in self._arrays().items():
            if not name.endswith("_std") or (value >= 0).all():
                continue
            sound = (value >= 0).reshape(len(value), -1).all(axis=1)
            counts = 1 if _is_per_structure(name) else self.n_atoms
            rows = np.unique(np.repeat(np.arange(len(self)), counts)[~sound])
            raise InputError(
                f"the model has no usable {name} for structures {', '.join(map(str, rows[:10]))} "
                "(counted from 0): NaN. Do atoms overlap, or is the model damaged?"
            )

    def __len__(self) -> int:
        return len(self.n_atoms)

    def __getitem__(self, index: int) -> "Prediction":
        index = range(len(self))[index]
        first = int(self.n_atoms[:index].sum())
        one, atoms = slice(index, index + 1), slice(first, first + int(self.n_atoms[index]))
        return self._with(lambda name, array: array[one if _is_per_structure(name) else atoms])

    @property
    def energy_total_std(self) -> Array | None:
        """Epistemic and aleatoric together, [S] eV."""
        return _total_std(self.energy_std, self.energy_aleatoric_std)

    @property
    def forces_total_std(self) -> Array | None:
        """Epistemic and aleatoric together, [N, 3] eV/A."""
        return _total_std(self.forces_std, self.forces_aleatoric_std)

    def array(self, name: str) -> Array:
        """Return the array of that name; raise an error where the prediction has none."""
        value = getattr(self, name, self.others.get(name))
        if value is None:
            raise InputError(f"the prediction has no {name}; ask predict for it")
        return value

    @property
    def largest_force_std(self) -> Array | None:
        """Largest norm of the (total) std of an atom's force in each structure, [S] eV/A."""
        if self.forces_total_std is None:
            return None
        by_atom = np.linalg.norm(self.forces_total_std, axis=1)  # [N]
        return np.maximum.reduceat(by_atom, np.cumsum(self.n_atoms) - self.n_atoms)

    @property
    def structure_in_domain(self) -> Array | None:
        """Whether all atoms of each structure are in the domain, [S] bool."""
        if self.in_domain is None:
            return None
        return np.logical_and.reduceat(self.in_domain, np.cumsum(self.n_atoms) - self.n_atoms)

    def summary(self) -> dict[str, list[Any]]:
        """Summarise each structure, as lists for JSON; forces by their largest std."""
        arrays = {
            keys.ENERGY: self.energy,
            keys.ENERGY_UNCERTAINTY: self.energy_total_std,
            "largest_force_uncertainty": self.largest_force_std,
            keys.IN_DOMAIN: self.structure_in_domain,
        }
        return {name: value.tolist() for name, value in arrays.items() if value is not None}

    def results(self) -> dict[str, Array]:
        """Return means, `*_uncertainty` (total std) and `in_domain`, as far as known, by key."""
        found: dict[str, Array | None] = {keys.IN_DOMAIN: self.in_domain}
        for name in UNCERTAIN:
            std = getattr(self, f"{name}_total_std", getattr(self, f"{name}_std"))
            found |= {name: getattr(self, name), f"{name}_uncertainty": std}
        return {key: array for key, array in found.items() if array is not None}

    def ase_results(self) -> dict[str, Any]:
        """Return ASE's results for one structure, with `*_uncertainty` (total std) beside them.

        Stress and its uncertainty have ASE's six components.
        """
        if len(self) != 1:
            raise InputError(f"results of one structure, not of {len(self)}; take prediction[i]")
        found: dict[str, Any] = {key: np.array(array) for key, array in self.results().items()}
        for key in found.keys() & {keys.ENERGY, keys.ENERGY_UNCERTAINTY}:
            found[key] = float(found[key][0])
        for key in found.keys() & {keys.STRESS, keys.STRESS_UNCERTAINTY}:
            found[key] = full_3x3_to_voigt_6_stress(found[key][0])
        return found

    def to_atoms(
        self, structures: Atoms | Sequence[Atoms], *, beside: Labels | None = None
    ) -> list[Atoms]:
        """Copy the structures with what was predicted for them, ready for `ase.io.write`.

        Means are results of a calculator; uncertainties (total std) are `info` and `arrays` under
        the names of `blips.keys`. Labels of the same names that the structures had are replaced,
        but for labels under the names `beside`: means of quantities that have one are then `info`
        and `arrays` under the names "predicted_energy", "predicted_forces", ...
        """
        structures = [structures] if isinstance(structures, Atoms) else structures
        if len(structures) != len(self):
            raise InputError(f"{len(self)} predictions for {len(structures)} structures")
        return [_predicted(atoms, self[i], beside) for i, atoms in enumerate(structures)]

    def to_dataframe(self) -> "DataFrame":
        """Make a pandas table with a row for each structure; columns of `summary`, and n_atoms."""
        pd = require("pandas", "pip install pandas")
        return pd.DataFrame({"n_atoms": self.n_atoms, **self.summary()}).rename_axis("structure")

    def plot(self) -> "Figure":
        """Plot the std of each atom's force against the force itself, norms."""
        norms = [np.linalg.norm(self.array(n), axis=1) for n in (keys.FORCES, "forces_total_std")]
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.5, 3.5), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(*norms, "o", markersize=3, alpha=0.5)
        axes.set(xscale="log", yscale="log", title=f"{self.method}, {self.samples} samples")
        axes.set(xlabel="predicted force (eV/Å)", ylabel="std of the force (eV/Å)")
        return figure

    def __repr__(self) -> str:
        """Say which quantities there are, for how many structures."""
        there = [name for name in self._arrays() if name != "n_atoms"]
        names = [name for name in there if not name.endswith("_std")]
        words = [f"{name} ± std" if f"{name}_std" in there else name for name in names]
        return (
            f"Prediction({len(self)} structures, {int(self.n_atoms.sum())} atoms, "
            f"method={self.method!r}, samples={self.samples}: {', '.join(words)})"
        )

    def _repr_html_(self) -> str:
        """Show a short table in a notebook."""
        columns = {
            "atoms": self.n_atoms,
            "energy (eV)": self.energy,
            "± (eV)": self.energy_total_std,
            "largest std of a force (eV/Å)": self.largest_force_std,
        }
        known = {head: column for head, column in columns.items() if column is not None}
        rows = ["".join(f"<th>{head}</th>" for head in known)]
        for values in zip(*(column[:SHOWN] for column in known.values()), strict=True):
            rows.append("".join(f"<td>{value:.6g}</td>" for value in values))
        if len(self) > SHOWN:
            rows.append(f"<td colspan={len(known)}>… {len(self) - SHOWN} more</td>")
        table = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<p>method {self.method}, {self.samples} samples</p><table>{table}</table>"

    def recalibrated(self, calibrators: Mapping[str, Calibrator]) -> "Prediction":
        """Pass total stds through `calibrators[quantity].apply`, where there is one.

        Epistemic and aleatoric deviations keep their ratio.
        """
        found = self.results()
        calibrated = tuple(name for name in calibrators if f"{name}_uncertainty" in found)
        changes: dict[str, Any] = {}
        for quantity in calibrated:
            total = found[f"{quantity}_uncertainty"]
            after = calibrators[quantity].apply(total)
            factor = np.divide(after, total, out=np.ones_like(total), where=total > 0)
            names = (f"{quantity}_std", f"{quantity}_aleatoric_std")
            parts = {name: array for name, array in self._arrays().items() if name in names}
            changes |= {name: factor * part for name, part in parts.items()}
        if not changes:
            return self
        return replace(self, details={**self.details, "calibrated": calibrated}, **changes)

    def _arrays(self) -> dict[str, Array]:
        """Return all that was predicted, and `n_atoms`, by name."""
        own = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return {**own, **self.others}

    def _with(self, change: Callable[[str, Array], Array]) -> Self:
        """Replace every array by a function of its name and itself."""
        changed = {name: change(name, array) for name, array in self._arrays().items()}
        others = {name: changed.pop(name) for name in self.others}
        return replace(self, others=others, **changed)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Join the predictions of all parts, in order."""
        return parts[0]._with(lambda name, _: np.concatenate([one.array(name) for one in parts]))


def _is_per_structure(name: str) -> bool:
    return name.removesuffix("_std").removesuffix("_aleatoric") in PER_STRUCTURE


def _total_std(epistemic: Array | None, aleatoric: Array | None) -> Array | None:
    if epistemic is None or aleatoric is None:
        return epistemic if aleatoric is None else aleatoric
    return np.sqrt(epistemic**2 + aleatoric**2)


def _predicted(atoms: Atoms, one: Prediction, beside: Labels | None) -> Atoms:
    """Copy of a structure with the prediction of one structure."""
    if int(one.n_atoms[0]) != len(atoms):
        raise InputError(f"a prediction for {one.n_atoms} atoms met a structure of {len(atoms)}")
    frame, results = atoms.copy(), one.ase_results()
    labelled = () if beside is None else available(atoms, beside)
    before = getattr(atoms.calc, "results", {}) if labelled else {}
    for name in UNCERTAIN:
        place = frame.info if name in PER_STRUCTURE else frame.arrays
        if name not in labelled:
            place.pop(name, None)
        elif name in results:
            place[f"predicted_{name}"] = results.pop(name)
    annotate(frame, results)
    if keys.IN_DOMAIN in results:
        frame.arrays[keys.IN_DOMAIN] = results[keys.IN_DOMAIN]
    return with_results(frame, {**before, **results})


def with_results(atoms: Atoms, results: Mapping[str, Any]) -> Atoms:
    """Give a structure a calculator with those results that ASE knows."""
    known = {name: value for name, value in results.items() if name in all_properties}
    atoms.calc = SinglePointCalculator(atoms, **known)
    return atoms


def annotate(atoms: Atoms, results: Mapping[str, Any]) -> None:
    """Keep the uncertainties of results on the structure, and no older ones.

    ASE writes those results that it knows by name; others it finds in `atoms.info` and
    `atoms.arrays` (extxyz, traj, db).
    """
    for quantity, name in zip(UNCERTAIN, UNCERTAINTIES, strict=True):
        place = atoms.info if quantity in PER_STRUCTURE else atoms.arrays
        place.pop(name, None)
        if name in results:
            place[name] = results[name]


def read_back(atoms: Atoms) -> Prediction:
    """Return what `Prediction.to_atoms` has written to a structure; its stds are total ones."""
    places, results = atoms.info | atoms.arrays, getattr(atoms.calc, "results", {})
    found = {keys.IN_DOMAIN: places.get(keys.IN_DOMAIN)}
    for name in (keys.ENERGY, keys.FORCES):
        found[name] = places.get(f"predicted_{name}", results.get(name))
        found[f"{name}_std"] = places.get(f"{name}_uncertainty")
    arrays = {name: np.atleast_1d(value) for name, value in found.items() if value is not None}
    return Prediction.of(arrays, n_atoms=np.array([len(atoms)]), method="read", samples=0)


def point_prediction(
    outputs: Outputs, graph: Graph, method: str = "map", samples: int = 0
) -> Prediction:
    """Make a prediction of these means (and `*_std`, where there are any), by name."""
    arrays = {name: value.double().numpy(force=True) for name, value in outputs.items()}
    n_atoms = graph.node_counts().numpy(force=True)
    return Prediction.of(arrays, n_atoms=n_atoms, method=method, samples=samples)
