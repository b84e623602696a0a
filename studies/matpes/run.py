"""One run of the MatPES study: a campaign of `blips.active` on a labelled pool, or its plain twin.

Every round trains on all labels so far, from the weights of the round before, and then chooses the
next batch from the pool. Tested is what the posterior means predict, after every round; the last
model is also sampled. Metrics: `round<n>_<level>_<metric>` of the means, `final_...` of samples.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from ase import Atoms

from blips.active.campaign import run_campaign
from blips.active.config import CampaignConfig
from blips.active.store import CampaignStore
from blips.backbones.base import Backbone
from blips.baselines import predict_plain
from blips.config import ModelConfig
from blips.data.structures import read_structures
from blips.errors import ConfigError
from blips.potential import BayesianPotential
from blips.train.fit import fit
from blips.train.released import build_model, load
from blips.uq.assess import References
from studies.matpes.data import Parts, write_parts
from studies.silica.run import BATCH_SIZE, Metrics, measure
from studies.spec import BLIP_TRAINING, Findings, Run

KEPT = ("energy_mae", "atom_energy_mae", "forces_mae", "forces_rmse")


def execute(run: Run) -> Findings:
    """Run (or continue) the campaign or its plain twin, and test the model of every round."""
    torch.set_num_threads(1)
    settings = run.spec.settings
    parts = write_parts(settings["data"], run.spec.seed, run.folder)
    references = References.of(parts.test)
    metrics: Metrics = {}
    details: dict[str, Any] = {"labels": []}
    models = _plain_rounds(run) if run.needs else _campaign_rounds(run, parts, details)
    model: Backbone | BayesianPotential | None = None
    for number, (labels, model) in enumerate(models):
        details["labels"].append(labels)
        found = measure(_means(model, parts.test), references, settings["bootstrap"])
        metrics |= {f"round{number}_{name}": found[name] for name in KEPT}
    if isinstance(model, BayesianPotential):
        sampled = model.predict(
            parts.test,
            samples=settings["samples"],
            method=settings["method"],
            seed=run.spec.seed,
            batch_size=BATCH_SIZE,
        )
        found = measure(sampled, references, settings["bootstrap"])
        metrics |= {f"final_{name}": value for name, value in found.items()}
    return Findings(metrics, details)


def campaign_config(run: Run, parts: Parts) -> CampaignConfig:
    """Return the campaign of a run; labels are looked up."""
    settings, data = run.spec.settings, run.spec.settings["data"]
    return CampaignConfig.model_validate(
        {
            "model": {**settings["model"], "bayes": settings["bayes"]},
            "training": {**BLIP_TRAINING, **settings["training"]},
            "valid": settings["valid"],
            "retrain": "continue",
            "reference_energies": "none",
            "initial": {
                "structures": str(parts.initial),
                "count": data["initial"],
                "displacement": 0.0,
            },
            "explore": {"kind": "pool", "pool": str(parts.pool)},
            "select": {
                "rule": settings["select"]["score"],
                "batch": settings["batch"],
                "samples": settings["samples"],
                "method": settings["method"],
            },
            "limits": {"force_std": None, "force": None, "closest": None},
            "label": {
                "calculator": "studies.matpes.data.KnownLabels",
                "options": {"files": [str(parts.initial.absolute()), str(parts.pool.absolute())]},
                "trust": True,
            },
            "stop": {"rounds": settings["rounds"]},
            "executor": {"kind": "inline", "workers": 1},
            "seed": run.spec.seed,
            "folder": str(run.folder / "campaign"),
        }
    )


def _campaign_rounds(
    run: Run, parts: Parts, details: dict[str, Any]
) -> Iterator[tuple[int, BayesianPotential]]:
    """Yield labels and model of every round of the campaign."""
    summary = run_campaign(campaign_config(run, parts), display=False)
    details["ended"] = summary["ended"]
    details["picks"] = [
        [pick["reason"]["origin"]["frame"] for pick in summary["picks"] if pick["round"] == number]
        for number in range(1, run.spec.settings["rounds"] + 1)
    ]
    compounds = [a.get_chemical_formula(empirical=True) for a in read_structures(parts.pool)]
    details["compounds"] = len({compounds[i] for picks in details["picks"] for i in picks})
    with CampaignStore(run.folder / "campaign", writable=False) as store:
        found = store.read_all("train")
    for stage in found.values():
        model = load(run.folder / "campaign" / stage["model"])
        if not isinstance(model, BayesianPotential):
            raise ConfigError(f"{stage['model']} holds no Bayesian potential")
        yield stage["labels"], model


def _plain_rounds(run: Run) -> Iterator[tuple[int, Backbone]]:
    """Yield the plain model, trained round by round on what another campaign had chosen."""
    settings = run.spec.settings
    (campaign,) = run.needs.values()
    config = ModelConfig.model_validate({**settings["model"], "bayes": {"enabled": False}})
    before: Path | None = None
    for number in range(1, settings["rounds"] + 2):
        with CampaignStore(campaign / "campaign", writable=False) as store:
            structures = store.labelled(before=number)
        model = load(before) if before else build_model(config, run.spec.seed)
        if not isinstance(model, Backbone):
            raise ConfigError(f"{before} holds no plain model")
        folder = run.folder / f"round-{number}"
        fit(
            model,
            structures,
            valid=settings["valid"],
            config={
                "training": {**BLIP_TRAINING, **settings["training"]},
                "seed": run.spec.seed,
                "data": {"reference_energies": "none"},
            },
            folder=folder,
            resume=True,
        )
        before = folder / "best.safetensors"
        yield len(structures), model


def _means(model: Backbone | BayesianPotential, structures: list[Atoms]) -> Any:
    if isinstance(model, BayesianPotential):
        return model.predict(structures, method="map", batch_size=BATCH_SIZE)
    return predict_plain(model, structures, batch_size=BATCH_SIZE)
