"""From a run, a model or predictions to a report."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blips.active.database import DATABASE
from blips.active.summary import campaign_summary
from blips.baselines import predict_with
from blips.data.labels import Labels
from blips.defaults import SAMPLES
from blips.errors import InputError
from blips.files import write_atomically
from blips.potential import BayesianPotential
from blips.report.campaign import render_campaign
from blips.report.document import document
from blips.report.sources import Sources, find_sources
from blips.report.structures import picked_sets, viewed_set
from blips.train.checkpoint import describe, error_bars
from blips.train.objective import Model, backbone_of
from blips.train.released import load
from blips.train.run import environment
from blips.uq.assess import References, assess, by_metric, verdict
from blips.uq.bootstrap import LEVEL
from blips.uq.evaluate import Evaluation
from blips.uq.plots import prediction_plots, training_plot


def write_report(
    target: str | Path,
    output: str | Path,
    *,
    structures: Sequence[str | Path] = (),
    samples: int = SAMPLES,
    seed: int = 0,
    bootstrap: int = 1000,
    baseline: str | Path | None = None,
    labels: Labels | None = None,
) -> Path:
    """Write a report as one HTML file.

    The target is a folder of a training run, a model or a file of predictions, see
    `blips.report.sources`, or the folder of a campaign, for which only `baseline` counts, the
    folder of another one to compare with. Structures (files) and labels are by default those that
    the target names; `bootstrap` is the number of resamples for the intervals.
    """
    target, output = Path(target), Path(output)
    if (target / DATABASE).is_file():
        summary = campaign_summary(target)
        other = None if baseline is None else campaign_summary(baseline)
        picked = picked_sets(target, summary)
        page = render_campaign(target.resolve().name, summary, sets=picked, baseline=other)
        return write_atomically(output, page.encode())
    if baseline is not None:
        raise InputError(f"{target} is no campaign; a baseline is for campaigns of active learning")
    sources = find_sources(target, structures)
    model = None if sources.model is None else load(str(sources.model))
    labels = labels or (None if model is None else backbone_of(model).labels)
    evaluations: dict[str, Evaluation] = {}
    sets: list[dict[str, Any]] = []
    notes = [sources.note] if sources.note else []
    for name, atoms in sources.structures.items():
        predicted = sources.predictions.get(name)
        if predicted is None:
            predicted = predict_with(model, atoms, samples=samples, seed=seed)
        references = References.of(atoms, labels, required=False)
        if references.energy is None and references.forces is None:
            notes.append(f"No structure of {name} has labels: its errors are not known.")
        else:
            evaluations[name] = assess(predicted, references, n_bootstrap=bootstrap, seed=seed)
        plots = prediction_plots({name: predicted}, references)
        sets.append(viewed_set(name, atoms, predicted, references, plots=plots))
    lead = "Predictions that were read."
    if model is not None:
        lead = f"{type(backbone_of(model)).__name__}, error bars: {error_bars(model)}."
    page = document(
        "run.html",
        sources.title,
        lead,
        sets=sets,
        figures={"training-plot": training_plot(sources.history)},
        notes=notes,
        evaluations=evaluations,
        verdicts={name: verdict(evaluation) for name, evaluation in evaluations.items()},
        metrics=by_metric(evaluations),
        percent=100 * LEVEL,
        settings={} if model is None else _settings(model, sources),
        provenance=list(_provenance(sources).items()),
    )
    return write_atomically(output, page.encode())


def _settings(model: Model, sources: Sources) -> dict[str, str]:
    texts = {"Model": json.dumps(describe(model), indent=1)}
    if sources.config:
        texts["Configuration of the run (config.yaml)"] = sources.config
    if isinstance(model, BayesianPotential):
        texts["Which maps are Bayesian"] = str(model.report())
    return texts


def _provenance(sources: Sources) -> dict[str, Any]:
    """Say with which versions, platform and command the run and this report were made."""
    rows: dict[str, Any] = {} if sources.model is None else {"Model file": sources.model.name}
    for name, made in (("Run", sources.environment), ("Report", environment())):
        versions = {package: found for package, found in made.get("versions", {}).items() if found}
        known = {**made, "versions": versions, "command": " ".join(made.get("command", ()))}
        rows |= {f"{name}: {key}": value for key, value in known.items() if value}
    return rows | {f"Structures: {name}": len(found) for name, found in sources.structures.items()}
