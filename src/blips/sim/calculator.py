"""ASE calculator: energies, forces and stress with their standard deviations.

    atoms.calc = blips.Calculator(potential)              # means and stds at every call
    atoms.calc = blips.Calculator(potential, mode="map", every=10)    # for MD
    atoms.calc = blips.Calculator(potential, mode="frozen", member=3) # for phonons, a committee

| mode | energy, forces, stress | uncertainties |
|---|---|---|
| mc | means of posterior samples | at every call |
| map | posterior means, the base model's cost | of samples, at every n-th call and when asked for |
| frozen | one draw of the weights: smooth and conservative | as for map |
| conditioned | the plain model | of the posterior that has seen the data, at every call |
| onepass | posterior means | at every call, without sampling; forces after `distil_forces` |
| auto (default) | as `predict(method="auto")` chooses: conditioned where it can | always |
"""

from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.calculator import Calculator as ASECalculator
from ase.calculators.calculator import all_changes
from ase.stress import full_3x3_to_voigt_6_stress

from blips import keys
from blips.backbones.base import graph_batches
from blips.data.graph import Graph
from blips.data.neighbours import SKIN, NeighbourCache
from blips.defaults import SAMPLES
from blips.errors import InputError
from blips.methods import Samples
from blips.potential import BayesianPotential
from blips.predict import Model, Prediction
from blips.sim.properties import UNCERTAINTIES, annotate

MODES = ("auto", "conditioned", "mc", "map", "frozen", "onepass")
BASELINE_MODES = ("auto", "map")
ALWAYS_UNCERTAIN = ("auto", "conditioned", "mc", "onepass")  # a std comes with every energy


class Calculator(ASECalculator):
    """A Bayesian potential for ASE; eV, eV/A and eV/A^3, uncertainties calibrated if it is.

    Args:
        potential: made by `blips.bayesianize` or `blips.load`, or a baseline (modes auto and map).
        mode: "auto", "conditioned", "mc", "map", "frozen" or "onepass", see above.
        samples: posterior samples (or "auto") behind uncertainties (and the means of "mc").
        every: "map" and "frozen": also work out the uncertainties at every n-th new structure;
            0 for only when they are asked for.
        member: "frozen": number of the draw.
        seed: of all noise; the same seed gives the same numbers.
        skin: A, of the neighbour list that is kept between calls; 0 searches at every call.
        method: how uncertainties are predicted, see `BayesianPotential.predict`.
        options: of `BayesianPotential.predict`, such as `memory_gb` and `calibrated`.
    """

    implemented_properties = [  # noqa: RUF012 (ASE declares it so)
        keys.ENERGY,
        "free_energy",
        keys.FORCES,
        keys.STRESS,
        keys.ENERGIES,
        *UNCERTAINTIES,
    ]

    def __init__(
        self,
        potential: Model,
        mode: str = "auto",
        *,
        samples: Samples = SAMPLES,
        every: int = 0,
        member: int = 0,
        seed: int = 0,
        method: str = "auto",
        skin: float = SKIN,
        **options: Any,
    ) -> None:
        check_mode(potential, mode, type(self).__name__)
        if every < 0:
            raise InputError(f"every is {every}; expected 0 (only when asked for) or more")
        super().__init__()
        self.potential = potential
        self._always = mode in ALWAYS_UNCERTAIN
        method = mode if mode in ALWAYS_UNCERTAIN else method
        self.samples: Samples = samples
        self.mode, self.every = mode, every
        self.member, self.seed, self.method, self.options = member, seed, method, options
        self.structures_seen = 0
        self.neighbours = NeighbourCache(skin)
        self._member = None
        if mode == "frozen" and isinstance(potential, BayesianPotential):
            self._member = potential.member(member, seed)

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: list[str] | None = None,
        system_changes: list[str] = all_changes,
    ) -> None:
        """Fill `results`; stress and its uncertainty only where they are asked for.

        Uncertainties are also kept in `atoms.info` and `atoms.arrays`, for `ase.io.write`.
        """
        super().calculate(atoms, properties, system_changes)
        structure = self.atoms
        if not isinstance(structure, Atoms):
            raise InputError("the calculator has no structure; pass atoms, or set atoms.calc")
        wanted = set(properties or [keys.ENERGY])
        is_new = bool(system_changes) or not self.results
        self.structures_seen += int(is_new)
        stress = bool(wanted & {keys.STRESS, keys.STRESS_UNCERTAINTY}) or self._keeps_stress()
        due = is_new and self.every > 0 and (self.structures_seen - 1) % self.every == 0
        (graph,) = graph_batches(self.potential.backbone, structure, 1, [self.neighbours])
        if not self._always:
            self.results |= _results(self._without_sampling(graph, stress))
        if self._always or due or wanted & set(UNCERTAINTIES):
            sampled = _results(self._sampled(graph, stress))
            uncertain = {name: sampled[name] for name in UNCERTAINTIES if name in sampled}
            self.results |= sampled if self._always else uncertain
        if atoms is not None:
            annotate(atoms, self.results)

    def _keeps_stress(self) -> bool:
        """Whether the stress of this structure is known already, and is kept."""
        return keys.STRESS in self.results

    def _without_sampling(self, graph: Graph, stress: bool) -> Prediction:
        if self._member is not None:
            return self._member.predict(graph, stress=stress)
        return self.potential.predict(graph, method="map", stress=stress)

    def _sampled(self, graph: Graph, stress: bool) -> Prediction:
        return self.potential.predict(
            graph,
            method=self.method,
            samples=self.samples,
            seed=self.seed,
            stress=stress,
            **self.options,
        )


def check_mode(potential: object, mode: str, owner: str) -> None:
    """Refuse what has no error bars, and modes that a model does not have."""
    if not isinstance(potential, Model):
        raise InputError(
            f"{owner} needs a model with error bars, got {type(potential).__name__}; make one with "
            "blips.bayesianize(model) or blips.load(file), or take one of blips.baselines"
        )
    modes = MODES if isinstance(potential, BayesianPotential) else BASELINE_MODES
    if mode not in modes:
        raise InputError(
            f"unknown mode {mode!r} of {type(potential).__name__}; use one of {', '.join(modes)}"
        )


def _results(prediction: Prediction) -> dict[str, Any]:
    """Turn a prediction of one structure into ASE's results; stress in Voigt order."""
    found: dict[str, Any] = {}
    for name in (keys.ENERGY, keys.FORCES, keys.STRESS, keys.ENERGIES):
        std = getattr(prediction, f"{name}_total_std", getattr(prediction, f"{name}_std"))
        for key, array in ((name, getattr(prediction, name)), (f"{name}_uncertainty", std)):
            if array is not None:
                found[key] = _as_ase(name, array)
    found["free_energy"] = found[keys.ENERGY]
    return found


def _as_ase(name: str, array: np.ndarray) -> float | np.ndarray:
    if name == keys.ENERGY:
        return float(array[0])
    return full_3x3_to_voigt_6_stress(array[0]) if name == keys.STRESS else np.array(array)
