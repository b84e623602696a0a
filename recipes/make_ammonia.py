"""Make the shipped NH3 data set: 78 training, 14 validation and 129 out-of-distribution geometries.

    OMP_NUM_THREADS=1 python recipes/make_ammonia.py --work nh3_labels.jsonl

1. Minimum: BFGS on the energies of `blips.sim.pyscf`.
2. Thermal geometries (training, validation): with the Hessian's vibrational eigenvectors u_m and
   eigenvalues k_m at the minimum, x = x_min + sum_m sqrt(2 E / k_m) n_m u_m, where n is a random
   unit vector and E is uniform in 0-5 kcal/mol: E is the harmonic energy of x. Geometries whose
   true energy leaves 0-5 kcal/mol are drawn again.
3. Out-of-distribution geometries: target energies evenly spaced over 5-70 kcal/mol, and four kinds
   of distortion in turn (`ammonia_distortions.py`). Each random distortion has one amplitude, which
   is searched until the energy is within 2 kcal/mol of its target.

Every geometry differs from every other (of all three files) by more than 0.01 A in at least one of
its sorted N-H and sorted H-H distances. Geometries without a converged SCF are drawn again.

Draws are seeded. Labels are appended to the work file as they come: a run that was interrupted
repeats its draws, finds their labels there, and goes on.
"""

import argparse
import json
from pathlib import Path

import ase.io
import numpy as np
from ammonia_distortions import DISTORTIONS
from ase import Atoms
from ase.build import molecule
from ase.calculators.calculator import Calculator, all_changes
from ase.calculators.singlepoint import SinglePointCalculator
from ase.optimize import BFGS

from blips.data import ammonia
from blips.errors import InputError
from blips.sim.pyscf import PySCF
from blips.units import KCAL_PER_MOL

FILES = Path(ammonia.__file__).parent / "files"
COUNTS = {"train": 78, "valid": 14, "test_ood": 129}
SEED = 2025
THERMAL_LIMIT = 5.0  # kcal/mol
OOD_RANGE = (5.0, 70.0)  # kcal/mol
TARGET_TOLERANCE = 2.0  # kcal/mol
DISTINCT = 1e-2  # Angstrom
CLOSEST = 0.6  # Angstrom
HESSIAN_STEP = 0.01  # Angstrom


class LabelStore:
    """Labels on disk, one JSON line each, found again by the rounded positions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, dict] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue  # cut off by an interruption
                self.known[record["key"]] = record

    def label(self, positions: np.ndarray) -> Atoms | None:
        """Label NH3 at `positions` rounded to 1e-6 A; None where the SCF did not converge."""
        atoms = Atoms("NH3", positions=np.round(positions, 6) + 0.0)
        key = " ".join(f"{x:.6f}" for x in atoms.positions.ravel())
        if key not in self.known:
            self._append(key, atoms)
        record = self.known[key]
        if "energy" not in record:
            return None
        atoms.calc = SinglePointCalculator(
            atoms,
            energy=record["energy"] - ammonia.MINIMUM_ENERGY,
            forces=np.array(record["forces"]),
        )
        return atoms

    def _append(self, key: str, atoms: Atoms) -> None:
        record: dict = {"key": key}
        try:
            labelled = atoms.copy()
            labelled.calc = PySCF()
            # Total energies on disk: they stay valid when the reference energy changes.
            record["energy"] = labelled.get_potential_energy()
            record["forces"] = labelled.get_forces().tolist()
        except InputError as error:
            record["failure"] = str(error)
        self.known[key] = record
        with self.path.open("a") as file:
            file.write("\n" + json.dumps(record))


class StoredLabels(Calculator):
    """ASE calculator that reads or makes labels through a `LabelStore`."""

    implemented_properties = ["energy", "forces"]  # noqa: RUF012

    def __init__(self, store: LabelStore) -> None:
        super().__init__()
        self.store = store

    def calculate(self, atoms=None, properties=None, system_changes=all_changes) -> None:
        """Fill `results` with the label of `atoms`."""
        super().calculate(atoms, properties, system_changes)
        if atoms is None:
            raise InputError("StoredLabels needs a structure")
        labelled = self.store.label(atoms.positions)
        if labelled is None:
            raise InputError("the SCF did not converge during the optimisation")
        self.results = {
            "energy": labelled.get_potential_energy(),
            "forces": labelled.get_forces(),
        }


def optimise(store: LabelStore) -> np.ndarray:
    """Return positions [4, 3] of the minimum, N first, N at the origin."""
    atoms = molecule("NH3")
    atoms.calc = StoredLabels(store)
    BFGS(atoms, logfile=None).run(fmax=5e-4, steps=100)
    return np.round(atoms.positions - atoms.positions[0], 6)


def vibrations(store: LabelStore, minimum: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute the six largest eigenvalues (eV/A^2) and eigenvectors [6, 12] of the Hessian."""
    hessian = np.zeros((12, 12))
    for row in range(12):
        step = np.zeros(12)
        step[row] = HESSIAN_STEP
        forces = []
        for sign in (1, -1):
            labelled = store.label(minimum + sign * step.reshape(4, 3))
            if labelled is None:
                raise InputError("the SCF did not converge for the Hessian")
            forces.append(labelled.get_forces().ravel())
        hessian[row] = (forces[1] - forces[0]) / (2 * HESSIAN_STEP)
    eigenvalues, eigenvectors = np.linalg.eigh((hessian + hessian.T) / 2)
    return eigenvalues[6:], eigenvectors.T[6:]


def fingerprint(atoms: Atoms) -> np.ndarray:
    """Return sorted N-H and H-H distances [6], invariant to rotation and relabelling."""
    distances = atoms.get_all_distances()
    return np.concatenate([np.sort(distances[0, 1:]), np.sort(distances[[1, 1, 2], [2, 3, 3]])])


def is_new(atoms: Atoms, accepted: list[Atoms]) -> bool:
    """Return whether no accepted geometry has all six sorted distances within `DISTINCT`."""
    mine = fingerprint(atoms)
    return all(np.abs(fingerprint(other) - mine).max() > DISTINCT for other in accepted)


def kcal(atoms: Atoms) -> float:
    """Compute the energy above the minimum in kcal/mol."""
    return atoms.get_potential_energy() / KCAL_PER_MOL


def thermal_geometry(
    store: LabelStore,
    minimum: np.ndarray,
    modes: tuple[np.ndarray, np.ndarray],
    rng: np.random.Generator,
) -> Atoms | None:
    """Draw one near-equilibrium geometry, or None if it cannot be used."""
    stiffness, vectors = modes
    energy = rng.uniform(0, THERMAL_LIMIT) * KCAL_PER_MOL
    direction = rng.standard_normal(6)
    direction /= np.linalg.norm(direction)
    displacement = (np.sqrt(2 * energy / stiffness) * direction) @ vectors
    atoms = store.label(minimum + displacement.reshape(4, 3))
    if atoms is None or not 0 <= kcal(atoms) <= THERMAL_LIMIT:
        return None
    atoms.info["kind"] = "thermal"
    return atoms


def distorted_geometry(
    store: LabelStore,
    minimum: np.ndarray,
    kind: str,
    target: float,
    rng: np.random.Generator,
    tries: int = 6,
) -> Atoms | None:
    """Draw one geometry of `kind` with an energy near `target` (kcal/mol), or None.

    With energy(a) - energy(0) nearly proportional to a^2, each new amplitude is
    a * sqrt((target - energy(0)) / (energy(a) - energy(0))).
    """
    path = DISTORTIONS[kind](minimum, rng)
    undistorted = store.label(path(0.0)) if kind == "inversion" else None
    offset = kcal(undistorted) if undistorted is not None else 0.0
    if target - offset < 0.5:
        return None
    amplitude = np.sqrt((target - offset) / 20.0)
    for _ in range(tries):
        positions = path(amplitude)
        if _closest(positions) < CLOSEST:
            return None
        atoms = store.label(positions)
        if atoms is None:
            return None
        energy = kcal(atoms)
        if abs(energy - target) < TARGET_TOLERANCE and OOD_RANGE[0] <= energy <= OOD_RANGE[1]:
            atoms.info["kind"] = kind
            return atoms
        ratio = (target - offset) / max(energy - offset, 1.0)
        amplitude *= np.sqrt(np.clip(ratio, 0.25, 4.0))
    return None


def _closest(positions: np.ndarray) -> float:
    return Atoms("NH3", positions=positions).get_all_distances()[np.triu_indices(4, 1)].min()


def thermal_set(store, minimum, modes, size: int, stream: int, accepted: list[Atoms], seed: int):
    """Add `size` new thermal geometries to `accepted`."""
    frames: list[Atoms] = []
    for attempt in range(100 * size):
        rng = np.random.default_rng([seed, stream, attempt])
        atoms = thermal_geometry(store, minimum, modes, rng)
        if atoms is not None and is_new(atoms, accepted):
            frames.append(atoms)
            accepted.append(atoms)
            print(f"thermal {len(frames)}/{size}: {kcal(atoms):.2f} kcal/mol", flush=True)
        if len(frames) == size:
            return frames
    raise InputError(f"only {len(frames)} of {size} distinct thermal geometries were found")


def ood_set(store, minimum, size: int, stream: int, accepted: list[Atoms], seed: int):
    """Add `size` new distorted geometries at evenly spaced energies."""
    low, high = OOD_RANGE
    targets = low + (high - low) * (np.arange(size) + 0.5) / size
    kinds = list(DISTORTIONS)
    frames: list[Atoms] = []
    for index, target in enumerate(targets):
        for attempt in range(100):
            # A kind that cannot reach this energy gives way to the next after ten draws.
            kind = kinds[(index + attempt // 10) % len(kinds)]
            rng = np.random.default_rng([seed, stream, index, attempt])
            atoms = distorted_geometry(store, minimum, kind, float(target), rng)
            if atoms is not None and is_new(atoms, accepted):
                break
        else:
            raise InputError(f"no geometry found near {target:.1f} kcal/mol")
        frames.append(atoms)
        accepted.append(atoms)
        print(f"{kind} {len(frames)}/{size}: {kcal(atoms):.2f} kcal/mol", flush=True)
    order = np.random.default_rng([seed, stream]).permutation(size)
    return [frames[i] for i in order]


def main() -> None:
    """Run the recipe and write the three files."""
    parser = argparse.ArgumentParser(description="Make the shipped NH3 data set.")
    parser.add_argument("--work", type=Path, default=Path("nh3_labels.jsonl"))
    parser.add_argument("--out", type=Path, default=FILES)
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()

    store = LabelStore(options.work)
    minimum = optimise(store)
    lowest = store.label(minimum)
    if lowest is None:
        raise InputError("the SCF did not converge at the minimum")
    total = lowest.get_potential_energy() + ammonia.MINIMUM_ENERGY
    print(f"minimum: {total:.8f} eV, relative {lowest.get_potential_energy():.2e} eV")
    print(f"N-H, H-H (A): {fingerprint(lowest)}", flush=True)
    if abs(lowest.get_potential_energy()) > 1e-5:
        raise InputError(f"set MINIMUM_ENERGY in blips.data.ammonia to {total:.8f}, then run again")

    modes = vibrations(store, minimum)
    accepted: list[Atoms] = []
    for stream, split in enumerate(("train", "valid")):
        frames = thermal_set(store, minimum, modes, COUNTS[split], stream, accepted, options.seed)
        ase.io.write(options.out / f"nh3_{split}.extxyz", frames)
    frames = ood_set(store, minimum, COUNTS["test_ood"], 2, accepted, options.seed)
    ase.io.write(options.out / "nh3_test_ood.extxyz", frames)
    print(f"done: {len(store.known)} labels")


if __name__ == "__main__":
    main()
