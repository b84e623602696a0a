"""Energies of a released model beside labels whose energies per element are others.

Per atom, with x the composition (shares of the elements, summing to 1), the labels of validation
structures give a Bayesian linear regression of what the model leaves:

    (E_label - E_model) / N = x . c + noise,    c ~ N(0, tau^2 I),   noise ~ N(0, s^2),

tau and s by their evidence. For another structure x . c is added to the energy per atom, x^T Cov x
to its variance, and s^2, the misfit, where wanted.
"""

from dataclasses import dataclass

import numpy as np
from ase import Atoms
from scipy.stats import norm, spearmanr
from sklearn.linear_model import BayesianRidge

from blips.potential import BayesianPotential
from blips.prediction import Prediction

ELEMENTS = 119


@dataclass(frozen=True)
class ElementShift:
    """Energy per atom that labels have beyond the model's, by composition; eV."""

    fit: BayesianRidge

    @classmethod
    def of(cls, potential: BayesianPotential, structures: list[Atoms]) -> "ElementShift":
        """Fit to what the model leaves of the labels of these structures."""
        energy = potential.predict(structures, method="map", forces=False, batch_size=1).energy
        rest = (_labels(structures) - energy) / _sizes(structures)
        return cls(BayesianRidge(fit_intercept=False).fit(compositions(structures), rest))

    @property
    def misfit(self) -> float:
        """Deviation of what is left, s; eV an atom."""
        return float(self.fit.alpha_**-0.5)

    def mean_and_std(self, structures: list[Atoms]) -> tuple[np.ndarray, np.ndarray]:
        """Shift x . c [S] and the root of x^T Cov x [S], eV an atom."""
        x = compositions(structures)
        variance = np.einsum("si,ij,sj->s", x, self.fit.sigma_, x)
        return x @ self.fit.coef_, np.sqrt(np.maximum(variance, 0.0))


def compositions(structures: list[Atoms]) -> np.ndarray:
    """Shares of the elements, [S, ELEMENTS]."""
    counts = [np.bincount(atoms.numbers, minlength=ELEMENTS) / len(atoms) for atoms in structures]
    return np.array(counts)


def measure_energies(
    prediction: Prediction, structures: list[Atoms], shift: ElementShift
) -> dict[str, dict[str, float]]:
    """MAE, coverage of the 90 % interval and rank correlation of energies per atom."""
    sizes = _sizes(structures)
    error = (_labels(structures) - prediction.array("energy")) / sizes
    std = prediction.array("energy_total_std") / sizes
    offset, offset_std = shift.mean_and_std(structures)
    moved, moved_std = error - offset, np.hypot(std, offset_std)
    found = {
        "E MAE": np.abs(moved).mean(),
        "E within 90 %": _covered(moved, moved_std),
        "E within 90 %, with misfit": _covered(moved, np.hypot(moved_std, shift.misfit)),
        "rho E": np.asarray(spearmanr(moved_std, np.abs(moved)))[0],
        "E MAE, no shift": np.abs(error).mean(),
        "E within 90 %, no shift": _covered(error, std),
    }
    return {name: {"value": float(value)} for name, value in found.items()}


def _covered(error: np.ndarray, std: np.ndarray) -> float:
    return float((np.abs(error) < norm.ppf(0.95) * std).mean())


def _sizes(structures: list[Atoms]) -> np.ndarray:
    return np.array([len(atoms) for atoms in structures])


def _labels(structures: list[Atoms]) -> np.ndarray:
    return np.array([atoms.get_potential_energy() for atoms in structures])
