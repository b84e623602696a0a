"""Error bars for a model that is left as it is.

The weights are not touched: an inference network learns, from a handful of labelled structures,
how wide their posterior has to be for the errors that the model makes. Forces with posterior means
as weights stay those of the model, to the bit; energies move by a constant for each element.
"""

import tempfile
from collections.abc import Sequence
from typing import Any

from ase import Atoms

from blips.backbones.base import Backbone
from blips.conversion import bayesianize
from blips.data.labels import Labels
from blips.data.splits import random_split
from blips.errors import InputError
from blips.potential import BayesianPotential
from blips.train.fit import fit
from blips.train.references import align as align_energies
from blips.uq.assess import References, recalibrate

FITTED_FRACTION = 0.6
TRAINING: dict[str, Any] = {
    "loss": "crps",
    "samples": 4,
    "kl_weight": 1e-4,
    "energy_per_atom": True,
    "weights": {"energy": 1.0, "forces": 1.0},
    "batch_size": 4,
    "lr": 1e-3,
    "clip_norm": 1.0,
    "schedule": {"kind": "constant"},
    "freeze_backbone": True,
    "noise": True,
    "condition": False,
    "tensorboard": False,
}


def uncertainty_for(
    model: Backbone | BayesianPotential,
    structures: Sequence[Atoms],
    *,
    epochs: int = 30,
    labels: Labels | None = None,
    align: bool = True,
    samples: int = 64,
    seed: int = 0,
    display: bool = False,
    **calibration: Any,
) -> BayesianPotential:
    """Give a trained model error bars, from a few labelled structures and without training it.

    The inference network is fitted to 60 % of the structures (CRPS of samples); the others choose
    the best epoch and set the scale of the error bars (`blips.uq.assess.recalibrate`).

    Args:
        model: what `blips.backbones.load` gives, or another trained model; a plain one is
            converted in place, with the defaults of `bayesianize` for released weights.
        structures: labelled, at least three.
        epochs: of the inference network.
        labels: names and units of the labels.
        align: fit energies per element to the same 60 %, as levels of theory differ by them; the
            model keeps them, and its error bars of energies count how well they are known.
        samples: of the posterior, for the calibration.
        seed: of the split, the inference network and its training.
        display: show progress.
        calibration: kind and say of `recalibrate`.
    """
    if len(structures) < 3:
        raise InputError(f"{len(structures)} structures cannot be split; label at least three")
    has = References.of(structures, labels)
    quantities = [name for name in ("energy", "forces") if has.having(name).all()]
    if not quantities:
        raise InputError("no label is there for all structures; drop those without")
    if isinstance(model, Backbone):
        model.pretrained = True
        model = bayesianize(model, seed=seed)
    model.posterior = None  # error bars are those of the inference network
    split = random_split(len(structures), [FITTED_FRACTION, 1.0 - FITTED_FRACTION], seed)
    fitted, rest = ([structures[i] for i in part] for part in (split.train, split.valid))
    if align and "energy" in quantities:
        align_energies(model, fitted, labels)
    weights = {name: w if name in quantities else 0.0 for name, w in TRAINING["weights"].items()}
    dtype = str(next(model.backbone.parameters()).dtype).removeprefix("torch.")
    settings = {**TRAINING, "weights": weights, "dtype": dtype, "epochs": epochs}
    config = {"training": settings, "data": {"labels": vars(labels or Labels())}, "seed": seed}
    with tempfile.TemporaryDirectory() as folder:
        fit(model, fitted, valid=rest, config=config, folder=folder, display=display)
    recalibrate(model, rest, labels=labels, samples=samples, seed=seed, **calibration)
    return model
