"""The barrier of acetylacetone's dihedral angle: a small PaiNN against DFT.

Trained on molecular dynamics at 300 K, which never crosses the barrier; the scan of the angle
(energies only) is far from its data beyond the first few degrees.
"""

from typing import Any

import numpy as np
import torch

import blips
from blips.backbones import PaiNN
from blips.properties import barrier
from studies.errorbars.data import evenly, read_public
from studies.spec import Findings, Run

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


def scan(run: Run) -> Findings:
    """Train, condition, and compare barrier and profile with those of DFT."""
    settings = run.spec.settings
    torch.manual_seed(run.spec.seed)
    frames = evenly(read_public("acac/train_300K.xyz"), settings["structures"])
    fifth = len(frames) // 5
    potential = blips.bayesianize(PaiNN(**settings["hyperparameters"]))
    blips.fit(
        potential,
        [frame for i, frame in enumerate(frames) if i % 5],
        valid=[frames[5 * i] for i in range(fifth)],
        config={"training": settings["training"], "seed": run.spec.seed},
        folder=run.folder / "training",
        display=False,
    )
    path = read_public("acac/test_dihedral.xyz")
    known = np.array([frame.get_potential_energy() for frame in path])
    found = barrier(potential, path, band=False, members=settings["members"])
    top = int(known.argmax())
    profile = found.details["energies"] - found.details["energies"][0]
    members = found.details["member_energies"]
    alone = np.sqrt(np.square(members - found.details["energies"]).mean(axis=0))
    changes = members - members[:, :1] - profile
    std = np.sqrt(np.square(changes).mean(axis=0))
    error = profile - (known - known[0])
    z = np.abs(error[1:]) / std[1:]
    metrics = {
        "barrier": found["barrier"].value,
        "barrier_std": found["barrier"].std,
        "barrier_known": float(known.max() - known[0]),
        "reaction_energy": found["reaction_energy"].value,
        "reaction_energy_std": found["reaction_energy"].std,
        "reaction_energy_known": float(known[-1] - known[0]),
        "profile_mae": float(np.abs(error).mean()),
        "profile_coverage68": float((z < 0.994).mean()),
        "profile_coverage90": float((z < 1.645).mean()),
        "std_as_if_independent": float(np.hypot(alone[top], alone[0])),
    }
    rows = np.stack([known - known[0], profile, std], axis=1).tolist()
    named = {key: {"value": float(v), "low": None, "high": None} for key, v in metrics.items()}
    return Findings(named, {"profile": rows})
