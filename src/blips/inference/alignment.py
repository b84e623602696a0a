r"""Energies per element that make a model's energies comparable with labels, and what is unsure.

Total energies of two levels of theory differ mostly by a constant for each element, which no force
depends on. With c_sz atoms of element z in structure s, n_s atoms in all, and a model's energies
E_s of variance q_s,

    y_s - E_s = c_s . delta + e_s,   e_s ~ N(0, q_s + (sigma n_s)^2),   delta_z ~ N(0, tau^2)

so the prior leaves the released energies as they are where labels say nothing. For one tau and
sigma, V = diag(q_s + (sigma n_s)^2) and A = C^T V^-1 C, the posterior of delta is

    N( S C^T V^-1 (y - E),  S ),   S = (A + I / tau^2)^-1

tau and sigma are averaged over a grid, weighted by their marginal likelihood: where elements are
many and structures few, nothing else tells misfit and shifts apart. The shift becomes part of the
model; the energy of a structure with composition c and n atoms has the variance c^T S c and the
misfit (sigma n)^2 on top of the model's own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.data import chemical_symbols
from torch import Tensor

from blips.data.graph import AtomGraph, Graph
from blips.errors import CheckpointError, InputError
from blips.prediction import Prediction

NUM_ELEMENTS = len(chemical_symbols)  # 0 ("X") to 118
LEAST_MISFIT = 1e-4  # eV/atom: no model is right to better
STEP = 0.25  # of the grids, in powers of ten

Array = np.ndarray


@dataclass(frozen=True)
class Alignment:
    """Shifts of the elements' energies, and their covariance."""

    shift: Array  # mean of delta, [119] eV; zero for elements without labels
    cov: Array  # S, [119, 119] eV^2
    misfit: float  # sigma, eV/atom
    structures: int  # that are labelled
    numbers: tuple[int, ...]  # atomic numbers of their elements

    def widened(self, prediction: Prediction, counts: Array) -> Prediction:
        """Add what is unsure about the shifts, and the misfit, to deviations of energies.

        `counts` are the atoms of each element in the structures, [S, 119].
        """
        if prediction.energy_std is None:
            return prediction
        unsure = np.sqrt(np.einsum("sz,zy,sy->s", counts, self.cov, counts))
        misfit = self.misfit * prediction.n_atoms
        before = prediction.energy_aleatoric_std
        return replace(
            prediction,
            energy_std=np.hypot(prediction.energy_std, unsure),
            energy_aleatoric_std=misfit if before is None else np.hypot(before, misfit),
        )

    def by_number(self) -> dict[int, float]:
        """Return the shift of each labelled element, eV by atomic number."""
        return {z: float(self.shift[z]) for z in self.numbers}

    def __str__(self) -> str:
        """Summarise in one line."""
        std = {chemical_symbols[z]: float(self.cov[z, z] ** 0.5) for z in self.numbers}
        worst = max(std, key=lambda symbol: std[symbol])
        return (
            f"energies of {len(std)} elements fitted to {self.structures} structures, each known "
            f"to ±{1000 * np.median(list(std.values())):.0f} meV (median), {worst} to "
            f"±{1000 * std[worst]:.0f} meV; misfit {1000 * self.misfit:.0f} meV/atom"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the tensors, JSON-able."""
        return {"misfit": self.misfit, "structures": self.structures, "numbers": [*self.numbers]}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors, by name."""
        return {"shift": torch.as_tensor(self.shift), "cov": torch.as_tensor(self.cov)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> "Alignment":
        """Restore what `to_dict` and `tensors` returned."""
        shift, cov = tensors["shift"].numpy(), tensors["cov"].numpy()
        if shift.shape != (NUM_ELEMENTS,) or cov.shape != (NUM_ELEMENTS, NUM_ELEMENTS):
            raise CheckpointError(f"an alignment of {len(shift)} elements, not {NUM_ELEMENTS}")
        return cls(shift, cov, **{**content, "numbers": tuple(content["numbers"])})


def fit_alignment(counts: Array, rest: Array, var: Array | None = None) -> Alignment:
    """Fit the posterior of the shifts, averaged over tau and sigma.

    `counts` are C, atoms of each element, [S, 119]; `rest` y - E, labels without the model's
    energies, [S] eV; `var` q, variances of the model's energies, [S] eV^2 (None for zero).
    """
    present = np.flatnonzero(counts.any(axis=0))
    c, n = counts[:, present].astype(float), counts.sum(axis=1)
    size = max(float(np.sqrt(np.mean((rest / n) ** 2))), LEAST_MISFIT)
    highest = np.log10(size / LEAST_MISFIT) + 0.5
    misfits = LEAST_MISFIT * 10.0 ** np.arange(0.0, highest + STEP / 2, STEP)
    tau_squares = (size * 10.0 ** np.arange(-2.0, 1.0 + STEP / 2, STEP)) ** 2  # [T]
    fits = []
    for misfit in misfits:
        v = (0.0 if var is None else var) + (misfit * n) ** 2
        a, q = np.linalg.eigh((c.T / v) @ c)  # A = q a q^T
        b = q.T @ (c.T @ (rest / v))
        fixed = -0.5 * (np.log(v).sum() + (rest**2 / v).sum())
        for tau2 in tau_squares:
            gain = tau2 / (1.0 + tau2 * np.maximum(a, 0.0))
            log = 0.5 * (np.log(gain / tau2).sum() + (gain * b**2).sum())
            fits.append((fixed + log, q @ (gain * b), (q * gain) @ q.T, tau2, misfit**2))
    logs, means, covs, tau2s, sigma2s = (np.array(each) for each in zip(*fits, strict=True))
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    mean = weights @ means
    away = means - mean
    cov = np.einsum("g,gij->ij", weights, covs) + (away.T * weights) @ away
    shift, whole = np.zeros(NUM_ELEMENTS), np.eye(NUM_ELEMENTS) * float(weights @ tau2s)
    shift[present] = mean
    whole[np.ix_(present, present)] = cov
    misfit = float(np.sqrt(weights @ sigma2s))
    return Alignment(shift, whole, misfit, len(rest), tuple(present.tolist()))


def element_counts(structures: Iterable[Atoms] | Graph) -> np.ndarray:
    """Count the atoms of each element in each structure, [S, 119]."""
    if not isinstance(structures, Graph):
        return np.array([np.bincount(a.numbers, minlength=NUM_ELEMENTS) for a in structures])
    if not isinstance(structures, AtomGraph):
        raise InputError(f"elements need atoms, not a {type(structures).__name__}")
    each = torch.nn.functional.one_hot(structures.numbers, NUM_ELEMENTS)  # [N, 119]
    return structures.sum_over_structures(each).numpy(force=True)
