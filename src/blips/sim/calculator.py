"""ASE calculator: energies, forces and stress with their standard deviations.

    atoms.calc = blips.Calculator(potential)              # means and stds at every call
    atoms.calc = blips.Calculator(potential, method="map", every=10)     # for MD
    atoms.calc = blips.Calculator(potential, method="frozen", member=3)  # for phonons, a committee

| method | energy, forces, stress | uncertainties |
|---|---|---|
| auto (default) | as `predict(method="auto")` chooses: conditioned where it can | at every call |
| conditioned | the plain model | of the posterior that has seen the data, at every call |
| mc | means of samples of the paper's posterior | at every call |
| onepass | the plain model | of energies only, at every call, by one pass |
| map | the plain model, at its cost | of "auto", at every n-th call and when asked for |
| frozen | one member of the posterior: smooth and conservative | as for map |
"""

from typing import Any

from ase import Atoms
from ase.calculators.calculator import Calculator as ASECalculator
from ase.calculators.calculator import all_changes
from ase.calculators.singlepoint import SinglePointCalculator

from blips import keys
from blips.backbones.base import atomistic
from blips.data.graph import Graph
from blips.data.neighbours import SKIN, NeighbourCache
from blips.defaults import SAMPLES
from blips.errors import InputError, refuse_below, refuse_unknown
from blips.inference.monte_carlo import Samples
from blips.inference.sampling import METHODS, Member
from blips.potential import BayesianPotential
from blips.prediction import (
    UNCERTAIN,
    UNCERTAINTIES,
    Model,
    Prediction,
    annotate,
    with_results,
)


class Calculator(ASECalculator):
    """A Bayesian potential for ASE; eV, eV/A and eV/A^3, uncertainties calibrated if it is.

    Args:
        potential: Bayesian, or a baseline.
        method: see above; a baseline has auto and map.
        samples: posterior samples (or "auto") behind uncertainties (and the means of "mc").
        seed: of all noise; the same seed gives the same numbers.
        every: "map" and "frozen": also work out the uncertainties at every n-th new structure;
            0 for only when they are asked for.
        member: "frozen": number of the draw, or the draw.
        skin: A, of the neighbour list that is kept between calls; 0 searches at every call.
        options: of `BayesianPotential.predict`, such as `memory_gb` and `calibrated`.
    """

    implemented_properties = ["free_energy", *UNCERTAIN, *UNCERTAINTIES]  # noqa: RUF012 (as in ASE)

    def __init__(
        self,
        potential: Model,
        method: str = "auto",
        *,
        samples: Samples = SAMPLES,
        seed: int = 0,
        every: int = 0,
        member: int | Member = 0,
        skin: float = SKIN,
        **options: Any,
    ) -> None:
        if not isinstance(potential, Model):
            raise InputError(
                f"simulations need a model with error bars, got {type(potential).__name__}; make "
                "one with blips.bayesianize(model), or take one of blips.baselines"
            )
        bayesian = isinstance(potential, BayesianPotential)
        refuse_unknown("method", method, METHODS if bayesian else ("auto", "map"))
        refuse_below(0, every=every)
        super().__init__()
        self.potential, self.every = potential, every
        self.structures_seen = 0
        self.neighbours = NeighbourCache(skin)
        self.always_uncertain = method not in ("map", "frozen")  # a std comes with every energy
        self._options = {"samples": samples, "seed": seed, **options}
        self._options["method"] = "auto" if method == "map" else method
        self._member: Member | None = None
        if bayesian and method == "frozen":
            self._member = potential.member(member, seed) if isinstance(member, int) else member
            self._options["method"] = "frozen" if potential.posterior is None else "conditioned"

    def plain(self, graph: Graph, stress: bool) -> Prediction:
        """Predict with the plain model, or the member, without error bars."""
        if self._member is not None:
            return self._member.predict(graph, stress=stress)
        return self.potential.predict(graph, method="map", stress=stress)

    def sampled(self, graph: Graph, stress: bool) -> Prediction:
        """Predict with error bars; those of a member are its committee's."""
        return self.potential.predict(graph, stress=stress, **self._options)

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
        if system_changes:
            self.results = {}  # ASE does so too, but not where this is called directly
        structure = self.atoms
        if not isinstance(structure, Atoms):
            raise InputError("the calculator has no structure; pass atoms, or set atoms.calc")
        wanted = set(properties or ())
        is_new = not self.results
        due = is_new and self.every > 0 and self.structures_seen % self.every == 0
        self.structures_seen += int(is_new)
        stress = bool({*wanted, *self.results} & {keys.STRESS, keys.STRESS_UNCERTAINTY})
        graph = atomistic(self.potential.backbone).graph(structure, caches=[self.neighbours])
        if not self.always_uncertain:
            self.results |= self.plain(graph, stress).ase_results()
        if self.always_uncertain or due or wanted & set(UNCERTAINTIES):
            self.results = self.sampled(graph, stress).ase_results() | self.results
        self.results["free_energy"] = self.results[keys.ENERGY]
        if atoms is not None:
            annotate(atoms, self.results)


def snapshot(atoms: Atoms) -> Atoms:
    """Copy a structure with the results of its calculator, as far as they belong to it."""
    frame, calculator = atoms.copy(), atoms.calc
    results: dict[str, Any] = {}
    if calculator is not None and not calculator.check_state(atoms):
        results = calculator.results
    with_results(frame, results)
    if not isinstance(calculator, SinglePointCalculator):  # a snapshot itself, and annotated
        annotate(frame, results)
    return frame
