r"""One calculation of a property: the plain model's surface, its relaxations, and its members.

Members of a conditioned posterior are linear in their noise, E_k(x) = E(x) + b(x) . v_k. Their
changes b . v_k at given geometries come for all k from one pass, which is what error bars to first
order are made of: along the geometries x*(s) that minimise the plain model's energy (ions relaxed
at strain s),

    d/dv  min_x E_k(x, s) = b(x*(s), s)         (the energy is stationary in x: envelope theorem)

so neither relaxed energies nor their derivatives by strain need a member to be relaxed.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ase import Atoms
from ase.data import chemical_symbols
from ase.filters import FrechetCellFilter
from ase.optimize import BFGS
from torch import Tensor

from blips import keys
from blips.backbones.base import graph_batches
from blips.errors import InputError, refuse_below, refuse_unknown
from blips.inference.linearise import Linearised
from blips.potential import BayesianPotential
from blips.prediction import Prediction
from blips.progress import track
from blips.properties.result import Properties, Property, PropertyError, Values

Array = np.ndarray
Surface = Callable[..., Prediction]  # (structures, stress=...) -> energy, forces, stress
BATCH = 32


@dataclass(frozen=True)
class Calculation:
    """What all functions of `blips.properties` take as options.

    By the method "linear" error bars are of first order from the plain model's geometries; by
    "members" each of these relaxes, is strained and is displaced by itself.
    """

    potential: BayesianPotential  # with a posterior
    method: str = "linear"
    members: int = 16  # K
    seed: int = 0  # of the draws
    fmax: float = 0.002  # largest force after a relaxation, eV/A
    steps: int = 300  # of each relaxation at most

    def __post_init__(self) -> None:
        refuse_unknown("method", self.method, ("linear", "members"))
        refuse_below(2, members=self.members)

    @property
    def energy_factor(self) -> float:
        """Factor on the std of energies, see `blips.inference.conditioned`."""
        posterior = self.potential.posterior
        return 1.0 if posterior is None else posterior.scale.energy_factor

    def plain(self, structures: Sequence[Atoms], *, stress: bool = False) -> Prediction:
        """Evaluate the surface of the posterior's mean."""
        return self.potential.predict(structures, method="map", stress=stress, batch_size=BATCH)

    def relaxed_crystal(self, atoms: Atoms, what: str) -> Atoms:
        """Relax ions and cell with the plain model; only a crystal has this property."""
        if not atoms.pbc.all():
            raise InputError(f"{what} are those of a crystal: periodic in three directions")
        return self.relaxed(self.plain, [atoms], cell=True)[0]

    def relaxed(
        self, surface: Surface, structures: Sequence[Atoms], *, cell: bool = False
    ) -> list[Atoms]:
        """Relax structures side by side, each with a BFGS of its own; return copies."""
        found = [atoms.copy() for atoms in structures]
        movers = [FrechetCellFilter(atoms) if cell else atoms for atoms in found]
        tasks = [
            (BFGS(mover, logfile=None, maxstep=0.1), [atoms])  # type: ignore[arg-type]
            for mover, atoms in zip(movers, found, strict=True)
        ]
        self.minimise(surface, tasks, "no minimum", stress=cell)
        return found

    def minimise(
        self,
        surface: Surface,
        tasks: Sequence[tuple[Any, list[Atoms]]],
        failed: str,
        *,
        stress: bool = False,
    ) -> None:
        """Step optimisers until no force is left; a step of all is one batch.

        A task is an optimiser and the structures that it moves. Raises `PropertyError`, "`failed`
        after ...", else.
        """
        largest = [0.0]
        for _ in range(self.steps + 1):
            moved = [atoms for _, own in tasks for atoms in own]
            predicted = surface(moved, stress=stress).to_atoms(moved)
            for atoms, found in zip(moved, predicted, strict=True):
                atoms.calc = found.calc  # for ASE to find
            forces = [optimiser.atoms.get_forces() for optimiser, _ in tasks]
            largest = [float(np.linalg.norm(force, axis=1).max()) for force in forces]
            if not np.isfinite(largest).all():
                break
            tasks = [task for task, force in zip(tasks, largest, strict=True) if force >= self.fmax]
            if not tasks:
                return
            for optimiser, _ in tasks:
                optimiser.step()
        raise PropertyError(
            f"{failed} after {self.steps} steps: a force of {max(largest):.3g} eV/A is left, "
            f"expected less than {self.fmax:g}; start from a better structure, or allow more steps "
            "or force"
        )

    def energy_changes(self, structures: Sequence[Atoms]) -> Array:
        """Compute changes b . v_k of all members' energies, [K, S] eV, without backward passes."""
        passes = self._linearised(structures, forces=False)
        found = [one.energy_changes(v)[keys.ENERGY].numpy(force=True) for one, v in passes]
        return np.concatenate(found, axis=1)

    def force_changes(self, structures: Sequence[Atoms]) -> list[Array]:
        """Compute changes of the forces of all members, [K, N, 3] eV/A for each structure."""
        passes = self._linearised(structures, forces=True)
        return [one.members(v)[keys.FORCES].double().numpy(force=True) for one, v in passes]

    def of_each(self, of_member: Callable[[int], Any]) -> tuple[list[Any], dict[int, str]]:
        """Compute something of each member, by its number; a `PropertyError` is told as text."""
        found: list[Any] = []
        failures: dict[int, str] = {}
        for number in track(range(self.members), "members", self.members):
            try:
                found.append(of_member(number))
            except PropertyError as error:
                failures[number] = str(error)
        return found, failures

    def finished(
        self,
        kind: str,
        units: Mapping[str, str],
        value: Values,
        first_order: Callable[[], Sequence[Values]],
        of_member: Callable[[Surface], Values],
        details: Mapping[str, Any] | None = None,
    ) -> Properties:
        """Add error bars to the plain model's values, by the way that was asked for.

        `first_order` computes the values of all members to first order, `of_member` those of one
        by itself. Errors of energies are scaled by `energy_factor` here.
        """
        failures: dict[int, str] = {}
        if self.method == "linear":
            found = first_order()
        else:
            committee = self.potential.draw(self.members, seed=self.seed)
            found, failures = self.of_each(lambda number: of_member(committee[number].predict))
        quantities: dict[str, Property] = {}
        for name, unit in units.items():
            members = np.array([one[name] for one in found])
            if unit.startswith("eV"):
                members = value[name] + self.energy_factor * (members - value[name])
            quantities[name] = Property.of(name, value[name], members, unit)
        return Properties(kind, self.method, quantities, failures, details or {})

    def _linearised(
        self, structures: Sequence[Atoms], *, forces: bool
    ) -> Iterator[tuple[Linearised, Tensor]]:
        """Linearise the potential on batches, for forces on single structures, with noise [K, d].

        The noise v_k is that of `potential.draw`. Warns of elements without data.
        """
        if self.potential.posterior is None:
            raise InputError(
                "error bars to first order need a posterior that has seen data; condition the "
                'potential (potential.condition), or use method="members"'
            )
        posterior = self.potential.conditioned()
        unknown = {int(z) for atoms in structures for z in atoms.numbers} - posterior.domain.numbers
        if unknown:
            symbols = ", ".join(chemical_symbols[number] for number in sorted(unknown))
            warnings.warn(
                f"the structures that the posterior was conditioned on have no {symbols}: error "
                "bars of properties of such structures are too small. Condition on such "
                "structures too",
                stacklevel=5,
            )
        noise = posterior.draws(self.members, self.seed)
        model, depth = self.potential.linear_model(), "members" if forces else "energies"
        for graph in graph_batches(model.backbone, structures, 1 if forces else BATCH):
            yield model(graph, forces=forces, depth=depth), noise
