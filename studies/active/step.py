"""What does a closed-form step of the mean gain between trainings?

    python -m studies.active.step runs/active/default/*/campaign --output results/active/step.json

For every round of finished campaigns: the test force MAE of the model that asked for a batch, of
the same model with its mean moved by the labels of that batch,

    v = Lambda^-1 B^T (B Lambda^-1 B^T + c s^2 I)^-1 (label - mean),        F -> F + B_test v

and of the model that was trained again on all labels. B are all rows of the batch (16 random sums
where it has more than 100 force components a structure). c is the power of ten with the smallest
force error on each structure of the batch by the step from all others (closed form); no step where
none is better than the model.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms

from blips.active.evidence import labelled_rows
from blips.active.store import CampaignStore
from blips.active.training import model_file
from blips.data.structures import read_structures
from blips.inference.sampling import Member
from blips.potential import BayesianPotential
from blips.train.released import load_once

NOISES = 10.0 ** np.arange(-1, 6)  # c


def step(potential: BayesianPotential, labelled: Sequence[Atoms]) -> torch.Tensor | None:
    """Return the noise v of the weights that labels call for; None where no step is better."""
    most = 3 * max(len(atoms) for atoms in labelled)
    rows, residuals = labelled_rows(potential, labelled, rows=most if most <= 100 else 16)
    posterior = potential.conditioned()
    if posterior.spectrum is None:
        raise SystemExit("this model has no posterior in closed form")
    size = rows.shape[1]
    white, left = rows.reshape(-1, rows.shape[2]), residuals.ravel()
    values, vectors = np.linalg.eigh(white @ white.T)
    best, weights = float(np.abs(residuals[:, 1:]).mean()), None
    for noise in NOISES:
        inverse = (vectors / (values.clip(0.0) + noise)) @ vectors.T
        found = inverse @ left
        own = [slice(k * size, (k + 1) * size) for k in range(len(labelled))]
        without = [np.linalg.solve(inverse[k, k], found[k])[1:] for k in own]
        error = float(np.abs(without).mean())
        if error < best:
            best, weights = error, found
    if weights is None:
        return None
    ratio = posterior.scale.ratio
    along = torch.as_tensor(white.T @ weights) / ratio**0.5
    return posterior.spectrum.draws(along[None], ratio)[0]


def rounds(folder: Path) -> list[dict[str, Any]]:
    """Compare the errors (eV/A) before a batch, after the step and after training, by round."""
    test, found = read_structures(folder.parent / "test.extxyz"), []
    forces = np.concatenate([atoms.get_forces() for atoms in test])
    with CampaignStore(folder, writable=False) as store:
        for round in range(1, store.last_round()):
            before, after = (store.read("evaluate", round + k) for k in (0, 1))
            potential = load_once(model_file(store, round))
            known = len(store.labelled(before=round))
            begun = time.process_time()
            noise = step(potential, store.labelled(before=round + 1)[known:])
            seconds, moved = time.process_time() - begun, before["force_mae"]
            if noise is not None:
                predicted = Member(potential, noise).predict(test).array("forces")
                moved = float(np.abs(predicted - forces).mean())
            errors = {"before": before["force_mae"], "step": moved, "trained": after["force_mae"]}
            found.append({"labels": known, **errors, "processor_seconds": seconds})
    return found


def main() -> None:
    """Print and write the errors of all campaigns, and their geometric means by pool."""
    parser = argparse.ArgumentParser(description="A closed-form step of the mean.")
    parser.add_argument("campaigns", type=Path, nargs="+")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {folder.parent.name.rsplit("-", 1)[0]: rounds(folder) for folder in options.campaigns}
    for pool in dict.fromkeys(name.split("-")[0] for name in result):
        own = [row for name, rows in result.items() if name.startswith(pool) for row in rows]
        log = {k: np.mean([np.log(r[k] / r["before"]) for r in own]) for k in ("step", "trained")}
        print(pool, len(own), {name: round(float(np.exp(mean)), 2) for name, mean in log.items()})
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
