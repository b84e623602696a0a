"""Judge and recalibrate predictions on labelled structures; say it in words, tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.stress import full_3x3_to_voigt_6_stress
from rich.table import Table
from rich.text import Text

from blips.data.labels import QUANTITIES, Labels, available, extract
from blips.data.sanity import warn_of_labels
from blips.data.structures import Structures, iter_given
from blips.errors import InputError, refuse_unknown
from blips.prediction import Model, Prediction
from blips.progress import progress_shown
from blips.uq.bootstrap import Interval
from blips.uq.calibrate import CALIBRATORS, ScaleCalibrator
from blips.uq.checks import checked_array
from blips.uq.evaluate import Evaluation, Matched, Tables
from blips.uq.metrics import coverage
from blips.uq.plots import prediction_plots

STD_FLOOR = 1e-6  # eV, eV/A: symmetry can make a std zero, by which no metric can divide
WORDS = {"energy": "energies", "forces": "forces", "stress": "stresses"}


@dataclass(frozen=True)
class References:
    """Hold the labels of S structures with N atoms in all; NaN where a structure has none."""

    n_atoms: np.ndarray  # [S]
    numbers: np.ndarray  # [N]
    energy: np.ndarray | None  # [S] eV
    forces: np.ndarray | None  # [N, 3] eV/A
    stress: np.ndarray | None = None  # [S, 6] eV/A^3, ASE's order; where all are periodic

    @classmethod
    def of(
        cls, structures: Sequence[Atoms], labels: Labels | None = None, *, required: bool = True
    ) -> References:
        """Read the labels of structures; a quantity that none of them has is None.

        Where `required`, structures of which none has an energy or forces are refused.
        """
        if not structures:
            raise InputError("no structures to evaluate on; the list is empty")
        warn_of_labels(structures, labels)
        found = []
        for atoms in structures:
            unknown = {"energy": np.array(np.nan), "stress": np.full((3, 3), np.nan)}
            unknown["forces"] = np.full((len(atoms), 3), np.nan)
            found.append(unknown | extract(atoms, available(atoms, labels), labels))
        arrays = {
            "energy": np.array([values["energy"] for values in found]),
            "forces": np.concatenate([values["forces"] for values in found]),
            "stress": full_3x3_to_voigt_6_stress(np.array([values["stress"] for values in found])),
        }
        if not all(atoms.pbc.all() for atoms in structures):
            del arrays["stress"]  # there is none to predict
        known = {name: None if np.isnan(a).all() else a for name, a in arrays.items()}
        if required and known["energy"] is None and known["forces"] is None:
            raise InputError(
                "no structure has an energy or forces under the names of the labels; say which "
                "they are with --energy-key and --forces-key (labels=Labels(...) in Python)"
            )
        n_atoms = np.array([len(atoms) for atoms in structures])
        return cls(n_atoms, np.concatenate([atoms.numbers for atoms in structures]), **known)

    def match(self, prediction: Prediction, quantity: str) -> Matched | None:
        """Pair predictions with labels; None where there are no labels or no predictions."""
        found, target = prediction.results(), getattr(self, quantity)
        mean, std = found.get(quantity), found.get(f"{quantity}_uncertainty")
        if target is None or mean is None:
            return None
        if not np.array_equal(prediction.n_atoms, self.n_atoms):
            raise InputError("prediction and labels are not of the same structures in one order")
        if quantity == "stress":
            mean = full_3x3_to_voigt_6_stress(mean)
            std = None if std is None else full_3x3_to_voigt_6_stress(std)
        of_each = target[np.cumsum(self.n_atoms) - self.n_atoms] if quantity == "forces" else target
        chosen = ~np.isnan(of_each.reshape(len(self.n_atoms), -1)).any(axis=1)
        rows = np.repeat(chosen, self.n_atoms) if quantity == "forces" else chosen
        if std is not None:
            std = checked_array(f"{quantity}_std", np.maximum(std[rows], STD_FLOOR))
        mean, target = checked_array(quantity, mean[rows]), checked_array("labels", target[rows])
        return Matched(mean, std, target, chosen, self.n_atoms[chosen])


def assess(
    prediction: Prediction, references: References, *, n_bootstrap: int = 1000, seed: int = 0
) -> Evaluation:
    """Compute every metric of a prediction, with bootstrap intervals; stds are floored at 1e-6.

    Each quantity is judged on the structures that have its label.
    """
    found = Evaluation(len(references.n_atoms), int(references.n_atoms.sum()), seed=seed)
    tables: dict[str, Any] = {}
    for quantity in QUANTITIES:
        matched = references.match(prediction, quantity)
        if matched is None:
            continue
        count = found.labelled[quantity] = len(matched.n_atoms)
        builder = Tables(count, n_bootstrap, seed)
        if builder.active:
            tables["n_bootstrap"] = n_bootstrap
        if quantity == "energy":
            tables |= builder.energies(matched)
        elif quantity == "forces":
            numbers = references.numbers[np.repeat(matched.chosen, references.n_atoms)]
            tables |= builder.forces(matched, numbers)
        else:
            error = matched.target - matched.mean
            tables["stress"] = builder.values(error, matched.std, np.arange(count))
    return replace(found, **tables)


def evaluate(
    potential: Model,
    structures: Structures,
    *,
    labels: Labels | None = None,
    n_bootstrap: int = 1000,
    **options: Any,
) -> Evaluation:
    """Compare predictions with labels: every metric that these allow.

    Structures are labelled, or a file of such. Names and units of the labels are those that the
    model was trained with, if not given. `n_bootstrap` are resamples for the intervals, 0 for none,
    and the options those of `potential.predict` (samples, method, seed, ...).
    """
    found = list(iter_given(structures))
    references = References.of(found, labels or potential.backbone.labels)
    options = {"stress": references.stress is not None, **options}
    with progress_shown():
        return assess(potential.predict(found, **options), references, n_bootstrap=n_bootstrap)


def calibrate(
    potential: Model,
    structures: Structures,
    *,
    kind: str = "scale",
    labels: Labels | None = None,
    say: Callable[[str], object] = lambda text: None,
    **options: Any,
) -> dict[str, ScaleCalibrator]:
    """Fit a calibration of the error bars to labelled structures and store it with the potential.

    The structures are neither trained on nor tested on; the kind is "scale" (one factor,
    NLL-optimal) or "conformal". `say` is told, in a sentence for each quantity, what was done and
    gained. Labels and options are as for `evaluate`.
    """
    refuse_unknown("calibration", kind, CALIBRATORS)
    found = list(iter_given(structures))
    references = References.of(found, labels or potential.backbone.labels)
    with progress_shown():
        prediction = potential.predict(found, calibrated=False, **options)
    fitted: dict[str, ScaleCalibrator] = {}
    for quantity in ("energy", "forces"):
        matched = references.match(prediction, quantity)
        if matched is None:
            continue
        if matched.std is None:
            raise InputError(f"the model has no std of {WORDS[quantity]} to calibrate")
        uncertain = matched.std > STD_FLOOR  # what symmetry makes certain tells no scale
        mean, std, target = (one[uncertain] for one in (matched.mean, matched.std, matched.target))
        calibrator = fitted[quantity] = CALIBRATORS[kind].fit(mean, std, target)
        stds = std, calibrator.apply(std)
        before, after = (100 * coverage(mean, one, target) for one in stds)
        say(
            f"{WORDS[quantity].capitalize()} of {matched.chosen.sum()} structures: "
            f"{calibrator.describe()}. Within their 90 % interval lay {before:.0f} % of these "
            f"labels before, {after:.0f} % do now."
        )
    potential.calibration = dict(fitted)
    return fitted


# ---------------------------------------------------------------------------------- words and files
def verdict(evaluation: Evaluation) -> str:
    """Summarise how large errors are, and whether error bars are right and rank them."""
    sentences = [_labels(evaluation)]
    forces, energy, stress = evaluation.forces, evaluation.energy, evaluation.stress
    if forces:
        sentences.append(
            f"Forces are off by {forces['mae'].value:.3g} eV/Å on average (RMSE "
            f"{forces['rmse'].value:.3g}){_right(forces)}{_ranks(evaluation.forces_per_structure)}."
        )
    if energy:
        per_atom = evaluation.energy_per_atom["mae"].value
        sentences.append(
            f"Energies are off by {per_atom:.3g} eV/atom on average ({energy['mae'].value:.3g} "
            f"eV a structure){_right(energy)}{_ranks(energy)}."
        )
    if stress:
        mae = f"{stress['mae'].value:.3g} eV/Å³"
        sentences.append(f"Stresses are off by {mae} on average{_right(stress)}.")
    return "\n".join(sentences)


def _labels(evaluation: Evaluation) -> str:
    """Say how many structures have which label."""
    count, labelled = evaluation.n_structures, evaluation.labelled
    structures = "1 structure" if count == 1 else f"{count} structures"
    if labelled.get("energy") == labelled.get("forces") == count:
        return f"{structures}, all with energies and forces."
    having = [f"{labelled.get(name, 0)} have {words}" for name, words in WORDS.items()]
    return f"Of {structures}, {', '.join(having)}; each is judged on those that have it."


def _right(table: Mapping[str, Interval]) -> str:
    """Say whether the error bars have the right size, by the coverage of 90 % intervals."""
    if "coverage_90" not in table:
        return "; there are no error bars"
    found = table["coverage_90"]
    inside = found.value
    low, high = (inside if end is None else end for end in (found.low, found.high))
    if low - 0.03 <= 0.9 <= high + 0.03:
        one_sided = table["ece"].value > 0.15  # more than a wrong size alone gives
        judged = "about right" + one_sided * ", but most errors have one sign"
    else:
        size = "small" if inside < 0.9 else "large"
        judged = f"too {size} (RMS error {table['zms'].value ** 0.5:.2g} std)"
    return f"; their error bars are {judged}: {100 * inside:.0f} % lie within their 90 % interval"


def _ranks(table: Mapping[str, Interval]) -> str:
    """Say whether larger error bars mean larger errors, beside ranking by the force alone."""
    if "spearman" not in table:
        return ""
    text = f"; their std ranks structures by error with rho = {table['spearman'].value:.2f}"
    if "spearman_force" in table:
        text += f" (the size of the predicted force alone: {table['spearman_force'].value:.2f})"
    return text


def by_metric(evaluations: Mapping[str, Evaluation]) -> list[list[Any]]:
    """Return rows of a table: level, metric, unit, and each evaluation's interval or None."""
    tables = [evaluation.rows() for evaluation in evaluations.values()]
    keys = dict.fromkeys(key for table in tables for key in table)
    return [[*key, *(table.get(key) for table in tables)] for key in keys]


def evaluation_table(evaluations: Mapping[str, Evaluation]) -> Table:
    """Lay out one row per metric and one column per model for the terminal, with intervals."""
    table = Table(title="metrics, 95 % bootstrap intervals over structures")
    for header in ("level", "metric", "unit", *evaluations):
        table.add_column(header, overflow="fold")
    for row in by_metric(evaluations):
        table.add_row(*(Text("-" if cell is None else str(cell)) for cell in row))  # no markup
    return table


def write_figures(
    folder: str | Path, predictions: Mapping[str, Prediction], references: References
) -> list[Path]:
    """Draw parity, reliability, error against std, and rejection as PNG into a folder.

    Figures of a single model show the first of the predictions.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, plot in prediction_plots(predictions, references).items():
        paths.append(folder / f"{name}.png")
        plot.figure().savefig(paths[-1])
    return paths
