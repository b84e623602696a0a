"""Judge and recalibrate predictions on labelled structures; say it in words, tables and figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from ase import Atoms
from ase.stress import full_3x3_to_voigt_6_stress

from blips.data.labels import QUANTITIES, Labels, available, extract
from blips.data.sanity import warn_of_labels
from blips.data.structures import Structures, iter_given
from blips.errors import InputError
from blips.files import replacing
from blips.prediction import Model, Prediction
from blips.progress import progress_shown
from blips.uq.bootstrap import Bootstrap, Interval
from blips.uq.calibrate import CALIBRATORS, Calibrator, ConformalCalibrator, ScaleCalibrator
from blips.uq.checks import finite_array
from blips.uq.evaluate import Evaluation, Tables
from blips.uq.metrics import coverage
from blips.uq.plots import prediction_plots

if TYPE_CHECKING:
    from rich.table import Table

STD_FLOOR = 1e-6  # eV, eV/A: symmetry can make a std zero, by which no metric can divide
ONE_SIDED = 0.15  # ECE that a wrong size alone does not give where coverage is right
WORDS = {"energy": "energies", "forces": "forces", "stress": "stresses"}


class Matched(NamedTuple):
    """Predictions and labels of the structures that have a label."""

    mean: np.ndarray  # [S'] energies, [N', 3] forces, [S', 6] stresses
    std: np.ndarray | None  # same shape, at least STD_FLOOR
    target: np.ndarray  # same shape
    chosen: np.ndarray  # [S] whether a structure has the label


@dataclass(frozen=True)
class References:
    """Hold the labels of S structures with N atoms in all; NaN where a structure has none."""

    n_atoms: np.ndarray  # [S]
    numbers: np.ndarray  # [N]
    energy: np.ndarray | None  # [S] eV
    forces: np.ndarray | None  # [N, 3] eV/A
    stress: np.ndarray | None = None  # [S, 6] eV/A^3, ASE's order

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
        found = [extract(atoms, available(atoms, labels), labels) for atoms in structures]
        no_forces = [np.full((len(atoms), 3), np.nan) for atoms in structures]
        stress = [values.get("stress", np.full((3, 3), np.nan)) for values in found]
        arrays = {
            "energy": np.array([values.get("energy", np.nan) for values in found]),
            "forces": np.concatenate(
                [values.get("forces", nan) for values, nan in zip(found, no_forces, strict=True)]
            ),
            "stress": full_3x3_to_voigt_6_stress(np.array(stress)),
        }
        known = {name: None if np.isnan(a).all() else a for name, a in arrays.items()}
        if required and known["energy"] is None and known["forces"] is None:
            raise InputError(
                "no structure has an energy or forces under the names of the labels; say which "
                "they are with --energy-key and --forces-key (labels=Labels(...) in Python)"
            )
        return cls(
            n_atoms=np.array([len(atoms) for atoms in structures]),
            numbers=np.concatenate([atoms.numbers for atoms in structures]),
            **known,
        )

    def having(self, quantity: str) -> np.ndarray:
        """Say which structures have a label, [S]."""
        values = getattr(self, quantity)
        if values is None:
            return np.zeros(len(self.n_atoms), dtype=bool)
        if quantity == "forces":
            values = values[np.cumsum(self.n_atoms) - self.n_atoms]  # of each first atom
        return ~np.isnan(values.reshape(len(self.n_atoms), -1)).any(axis=1)

    def match(self, prediction: Prediction, quantity: str) -> Matched | None:
        """Pair predictions with labels; None where there are no labels or no predictions."""
        target, mean = getattr(self, quantity), getattr(prediction, quantity)
        if target is None or mean is None:
            return None
        if not np.array_equal(prediction.n_atoms, self.n_atoms):
            raise InputError("prediction and labels are not of the same structures in one order")
        std = getattr(prediction, f"{quantity}_total_std", getattr(prediction, f"{quantity}_std"))
        if quantity == "stress":
            mean = full_3x3_to_voigt_6_stress(mean)
            std = None if std is None else full_3x3_to_voigt_6_stress(std)
        chosen = self.having(quantity)
        rows = np.repeat(chosen, self.n_atoms) if quantity == "forces" else chosen
        if std is not None:
            std = finite_array(f"{quantity}_std", np.maximum(std[rows], STD_FLOOR))
        mean, target = finite_array(quantity, mean[rows]), finite_array("labels", target[rows])
        return Matched(mean, std, target, chosen)


def stress_too(structures: Sequence[Atoms], references: References) -> dict[str, bool]:
    """Ask `predict` for the stress where labels and periodic cells allow it."""
    periodic = all(atoms.pbc.all() for atoms in structures)
    return {"stress": True} if references.stress is not None and periodic else {}


def assess(
    prediction: Prediction, references: References, *, n_bootstrap: int = 1000, seed: int = 0
) -> Evaluation:
    """Compute every metric of a prediction, with bootstrap intervals; stds are floored at 1e-6.

    Each quantity is judged on the structures that have its label.
    """
    tables: dict[str, Any] = {}
    labelled: dict[str, int] = {}
    omitted: list[str] = []
    resampled = 0
    for quantity in QUANTITIES:
        matched = references.match(prediction, quantity)
        if matched is None:
            continue
        mean, std, target = matched[:3]
        counts = references.n_atoms[matched.chosen]
        labelled[quantity] = len(counts)
        bootstrap = Bootstrap(len(counts), n_bootstrap, seed=seed)
        builder = Tables(bootstrap, omitted)
        if quantity == "energy":
            tables |= builder.energies(mean, std, target, counts)
        elif quantity == "forces":
            numbers = references.numbers[np.repeat(matched.chosen, references.n_atoms)]
            tables |= builder.forces(mean, std, target, counts, numbers)
        else:
            tables["stress"] = builder.components(target - mean, std, np.arange(len(counts)))
        resampled = max(resampled, n_bootstrap if bootstrap.active else 0)
    return Evaluation(
        n_structures=len(references.n_atoms),
        n_atoms=int(references.n_atoms.sum()),
        labelled=labelled,
        n_bootstrap=resampled,
        seed=seed,
        omitted=tuple(omitted),
        **tables,
    )


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
    found = list(iter_given(structures))
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
    say: Callable[[str], object] = lambda text: None,
    **options: Any,
) -> dict[str, ScaleCalibrator | ConformalCalibrator]:
    """Fit a calibration of the error bars to labelled structures and store it with the potential.

    Args:
        potential: its `calibration` is replaced.
        structures: labelled, or a file of such; neither trained on nor tested on.
        kind: "scale" (one factor, NLL-optimal) or "conformal".
        labels: names and units of the labels; those that the model was trained with if not given.
        say: is told, in a sentence for each quantity, what was done and gained.
        options: of `potential.predict` (samples, method, seed, ...).
    """
    if kind not in CALIBRATORS:
        raise InputError(f"unknown calibration {kind!r}; use one of {', '.join(CALIBRATORS)}")
    found = list(iter_given(structures))
    references = References.of(found, labels or potential.backbone.labels)
    with progress_shown():
        prediction = potential.predict(found, calibrated=False, **options)
    fitted: dict[str, ScaleCalibrator | ConformalCalibrator] = {}
    for quantity in ("energy", "forces"):
        matched = references.match(prediction, quantity)
        if matched is None:
            continue
        if matched.std is None:
            raise InputError(f"the model has no std of {WORDS[quantity]} to calibrate")
        uncertain = matched.std > STD_FLOOR  # what symmetry makes certain tells no scale
        arrays = (matched.mean[uncertain], matched.std[uncertain], matched.target[uncertain])
        fitted[quantity] = CALIBRATORS[kind].fit(*arrays)
        gain = _gain(fitted[quantity], *arrays)
        say(f"{WORDS[quantity].capitalize()} of {matched.chosen.sum()} structures: {gain}")
    potential.calibration = dict(fitted)
    return fitted


def _gain(calibrator: Calibrator, mean: np.ndarray, std: np.ndarray, target: np.ndarray) -> str:
    """Say what a calibration does, and how many labels lie within 90 % intervals by it."""
    before, after = (
        100 * coverage(mean, one, target, [0.9])[0] for one in (std, calibrator.apply(std))
    )
    return (
        f"{calibrator.describe()}. Within their 90 % interval lay {before:.0f} % of these labels "
        f"before, {after:.0f} % do now."
    )


# ---------------------------------------------------------------------------------- words and files
def verdict(evaluation: Evaluation) -> str:
    """Summarise how large errors are, and whether error bars are right and rank them."""
    sentences = [_labels(evaluation)]
    forces, energy = evaluation.forces, evaluation.energy_per_atom
    if forces:
        sentences.append(
            f"Forces are off by {forces['mae'].value:.3g} eV/Å on average (RMSE "
            f"{forces['rmse'].value:.3g}){_right(forces)}{_ranks(evaluation.forces_per_structure)}."
        )
    if energy:
        total = evaluation.energy["mae"].value
        sentences.append(
            f"Energies are off by {energy['mae'].value:.3g} eV/atom on average ({total:.3g} "
            f"eV a structure){_right(evaluation.energy)}{_ranks(evaluation.energy)}."
        )
    if evaluation.stress:
        stress = evaluation.stress
        mae = f"{stress['mae'].value:.3g} eV/Å³"
        sentences.append(f"Stresses are off by {mae} on average{_right(stress)}.")
    return "\n".join(sentences)


def _labels(evaluation: Evaluation) -> str:
    """Say how many structures have which label."""
    count = evaluation.n_structures
    structures = "1 structure" if count == 1 else f"{count} structures"
    if all(evaluation.labelled.get(name) == count for name in ("energy", "forces")):
        return f"{structures}, all with energies and forces."
    having = [f"{evaluation.labelled.get(name, 0)} have {WORDS[name]}" for name in WORDS]
    return f"Of {structures}, {', '.join(having)}; each is judged on those that have it."


def _right(table: Mapping[str, Interval]) -> str:
    """Say whether the error bars have the right size, by the coverage of 90 % intervals."""
    if "coverage_90" not in table:
        return "; there are no error bars"
    inside, low, high = (getattr(table["coverage_90"], end) for end in ("value", "low", "high"))
    low, high = (inside if end is None else end for end in (low, high))
    if low - 0.03 <= 0.9 <= high + 0.03:
        judged = "their error bars are about right"
        if table["ece"].value > ONE_SIDED:
            judged += ", but most errors have one sign"
    elif inside < 0.9:
        judged = f"their error bars are too small (RMS error {table['zms'].value ** 0.5:.2g} std)"
    else:
        judged = f"their error bars are too large (RMS error {table['zms'].value ** 0.5:.2g} std)"
    return f"; {judged}: {100 * inside:.0f} % lie within their 90 % interval"


def _ranks(table: Mapping[str, Interval]) -> str:
    """Say whether larger error bars mean larger errors, beside ranking by the force alone."""
    if "spearman" not in table:
        return ""
    text = f"; their std ranks structures by error with rho = {table['spearman'].value:.2f}"
    if "spearman_force" in table:
        text += f" (the size of the predicted force alone: {table['spearman_force'].value:.2f})"
    return text


def write_evaluation(path: str | Path, evaluations: Mapping[str, Evaluation]) -> Path:
    """Write metrics as JSON, by label."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {label: evaluation.to_dict() for label, evaluation in evaluations.items()}
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")
    return path


def by_metric(
    evaluations: Mapping[str, Evaluation],
) -> dict[tuple[str, str, str], dict[str, Interval]]:
    """Collect intervals of several evaluations: (level, metric, unit) -> label -> interval."""
    rows: dict[tuple[str, str, str], dict[str, Interval]] = {}
    for label, evaluation in evaluations.items():
        for row in evaluation.rows():
            key = (row["level"], row["metric"], row["unit"])
            rows.setdefault(key, {})[label] = Interval(row["value"], row["low"], row["high"])
    return rows


def evaluation_table(evaluations: Mapping[str, Evaluation]) -> Table:
    """Lay out one row per metric and one column per model for the terminal, with intervals."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="metrics, 95 % bootstrap intervals over structures")
    for header in ("level", "metric", "unit", *evaluations):
        table.add_column(header, overflow="fold")
    for key, found in by_metric(evaluations).items():
        cells = [*key, *(str(found.get(label, "-")) for label in evaluations)]
        table.add_row(*map(Text, cells))  # brackets are no markup
    return table


def write_figures(
    folder: str | Path, predictions: Mapping[str, Prediction], references: References
) -> list[Path]:
    """Draw parity, reliability, error against std, and rejection as PNG into a folder.

    Figures of a single model show the first of the predictions.
    """
    first = next(iter(predictions.values()))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, plot in prediction_plots(first, references, predictions).items():
        paths.append(folder / f"{name}.png")
        plot.figure().savefig(paths[-1])
    return paths
