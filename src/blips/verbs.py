"""Judge a potential on labelled structures, and fit its error bars to them.

    blips.evaluate(potential, "test.extxyz")        every metric, with bootstrap intervals
    blips.calibrate(potential, "held-out.extxyz")   store a calibration with the potential

Both take whatever has `predict` and `calibration`: Bayesian potentials and the baselines.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ase import Atoms

from blips.data.labels import Labels
from blips.data.structures import check_structures, read_structures
from blips.prediction import Calibrator, Model
from blips.progress import progress_shown
from blips.uq.assess import References, assess, recalibrate, stress_too
from blips.uq.evaluate import Evaluation

Structures = str | Path | Sequence[Atoms]


def evaluate(
    potential: Model,
    structures: Structures,
    *,
    labels: Labels | None = None,
    n_bootstrap: int = 1000,
    **options: Any,
) -> Evaluation:
    """Compare predictions with labels: every metric that these allow.

    Args:
        potential: with error bars or without.
        structures: labelled, or a file of such.
        labels: names and units of the labels; those that the model was trained with if not given.
        n_bootstrap: resamples for the intervals; 0 for none.
        options: of `potential.predict` (samples, method, seed, ...).
    """
    found = _structures(structures)
    references = References.of(found, labels or potential.backbone.labels)
    options = stress_too(found, references) | options
    with progress_shown():
        return assess(potential.predict(found, **options), references, n_bootstrap=n_bootstrap)


def calibrate(
    potential: Model,
    structures: Structures,
    *,
    kind: str = "scale",
    labels: Labels | None = None,
    **options: Any,
) -> dict[str, Calibrator]:
    """Fit a calibration of the error bars to labelled structures and store it with the potential.

    Args:
        potential: its `calibration` is replaced.
        structures: labelled, or a file of such; neither trained on nor tested on.
        kind: "scale" (one factor, NLL-optimal) or "conformal".
        labels: names and units of the labels; those that the model was trained with if not given.
        options: of `potential.predict` (samples, method, seed, ...).
    """
    labels = labels or potential.backbone.labels
    with progress_shown():
        return recalibrate(potential, _structures(structures), kind=kind, labels=labels, **options)


def _structures(structures: Structures) -> list[Atoms]:
    if isinstance(structures, str | Path):
        return check_structures(read_structures(structures), structures)
    return [structures] if isinstance(structures, Atoms) else list(structures)
