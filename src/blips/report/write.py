"""From a run's folder to its report."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ase import Atoms

from blips.backbones.base import Backbone
from blips.baselines import predict_plain
from blips.defaults import SAMPLES
from blips.errors import InputError
from blips.files import write_atomically
from blips.potential import BayesianPotential
from blips.prediction import Model, Prediction
from blips.report.campaign import CAMPAIGN, write_campaign
from blips.report.document import TRAINING, render
from blips.report.plots import prediction_plots, training_plot
from blips.report.sources import Sources, find_sources
from blips.report.structures import uncertain_structures, viewed_set
from blips.train.checkpoint import Saveable, describe, load
from blips.train.run import environment
from blips.uq.assess import References, assess
from blips.uq.evaluate import Evaluation


def write_report(
    folder: str | Path,
    output: str | Path,
    *,
    structures: Sequence[str | Path] = (),
    samples: int = SAMPLES,
    seed: int = 0,
    bootstrap: int = 1000,
    shown: int = 12,
    baseline: str | Path | None = None,
) -> Path:
    """Write a run as one HTML file.

    Args:
        folder: of a training run or of the demo, see `blips.report.sources`, or of a campaign of
            active learning, for which only `output`, `shown` and `baseline` count.
        output: file to write.
        structures: files of labelled structures to predict; default: those that the folder names.
        samples: posterior samples.
        seed: of the samples and the bootstrap.
        bootstrap: resamples for the intervals.
        shown: structures of each set in the 3D view.
        baseline: of a campaign: folder of another one to compare with.
    """
    if (Path(folder) / CAMPAIGN).is_file():
        return write_campaign(folder, output, baseline=baseline, shown=shown)
    if baseline is not None:
        raise InputError(f"{folder} is no campaign; a baseline is for campaigns of active learning")
    sources = find_sources(folder, structures)
    model = load(sources.model)
    evaluations: dict[str, Evaluation] = {}
    sets: list[dict[str, Any]] = []
    for name, labelled in sources.labelled.items():
        references = References.of(labelled, sources.labels)
        prediction = _predict(model, labelled, samples, seed)
        evaluations[name] = assess(prediction, references, n_bootstrap=bootstrap, seed=seed)
        entries = uncertain_structures(labelled, prediction, references, shown)
        sets.append(viewed_set(name, entries, prediction_plots(prediction, references)))
    loss = training_plot(sources.history)
    page = render(
        title=sources.title,
        lead=_lead(model, samples),
        evaluations=evaluations,
        data={"sets": sets, "figures": {} if loss is None else {TRAINING: loss}},
        notes=sources.notes,
        settings=_settings(model, sources),
        provenance=_provenance(sources),
    )
    output = Path(output)
    write_atomically(output, page.encode())
    return output


def _predict(model: Saveable, structures: list[Atoms], samples: int, seed: int) -> Prediction:
    if isinstance(model, Backbone):
        return predict_plain(model, structures)
    if not isinstance(model, Model):
        raise InputError(f"a {type(model).__name__} has no predictions to report on")
    return model.predict(structures, samples=samples, seed=seed)


def _lead(model: Saveable, samples: int) -> str:
    if isinstance(model, Backbone):
        return f"A plain {type(model).__name__}, without error bars."
    backbone = type(model.backbone).__name__
    known = ", ".join(model.calibration)
    calibrated = f"calibrated for {known}" if known else "not calibrated"
    if isinstance(model, BayesianPotential):
        if model.posterior is not None:
            return f"{backbone}, {model.posterior}. Means of the plain model; {samples} draws."
        return f"A Bayesian {backbone}, {calibrated}; means and sigmas of {samples} samples."
    return f"A {type(model).__name__} of {backbone}, {calibrated}."


def _settings(model: Saveable, sources: Sources) -> dict[str, str]:
    texts = {"Model": json.dumps(describe(model), indent=1)}
    if sources.config:
        texts["Configuration of the run (config.yaml)"] = sources.config
    if isinstance(model, BayesianPotential):
        texts["Which maps are Bayesian"] = str(model.report())
    return texts


def _provenance(sources: Sources) -> dict[str, str]:
    here = environment()
    rows = {"Model file": sources.model.name}
    for name, content in (("Run", sources.environment), ("Report", here)):
        versions = content.get("versions", {})
        if versions:
            text = ", ".join(f"{package} {found}" for package, found in versions.items() if found)
            rows[f"{name} made with"] = text
        for key in ("python", "platform"):
            if key in content:
                rows[f"{name}: {key}"] = str(content[key])
        command = content.get("command")
        if isinstance(command, list):
            rows[f"{name}: command"] = " ".join(map(str, command))
    for name, structures in sources.labelled.items():
        rows[f"Structures: {name}"] = str(len(structures))
    return rows
