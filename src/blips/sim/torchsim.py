"""TorchSim: relaxations and molecular dynamics of many structures in one batch, under a guard.

    model = TorchSimModel(potential)                         # method="map"
    finished = relax(structures, model, Guard(high=0.3), force_tolerance=0.02)
    guard, saver = Guard(low=0.1, high=0.3), FrameSaver("uncertain.extxyz", every=50)
    finished = integrate(structures, model, guard, saver=saver, temperature=300, steps=2000)
    for one in finished:
        print(one.status, one.steps, one.reason)

All structures advance in one batch. At every n-th step the guard looks at each of them: above `low`
its frame is saved; above `high` it is halted and leaves the batch, the others go on. TorchSim holds
positions in double precision here; the potential computes in its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.stress import full_3x3_to_voigt_6_stress
from torch import Tensor

from blips import keys
from blips.backbones.base import first_parameter, graph_batches
from blips.data.graph import Graph
from blips.data.neighbours import NeighbourCache
from blips.errors import InputError, refuse_below, require
from blips.prediction import UNCERTAINTIES, Model, Prediction, annotate
from blips.sim.calculator import Calculator
from blips.sim.frames import FrameSaver
from blips.sim.guard import Finding, Guard, stop_reason

PIP_LINE = "pip install torch-sim-atomistic==0.3.0"

ts: Any = require("torch_sim", PIP_LINE)
ModelInterface: Any = require("torch_sim.models.interface", PIP_LINE).ModelInterface
STATE_DTYPE = torch.float64


class TorchSimModel(ModelInterface):
    """A Bayesian potential as a model of TorchSim; eV, eV/A, eV/A^3.

    The outputs are `energy` [S], `forces` [N, 3] and, if asked for, `stress` [S, 3, 3]; all methods
    but "map" and "frozen" also give their `*_uncertainty`. A structure whose positions are no
    finite numbers gets NaN and leaves the others alone.

    Options are those of `blips.Calculator`; `compute_stress` also gives the stress, for cells that
    change.
    """

    def __init__(
        self,
        potential: Model,
        method: str = "map",
        *,
        compute_stress: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.potential = potential
        self.calculator = Calculator(potential, method, **options)
        self._caches: list[NeighbourCache] = []
        self._dtype, self._device = STATE_DTYPE, first_parameter(potential.backbone).device
        self._compute_forces, self._compute_stress = True, compute_stress

    def forward(self, state: Any, **_: Any) -> dict[str, Tensor]:
        """Compute energy, forces, stress of a `SimState` (or its dictionary)."""
        state = state if isinstance(state, ts.SimState) else ts.SimState(**state)
        by = self.calculator
        return self._tensors(state, by.sampled if by.always_uncertain else by.plain)

    def uncertainties(self, state: Any) -> dict[str, Tensor]:
        """Compute the std of energy [S], forces [N, 3] and stress [S, 3, 3] by samples."""
        outputs = self._tensors(state, self.calculator.sampled)
        return {name: value for name, value in outputs.items() if name in UNCERTAINTIES}

    def check(self, state: Any, guard: Guard) -> list[list[Finding]]:
        """Check each structure, S lists of findings; samples are drawn once for all."""
        structures = state.to_atoms()
        findings = [guard.check_geometry(atoms) for atoms in structures]
        sound = [index for index, found in enumerate(findings) if not found]
        if sound and guard.needs_std:
            graph = self.graph([structures[index] for index in sound])
            prediction = self.calculator.sampled(graph, stress=False)
            for number, index in enumerate(sound):
                results = prediction[number].ase_results()
                findings[index] = guard.check_std(structures[index], results)
        return findings

    def graph(self, structures: list[Atoms]) -> Graph:
        """Build the graph of the batch with the neighbours kept for each place in it.

        Where a structure has left the batch, those behind it move up and are searched once more.
        """
        while len(self._caches) < len(structures):
            self._caches.append(NeighbourCache(self.calculator.neighbours.skin))
        caches = self._caches[: len(structures)]
        return next(graph_batches(self.potential.backbone, structures, caches=caches))

    def _tensors(
        self, state: Any, predict: Callable[[Graph, bool], Prediction]
    ) -> dict[str, Tensor]:
        """Return outputs of all structures, NaN for those without finite positions."""
        structures = state.to_atoms()
        whole = np.array([np.isfinite(atoms.positions).all() for atoms in structures])  # [S]
        if not whole.any():
            raise InputError("no structure of the batch has finite positions: all have exploded")
        graph = self.graph([structures[k] for k in np.flatnonzero(whole)])
        rows = np.repeat(whole, [len(atoms) for atoms in structures])  # [N]
        found: dict[str, Tensor] = {}
        for name, array in predict(graph, self._compute_stress).results().items():
            if not name.startswith((keys.ENERGIES, keys.IN_DOMAIN)):
                keep = rows if name.startswith(keys.FORCES) else whole
                full = np.full((len(keep), *array.shape[1:]), np.nan)
                full[keep] = array
                found[name] = torch.as_tensor(full, dtype=self._dtype, device=self._device)
        return found


@dataclass
class Finished:
    """What became of one structure."""

    atoms: Atoms  # its last state with energy, forces and, where the model has them, momenta
    status: str  # "converged", "done" (all steps), "halted" or "unfinished" (out of steps)
    steps: int  # that it took
    findings: list[Finding]  # of the guard, if it was halted

    @property
    def reason(self) -> str:
        """Why it was halted; empty if it was not."""
        return stop_reason(self.findings)


def relax(
    structures: Sequence[Atoms],
    model: TorchSimModel,
    guard: Guard,
    *,
    force_tolerance: float = 0.02,
    steps: int = 500,
    every: int = 5,
    saver: FrameSaver | None = None,
    optimizer: Callable[..., Any] | None = None,
    **options: Any,
) -> list[Finished]:
    """Relax structures in one batch; those that the guard objects to are halted.

    Structures are all periodic, or none. The model is of method "map" or "frozen": samples are no
    smooth function to minimise. Relaxed is what has no force above `force_tolerance`, eV/A (with a
    cell, of that too); `every` is the number of steps between two looks at convergence and guard.
    Frames above the guard's `low` go to the saver. The optimizer is one of TorchSim with its
    options, `optimizers.fire` by default; `frechet_cell_fire` relaxes cells.
    """
    if not force_tolerance > 0:
        raise InputError(f"force_tolerance is {force_tolerance} eV/A; expected a positive number")
    init, update = (optimizer or ts.optimizers.fire)(model, **options)
    structures = _batch_of(structures)
    state = init(ts.initialize_state(structures, model.device, model.dtype))
    converged = ts.generate_force_convergence_fn(
        force_tolerance, include_cell_forces=hasattr(state, "cell_forces")
    )
    return _advance(
        state, lambda state, _: update(state), model, guard, steps, every, saver, converged
    )


def integrate(
    structures: Sequence[Atoms],
    model: TorchSimModel,
    guard: Guard,
    *,
    temperature: float | Sequence[float],
    steps: int,
    timestep: float = 0.5,
    every: int = 10,
    seed: int = 0,
    saver: FrameSaver | None = None,
    integrator: Callable[..., Any] | None = None,
    **options: Any,
) -> list[Finished]:
    """Run molecular dynamics in one batch; structures that the guard objects to are halted.

    Momenta are drawn from the temperature (K, one for all or one for each structure), unless every
    structure has its own already; the seed is that of momenta and thermostat, the time step in fs.
    The integrator is one of TorchSim, `nvt_langevin` by default, with options in TorchSim's units.
    The other arguments are those of `relax`.
    """
    structures = _batch_of(structures)
    temperatures = np.broadcast_to(np.asarray(temperature, dtype=float), (len(structures),))
    if not ((temperatures > 0).all() and timestep > 0):
        raise InputError(
            f"temperature is {temperature} K and timestep {timestep} fs; expected positive numbers"
        )
    units = ts.units.UnitSystem.metal
    here = {"dtype": STATE_DTYPE, "device": model.device}
    kT = torch.tensor(temperatures * units.temperature, **here)  # [S] eV
    dt = torch.tensor(timestep * 1e-3 * units.time, **here)
    init, update = (integrator or ts.nvt_langevin)(model, dt=dt, kT=kT, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state = ts.initialize_state(structures, model.device, model.dtype)
        if all(atoms.get_momenta().any() for atoms in structures):
            momenta = np.concatenate([atoms.get_momenta() for atoms in structures])
            state.momenta = torch.tensor(momenta, **here)  # [N, 3], TorchSim's unit is ASE's
        state = init(state, seed=seed)

        def step(state: Any, alive: list[int]) -> Any:
            return update(state, kT=kT[alive])

        return _advance(state, step, model, guard, steps, every, saver)


def halting(
    model: TorchSimModel, guard: Guard, convergence_fn: Callable[..., Tensor] | None = None
) -> Callable[..., Tensor]:
    """Make a convergence function for `torch_sim.optimize` that also ends what the guard stops.

    `convergence_fn` is one of TorchSim, such as `torch_sim.generate_force_convergence_fn(0.02)`.
    """

    def ended(state: Any, last_energy: Tensor | None = None) -> Tensor:
        stops = [bool(stop_reason(found)) for found in model.check(state, guard)]
        halted = torch.tensor(stops, device=state.device)
        return halted if convergence_fn is None else halted | convergence_fn(state, last_energy)

    return ended


def _batch_of(structures: Sequence[Atoms]) -> list[Atoms]:
    """List the structures; refuse what TorchSim does not take."""
    batch: list[Atoms] = [structures] if isinstance(structures, Atoms) else list(structures)
    if not batch:
        raise InputError("nothing to simulate: the list of structures is empty")
    if len({flag for atoms in batch for flag in atoms.pbc.tolist()}) > 1:
        raise InputError(
            "TorchSim takes structures that are all periodic in three directions, or all not"
        )
    return batch


def _advance(
    state: Any,
    update: Callable[[Any, list[int]], Any],
    model: TorchSimModel,
    guard: Guard,
    steps: int,
    every: int,
    saver: FrameSaver | None,
    converged: Callable[..., Tensor] | None = None,
) -> list[Finished]:
    """Run the batch; structures leave it as they converge or are halted."""
    refuse_below(1, every=every)
    refuse_below(0, steps=steps)
    alive = list(range(state.n_systems))  # number of each structure that is still in the batch
    finished: dict[int, Finished] = {}
    done = 0
    while True:
        findings = model.check(state, guard)
        relaxed = converged(state).tolist() if converged else [False] * len(alive)
        at_end = "" if done < steps else "unfinished" if converged else "done"
        leaving: list[int] = []
        for place, (number, found) in enumerate(zip(alive, findings, strict=True)):
            halted = bool(stop_reason(found))
            status = "halted" if halted else "converged" if relaxed[place] else at_end
            if not status and (saver is None or not found):
                continue
            frame = _frame(state[[place]], model)
            if saver is not None and found:
                saver.offer(frame, done, found, walker=number, last=halted)
            if status:
                leaving.append(place)
                finished[number] = Finished(frame, status, done, found if halted else [])
        if len(leaving) == len(alive):
            return [finished[number] for number in sorted(finished)]
        if leaving:
            state.pop(leaving)
            alive = [number for number in alive if number not in finished]
        for _ in range(min(every, steps - done)):
            state = update(state, alive)
            done += 1


def _frame(state: Any, model: TorchSimModel) -> Atoms:
    """Return the structure of a state with one system, with its results, std and momenta."""
    (atoms,) = state.to_atoms()
    atoms.set_masses(state.masses.cpu().numpy())
    if hasattr(state, "momenta"):
        atoms.set_momenta(state.momenta.cpu().numpy())
    results = {keys.ENERGY: float(state.energy[0]), keys.FORCES: state.forces.cpu().numpy()}
    if hasattr(state, "stress"):
        results[keys.STRESS] = full_3x3_to_voigt_6_stress(state.stress[0].cpu().numpy())
    atoms.calc = SinglePointCalculator(atoms, **results)
    if np.isfinite(atoms.positions).all():
        prediction = model.calculator.sampled(model.graph([atoms]), model.compute_stress)
        annotate(atoms, prediction.ase_results())
    return atoms
