"""The model of a round: trained on all labels so far, and judged."""

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np
from ase import Atoms

from blips.active.config import CampaignConfig
from blips.active.database import CampaignError
from blips.active.select import Model
from blips.active.store import CampaignStore
from blips.active.worker import file_digest, model_of
from blips.data.structures import read_structures
from blips.potential import BayesianPotential
from blips.train.checkpoint import save
from blips.train.command import build_model
from blips.train.fit import fit
from blips.uq.assess import References, assess


def train_round(store: CampaignStore, config: CampaignConfig, round: int) -> dict[str, Any]:
    """Train on the labels of earlier rounds; an interrupted training goes on."""
    structures = store.labelled(before=round)
    folder = store.folder / "models" / f"round-{round:04d}"
    model = build_model(config.model, config.seed)
    if not isinstance(model, BayesianPotential):
        raise CampaignError("a campaign needs a Bayesian potential; see model.bayes")
    if config.retrain == "continue" and round > 1:
        before = finished_model(store, round - 1)
        model.load_state_dict(model_of(before.job()).state_dict())
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
        folder=folder,
        resume=True,
        display=False,
    )
    path = save(model, folder / "model.safetensors")
    return {
        "model": str(path.relative_to(store.folder)),
        "digest": file_digest(path),
        "labels": len(structures),
        "best_epoch": result.progress.best_epoch,
        "valid_loss": result.progress.best_loss,
    }


def trained(store: CampaignStore, round: int) -> Model | None:
    """Return the model of a round if its training is finished and its file unchanged."""
    result = store.stage(round, "train")
    if result is None:
        return None
    path = store.folder / result["model"]
    if not path.is_file() or file_digest(path) != result["digest"]:
        return None
    return Model(str(path.absolute()), result["digest"])


def finished_model(store: CampaignStore, round: int) -> Model:
    """Return the model of a round; an error where it is not there."""
    model = trained(store, round)
    if model is None:
        raise CampaignError(f"the model of round {round} vanished; start the campaign again")
    return model


def evaluate_round(model: Model, config: CampaignConfig) -> dict[str, Any]:
    """Evaluate errors and uncertainties on the labelled test structures, if there are any."""
    if config.evaluate.structures is None:
        return {}
    structures = read_structures(config.evaluate.structures)
    return errors_on(model_of(model.job()), structures, config.select.samples, config.seed)


def errors_on(
    potential: BayesianPotential, structures: list[Atoms], samples: int, seed: int
) -> dict[str, Any]:
    """Compute the MAE of energies (per atom) and forces, their std, and the rank correlation.

    `ratios` are the force MAE of each structure over its mean force std, for `force_mae_bound`.
    """
    found = potential.predict(structures, samples=samples, seed=seed)
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
        error, std = np.abs(found.forces - references.forces), found.array("forces_total_std")
        ratios = sorted(
            (np.bincount(owner, error.sum(1)) / np.bincount(owner, std.sum(1))).tolist()
        )
    return {"structures": len(structures), **errors, "ratios": ratios}


def force_mae_bound(ratios: Sequence[float], mean_std: float, confidence: float) -> float | None:
    """Bound the force MAE on candidates by split conformal prediction, eV/A.

    The error of a new structure is below q times its std with the stated confidence, q the
    ceil((n + 1) confidence)-th of the n ratios of error and std that the last labels showed. These
    were chosen because their std was large, so ratios are carried over, not errors.

    Args:
        ratios: of the labels of the last round, ascending, by the model that had not seen them.
        mean_std: mean force std of the candidates by the model of now, eV/A.
        confidence: None is returned where the labels are too few for it (9 give 90 %).
    """
    place = ceil((len(ratios) + 1) * confidence)
    return ratios[place - 1] * mean_std if place <= len(ratios) else None
