"""Energies along scans that leave the data: a small PaiNN against DFT.

| scan | trained on | path |
|---|---|---|
| acac | acetylacetone at 300 K | a dihedral angle is turned across its barrier |
| ethanol | ethanol at 500 K | a hydrogen is pulled off oxygen |

Differences of all pairs of energies along a path are judged in three ways: the std of members, who
know that errors of two energies are correlated; the same as if they were independent; and members
with the misfit of the forces along the path, see `blips.properties.barrier.misfit_along`.
"""

from typing import Any

import numpy as np
import torch
from ase import Atoms

import blips
from blips.backbones import PaiNN
from blips.properties import barrier
from blips.uq.metrics import coverage, ece, spearman
from studies.errorbars.data import evenly, read_public
from studies.spec import Findings, Run

SCANS = {
    "acac": ("acac/train_300K.xyz", "acac/test_dihedral.xyz"),
    "ethanol": ("ethanol/train.xyz", "ethanol/test_H_removal.xyz"),
}
SETTINGS: dict[str, Any] = {
    "hyperparameters": {"cutoff": 5.0, "features": 32, "blocks": 2},
    "structures": 300,
    "training": {
        "epochs": 60,
        "batch_size": 8,
        "lr": 2e-3,
        "loss": "mae",
        "schedule": {"kind": "cosine"},
        "threads": 1,
        "tensorboard": False,
    },
    "members": 64,
}
LEAST = 1e-3  # eV, of a std: beyond the cutoff the model's energies do not change at all
Array = np.ndarray


def scan(run: Run) -> Findings:
    """Train, condition, and compare barrier and differences along the path with those of DFT."""
    settings = run.spec.settings
    torch.manual_seed(run.spec.seed)
    data, path = (read_public(file) for file in SCANS[settings["scan"]])
    potential = blips.bayesianize(PaiNN(**settings["hyperparameters"]))
    frames = evenly(data, settings["structures"])
    blips.fit(
        potential,
        [frame for i, frame in enumerate(frames) if i % 5],
        valid=[frames[5 * i] for i in range(len(frames) // 5)],
        config={"training": settings["training"], "seed": run.spec.seed},
        folder=run.folder / "training",
        resume=True,
        display=False,
    )
    return _judged(potential, path, settings["members"])


def _judged(potential: blips.BayesianPotential, path: list[Atoms], members: int) -> Findings:
    known = np.array([frame.get_potential_energy() for frame in path])
    found = barrier(potential, path, band=False, members=members)
    energies, misfit = found.details["energies"], found.details["misfit_std"]
    changes = found.details["member_energies"] - energies  # [K, images]
    first, last = np.triu_indices(len(path), 1)

    def difference(values: Array) -> Array:
        return values[..., last] - values[..., first]

    alone = np.sqrt(np.square(changes).mean(axis=0))  # [images]
    together = np.sqrt(np.square(difference(changes)).mean(axis=0))  # [pairs]
    ways = {
        "differences": together,
        "differences_if_independent": np.hypot(alone[first], alone[last]),
        "differences_with_misfit": np.hypot(together, difference(misfit)),
    }
    truth, guess = difference(known), difference(energies)
    bottom = int(known.argmin())
    top = bottom + int(energies[bottom:].argmax())
    rise = changes[:, top] - changes[:, bottom]
    metrics = {
        "barrier": float(energies[top] - energies[bottom]),
        "barrier_std": float(np.sqrt(np.square(rise).mean())),
        "barrier_misfit_std": float(misfit[top] - misfit[bottom]),
        "barrier_known": float(known[bottom:].max() - known[bottom]),
    }
    for way, std in ways.items():
        std = np.maximum(std, LEAST)
        metrics[f"{way}_n"] = float(len(truth))
        metrics[f"{way}_mae"] = float(np.abs(guess - truth).mean())
        metrics[f"{way}_spearman"] = spearman(std, np.abs(guess - truth))
        metrics[f"{way}_ece"] = ece(guess, std, truth)
        for level in (0.68, 0.9):
            covered = coverage(guess, std, truth, level)
            metrics[f"{way}_coverage{round(100 * level)}"] = covered
    std = np.sqrt(np.square(changes - changes[:, :1]).mean(axis=0))
    rows = np.stack([known - known[0], energies - energies[0], std, misfit], axis=1).tolist()
    named = {key: {"value": float(v), "low": None, "high": None} for key, v in metrics.items()}
    return Findings(named, {"profile": rows})
