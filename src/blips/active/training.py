"""The model of a round: trained on all labels so far, and judged."""

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms

from blips.active.config import CampaignConfig
from blips.active.store import CampaignStore
from blips.potential import BayesianPotential
from blips.train.checkpoint import save
from blips.train.fit import fit
from blips.train.released import build_model, load_once
from blips.uq.assess import References, assess


def model_file(store: CampaignStore, round: int) -> Path:
    """Name the file of a round's model."""
    return store.folder.absolute() / "models" / f"round-{round:04d}" / "model.safetensors"


def train_round(store: CampaignStore, config: CampaignConfig, round: int) -> None:
    """Train on the labels of earlier rounds; an interrupted training goes on."""
    structures, path = store.labelled(before=round), model_file(store, round)
    model: Any = build_model(config.model, config.seed)  # Bayesian, or the configuration is refused
    if config.retrain == "continue" and round > 1:
        model.load_state_dict(load_once(model_file(store, round - 1)).state_dict())
    result = fit(
        model,
        structures,
        valid=max(config.valid, 1.0 / len(structures)),  # one at least
        config={
            "model": config.model.model_dump(mode="json"),
            "training": config.training.model_dump(mode="json"),
            "data": {"reference_energies": config.reference_energies},
            "seed": config.seed,
        },
        folder=path.parent,
        resume=True,
        display=False,
    )
    save(model, path)
    trained = {
        "model": str(path.relative_to(store.folder.absolute())),
        "labels": len(structures),
        "best_epoch": result.progress.best_epoch,
        "valid_loss": result.progress.best_loss,
    }
    store.write("train", trained, round)


def errors_on(
    potential: BayesianPotential, structures: list[Atoms], config: CampaignConfig
) -> dict[str, Any]:
    """Compute the MAE of energies (per atom) and forces, their std, and the rank correlation.

    `ratios` are the force MAE of each structure over its mean force std, for `force_mae_bound`.
    """
    found = potential.predict(structures, samples=config.select.samples, seed=config.seed)
    references = References.of(structures)
    judged = assess(found, references, n_bootstrap=0)
    wanted = {
        "energy_mae": judged.energy_per_atom.get("mae"),
        "force_mae": judged.forces.get("mae"),
        "force_rmse": judged.forces.get("rmse"),
        "force_std": judged.forces.get("rms_std"),
        "force_rank_correlation": judged.forces_per_atom.get("spearman"),
    }
    errors = {name: found.value for name, found in wanted.items() if found is not None}
    ratios: list[float] = []
    if references.forces is not None:
        owner = np.repeat(np.arange(len(structures)), references.n_atoms)
        both = np.abs(found.forces - references.forces), found.array("forces_total_std")
        error, std = (np.bincount(owner, part.sum(1)) for part in both)
        ratios = sorted((error / std).tolist())
    return {"structures": len(structures), **errors, "ratios": ratios}


def force_mae_bound(ratios: Sequence[float], mean_std: float, confidence: float) -> float | None:
    """Bound the force MAE on candidates by split conformal prediction, eV/A.

    The error of a new structure is below q times its std (`mean_std`, eV/A) with the stated
    confidence, q the ceil((n + 1) confidence)-th of the n ratios of error and std, ascending, that
    the last labels showed; None where these are too few (9 give 90 %). They were chosen because
    their std was large, so ratios are carried over, not errors.
    """
    place = ceil((len(ratios) + 1) * confidence)
    return ratios[place - 1] * mean_std if place <= len(ratios) else None
