"""A Bayesian potential as a model of TorchSim, which advances many structures in one batch.

    model = TorchSimModel(potential)                         # method="map"
    state = torch_sim.optimize(structures, model, optimizer=torch_sim.optimizers.fire)

`blips.sim.batched` relaxes and integrates with it under a guard. TorchSim holds positions in
double precision here; the potential computes in its own.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ase import Atoms
from torch import Tensor

from blips import keys
from blips.backbones.base import first_parameter, graph_batches
from blips.backbones.foreign import require
from blips.data.graph import Graph
from blips.data.neighbours import SKIN, NeighbourCache
from blips.defaults import SAMPLES
from blips.errors import InputError
from blips.prediction import Model, Prediction
from blips.sim.calculator import UNCERTAINTIES, Evaluator
from blips.sim.guard import Finding, Guard, check_domain

PIP_LINE = "pip install torch-sim-atomistic==0.3.0"

if TYPE_CHECKING:
    import torch_sim as ts
    from torch_sim.models.interface import ModelInterface
else:
    ts = require("torch_sim", PIP_LINE)
    ModelInterface = require("torch_sim.models.interface", PIP_LINE).ModelInterface

STATE_DTYPE = torch.float64
PER_ATOM = (keys.FORCES, keys.FORCES_UNCERTAINTY)
PER_STRUCTURE = (keys.ENERGY, keys.ENERGY_UNCERTAINTY, keys.STRESS, keys.STRESS_UNCERTAINTY)


class TorchSimModel(ModelInterface):
    """A Bayesian potential as a model of TorchSim; eV, eV/A, eV/A^3.

    The outputs are `energy` [S], `forces` [N, 3] and, if asked for, `stress` [S, 3, 3]; all methods
    but "map" and "frozen" also give their `*_uncertainty`. A structure whose positions are no
    finite numbers gets NaN and leaves the others alone.

    Args:
        potential: made by `blips.bayesianize` or `blips.load`, or a baseline.
        method: "map" (the plain model, at its cost), "frozen" (one member), or another one of
            `blips.Calculator` (uncertainties at every step).
        samples: posterior samples behind uncertainties.
        member: "frozen": number of the draw.
        seed: of all noise.
        compute_stress: also give the stress, for cells that change.
        skin: A, of the neighbour lists that are kept between steps; 0 searches at every step.
        options: of `BayesianPotential.predict`.
    """

    def __init__(
        self,
        potential: Model,
        method: str = "map",
        *,
        samples: int = SAMPLES,
        member: int = 0,
        seed: int = 0,
        compute_stress: bool = False,
        skin: float = SKIN,
        **options: Any,
    ) -> None:
        super().__init__()
        self.evaluator = Evaluator(potential, method, samples, seed, member, options)
        self.potential = potential
        self._skin, self._caches = skin, list[NeighbourCache]()
        self._dtype, self._device = STATE_DTYPE, first_parameter(potential.backbone).device
        self._compute_forces, self._compute_stress = True, compute_stress

    def forward(self, state: Any, **_: Any) -> dict[str, Tensor]:
        """Compute energy, forces, stress of a `SimState` (or its dictionary)."""
        state = state if isinstance(state, ts.SimState) else ts.SimState(**state)
        evaluator = self.evaluator
        return self._tensors(state, evaluator.sampled if evaluator.always else evaluator.plain)

    def uncertainties(self, state: Any) -> dict[str, Tensor]:
        """Compute the std of energy [S], forces [N, 3] and stress [S, 3, 3] by samples."""
        outputs = self._tensors(state, self.evaluator.sampled)
        return {name: value for name, value in outputs.items() if name in UNCERTAINTIES}

    def check(self, state: Any, guard: Guard) -> list[list[Finding]]:
        """Check each structure, S lists of findings; samples are drawn once for all."""
        structures = state.to_atoms()
        findings = [guard.check_geometry(atoms) for atoms in structures]
        sound = [index for index, found in enumerate(findings) if not found]
        if sound and guard.needs_std:
            graph = self._graph([structures[index] for index in sound])
            prediction = self.evaluator.sampled(graph, stress=False)
            for number, index in enumerate(sound):
                atoms, results = structures[index], prediction[number].ase_results()
                findings[index] = guard.check_std(atoms, results.__getitem__)
                findings[index] += check_domain(atoms, results.get(keys.IN_DOMAIN))
        return findings

    def _graph(self, structures: list[Atoms]) -> Graph:
        """Build the graph of the batch with the neighbours kept for each place in it.

        Where a structure has left the batch, those behind it move up and are searched once more.
        """
        while len(self._caches) < len(structures):
            self._caches.append(NeighbourCache(self._skin))
        caches = self._caches[: len(structures)]
        (graph,) = graph_batches(self.potential.backbone, structures, caches=caches)
        return graph

    def _tensors(
        self, state: Any, predict: Callable[[Graph, bool], Prediction]
    ) -> dict[str, Tensor]:
        """Return outputs of all structures, NaN for those without finite positions."""
        structures = state.to_atoms()
        whole = [bool(np.isfinite(atoms.positions).all()) for atoms in structures]
        if not any(whole):
            raise InputError("no structure of the batch has finite positions: all have exploded")
        graph = self._graph([a for a, good in zip(structures, whole, strict=True) if good])
        arrays = predict(graph, self._compute_stress).results()
        rows = np.repeat(whole, [len(atoms) for atoms in structures])  # [N]
        found: dict[str, Tensor] = {}
        for name in (one for one in (*PER_STRUCTURE, *PER_ATOM) if one in arrays):
            keep = rows if name in PER_ATOM else np.asarray(whole)
            full = np.full((len(keep), *arrays[name].shape[1:]), np.nan)
            full[keep] = arrays[name]
            found[name] = torch.as_tensor(full, dtype=self._dtype, device=self._device)
        return found
