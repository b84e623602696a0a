"""Sigmas of many samples as a reference, one file for each structure, and how sure they are.

The samples of a structure are drawn as two halves with seeds of their own. Together they are the
reference; compared with each other they say how well it can be met at all. If two runs of K/2
samples have a rank correlation of r, two runs of K have about 2r / (1 + r) (Spearman and Brown),
and a method without noise of its own, right in everything else, reaches the root of that.

This takes errors of structures for independent. They are not: all structures have the same seeds,
so that errors of similar structures are alike. Where sigmas hardly differ, the agreement of two
halves, and with it that ceiling, is as much chance as what the reference says of their order.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ase import Atoms

from blips.experiments.fast_data import Case
from blips.potential import BayesianPotential
from blips.prediction import Prediction

SEEDS = (2, 3)
NAMES = ("energy", "energy_std", "forces", "forces_std")


class Reference(NamedTuple):
    """Two halves of the samples of some structures, and all of them."""

    halves: tuple[Prediction, Prediction]
    whole: Prediction

    @classmethod
    def of(cls, first: Prediction, second: Prediction) -> "Reference":
        """Moments of both halves together; they are of equal size."""
        arrays: dict[str, Any] = {}
        half = first.samples
        for name in ("energy", "forces"):
            a, b = (one.array(name) for one in (first, second))
            var_a, var_b = (one.array(f"{name}_std") ** 2 for one in (first, second))
            squares = (half - 1) * (var_a + var_b) + 0.5 * half * np.square(a - b)
            arrays[name] = 0.5 * (a + b)
            arrays[f"{name}_std"] = np.sqrt(squares / (2 * half - 1))
        whole = Prediction(n_atoms=first.n_atoms, method="mc", samples=2 * half, **arrays)
        return cls((first, second), whole)


def reference(
    potential: BayesianPotential, cases: Sequence[Case], samples: int, folder: Path
) -> Reference:
    """Samples of every structure; those that `folder` has are not drawn again."""
    found = [_halves(potential, case, samples, folder) for case in cases]
    first, second = (Prediction.join(parts) for parts in zip(*found, strict=True))
    return Reference.of(first, second)


def _halves(
    potential: BayesianPotential, case: Case, samples: int, folder: Path
) -> list[Prediction]:
    path = folder / f"{case.kind}-{case.number}-{samples}.npz"
    if not path.exists():
        drawn = [alone(potential, case.atoms, samples=samples // 2, seed=seed) for seed in SEEDS]
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {f"{k}{name}": one.array(name) for k, one in enumerate(drawn) for name in NAMES}
        partial = path.with_suffix(".part.npz")
        np.savez(partial, positions=case.atoms.positions, **arrays)  # pyright: ignore
        partial.replace(path)
    with np.load(path) as saved:
        if not np.allclose(saved["positions"], case.atoms.positions):
            path.unlink()  # of another structure
            return _halves(potential, case, samples, folder)
        n_atoms = np.array([len(case.atoms)])
        return [
            Prediction(
                n_atoms=n_atoms,
                method="mc",
                samples=samples // 2,
                **{name: saved[f"{k}{name}"] for name in NAMES},
            )
            for k in range(len(SEEDS))
        ]


def alone(potential: BayesianPotential, atoms: Atoms, **options: Any) -> Prediction:
    """Prediction of one structure by itself, without calibration."""
    return potential.predict(atoms, calibrated=False, **{"method": "mc", **options})


def each(potential: BayesianPotential, cases: Sequence[Case], **options: Any) -> Prediction:
    """Every structure by itself, so that models may mix molecules and cells."""
    return Prediction.join([alone(potential, case.atoms, **options) for case in cases])


def ceiling(rho_of_halves: float) -> float:
    """Best rank correlation that a method without noise can have with the whole."""
    reliability = 2 * rho_of_halves / (1 + rho_of_halves) if rho_of_halves > 0 else 0.0
    return float(np.sqrt(reliability))
