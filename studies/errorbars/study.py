"""Are the error bars right? Eight pairs of sets, near the training data and away from it.

The same models, seeds and splits for every method; everything that is chosen or calibrated is
chosen or calibrated on near validation data (`studies.errorbars.data`).

| method | what it is |
|---|---|
| base | the plain model |
| deep_ensemble | four seeds of `base` together |
| llpr, gmm | error bars for `base` from its last-layer features, or its embeddings' density |
| shallow_ensemble | 16 readouts, trained with the CRPS |
| blip_paper | BLIP as in the paper: local estimator, lambda 10, error bars by sampling |
| conditioned | `base`, and a posterior of its readout that is conditioned on the training data |
| conditioned_all | the same with all maps, sketched |
| blip_conditioned | BLIP's means and coefficients, conditioned |

Ensembles and sampled error bars are multiplied with one factor that is fitted on validation data,
as LLPR, GMM and the conditioned posterior have it from the start.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from studies.errorbars.data import data_folder
from studies.errorbars.run import execute
from studies.spec import Layout, RunSpec
from studies.tables import Column, Row, Table

__all__ = ["PROFILES", "execute", "prepare", "specs", "table"]

STUDY = "errorbars"
PAPER = {
    "kind": "blip",
    "prior_dropout": 0.5,
    "bounds": [1e-5, 4.0],
    "estimator": "local",
    "exclude": ["blocks.*.update.mixing"],
    "encoder": {"variant": "paper-ammonia"},
}


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        label: what the table calls it.
        model: its kind and options, see `errorbars_run`.
        training: what differs from the set's.
        built_on: the method whose trained models it takes, None for one that is trained itself.
    """

    label: str
    model: Mapping[str, Any]
    training: Mapping[str, Any] = field(default_factory=dict)
    built_on: str | None = None


METHODS: dict[str, Method] = {
    "base": Method("plain", {"kind": "base"}),
    "conditioned": Method("conditioned", {"kind": "conditioned"}, built_on="base"),
    "conditioned_all": Method(
        "conditioned, all maps", {"kind": "conditioned", "maps": "all"}, built_on="base"
    ),
    "llpr": Method("LLPR", {"kind": "llpr"}, built_on="base"),
    "gmm": Method("GMM", {"kind": "gmm", "components": 2}, built_on="base"),
    "deep_ensemble": Method("deep ensemble of 4", {"kind": "deep_ensemble"}, built_on="base"),
    "shallow_ensemble": Method(
        "shallow ensemble", {"kind": "shallow_ensemble", "heads": 16, "loss": "crps"}
    ),
    "blip_paper": Method(
        "BLIP (paper)", PAPER, {"noise": True, "kl_weight": 10.0, "loss_unit": "kcal/mol"}
    ),
    "blip_conditioned": Method(
        "BLIP, conditioned",
        {"kind": "conditioned", "coefficients": "network"},
        built_on="blip_paper",
    ),
}
MEMBERS = 4
TRAINING: dict[str, Any] = {
    "epochs": 300,
    "batch_size": 8,
    "loss": "mae",
    "weights": {"energy": 0.1, "forces": 1.0},
    "optimizer": "adam",
    "lr": 1e-3,
    "schedule": {"kind": "cosine"},
    "checkpoint_every": 10,
    "threads": 1,
    "tensorboard": False,
}


@dataclass(frozen=True)
class Profile:
    """How large the study is.

    Attributes:
        sets: name of the set -> width of PaiNN and epochs.
        seeds: of each method, but for the deep ensemble, which has `MEMBERS`.
        training: what differs from `TRAINING`.
        tested: structures near and far, at most.
        samples: K of sampled methods.
        bootstrap: resamples for the intervals of the metrics.
        methods: the rows.
    """

    sets: Mapping[str, tuple[int, int]]
    seeds: int
    training: Mapping[str, Any] = field(default_factory=dict)
    tested: int = 300
    samples: int = 32
    bootstrap: int = 1000
    methods: tuple[str, ...] = tuple(METHODS)


SETS = {
    "nh3": (64, 400),
    "acac-100": (64, 300),
    "nh3-public": (64, 400),
    "ethanol": (64, 300),
    "si": (32, 60),
    "acac-450": (64, 120),
    "ge": (32, 60),
    "li": (32, 60),
}
PROFILES: dict[str, Profile] = {
    "quick": Profile({"nh3": (8, 3)}, seeds=1, tested=8, samples=8, bootstrap=50),
    "default": Profile(SETS, seeds=3),
    "small_batches": Profile(  # as `blips train` chooses them: two structures, of li three
        {name: size for name, size in SETS.items() if name != "acac-450"},  # eight
        seeds=3,
        training={"batch_size": None},
        methods=("base", "conditioned", "deep_ensemble"),
    ),
}


def specs(profile: str) -> list[RunSpec]:
    """List the runs of a profile, set by set; trained models first."""
    size = PROFILES[profile]
    found: list[RunSpec] = []
    for data in [name for name in size.sets if name == "nh3" or data_folder() is not None]:
        found += [_spec(size, data, "base", seed) for seed in range(max(MEMBERS, size.seeds))]
        found.append(_spec(size, data, "deep_ensemble", 0))
        others = [name for name in size.methods if name not in ("base", "deep_ensemble")]
        found += [_spec(size, data, name, k) for k in range(size.seeds) for name in others]
    return found


def _spec(size: Profile, data: str, name: str, seed: int) -> RunSpec:
    method = METHODS[name]
    features, epochs = size.sets[data]
    seeds = range(MEMBERS) if name == "deep_ensemble" else (seed,)
    needs = tuple(f"{data}-{method.built_on}-seed{k}" for k in seeds) if method.built_on else ()
    trained = method if method.built_on is None else METHODS[method.built_on]
    settings = {
        "hyperparameters": {"cutoff": 5.0, "features": features},
        "method": dict(method.model),
        "training": {**TRAINING, "epochs": epochs, **size.training, **trained.training},
        "data": data,
        "tested": size.tested,
        "samples": size.samples,
        "bootstrap": size.bootstrap,
    }
    return RunSpec(STUDY, f"{data}-{name}", settings, seed, needs)


def prepare(profile: str, console: Console) -> None:
    """Warn where the public data are missing."""
    if data_folder() is None:
        console.print("ammonia alone: there is no $BLIPS_DATA")


COLUMNS = tuple(
    Column(f"{where} {header}", f"{where}_{metric}", digits=digits)
    for where in ("near", "far")
    for header, metric, digits in (
        ("F MAE", "forces_mae", 3),
        ("within 90 %", "forces_coverage_90", 2),
        ("ECE", "forces_ece", 3),
        ("rho struct.", "structure_spearman", 2),
        ("rho atoms", "atom_spearman", 2),
        ("NLL", "forces_nll", 2),
        ("CRPS", "forces_crps", 3),
        ("E within 90 %", "energy_coverage_90", 2),
        ("E rho", "energy_spearman", 2),
    )
)
NOTE = """\
eV and A. F MAE, coverage of the central 90 % interval, ECE and CRPS: of force components. NLL:
Gaussian, sum of an atom's three components. rho: Spearman, variance against squared error. All
error bars are scaled on near validation data; nothing is fitted to far labels."""


def table(specs: Sequence[RunSpec], layout: Layout) -> Table:
    """Tabulate methods by metrics, for each set, of the results that there are."""
    rows: list[Row] = []
    for data in dict.fromkeys(spec.settings["data"] for spec in specs):
        for name, method in METHODS.items():
            of_method = [spec for spec in specs if spec.name == f"{data}-{name}"]
            if not of_method:
                continue
            results = [found for spec in of_method if (found := layout.read(spec)) is not None]
            rows.append(Row((data, method.label), results))
    title = "Error bars near the training data and away from it; mean ± deviation over seeds"
    return Table(("data", "method"), COLUMNS, rows, title, NOTE)
