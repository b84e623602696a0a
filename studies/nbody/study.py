"""Charged particles: the n-body study of the BLIP paper, its methods on GNN and EGNN.

From positions and velocities of five charged particles at frame 30, predict their positions at
frame 40 (`simulations`): 3000 simulations to train, 2000 to choose the best checkpoint (MSE of the
posterior means), 2000 to test, which nothing is chosen on. MSE loss, for BLIP + 0.01 KL with
p = 0.5 and coefficients up to 4; K = 100 samples at test time. Ours instead of the paper's recipe,
chosen on validation data: the CRPS of two samples as loss, + 0.001 KL, coefficients that start at
0.01.

| method | what it is |
|---|---|
| base | the plain model |
| mc_dropout_P | dropout P after every message and update map, in training and prediction |
| deep_ensemble_4 | four seeds of `base` together, others in every ensemble |
| blip_local | local estimator, inference network that sees each row alone: the paper's BLIP |
| blip_flipout | the same with the flipout estimator |
| blip_local_crps | local with our recipe |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress

from studies.nbody.run import execute
from studies.nbody.simulations import load_nbody
from studies.spec import Layout, RunSpec
from studies.tables import Column, Row, Table, mean_and_spread, paper_results

__all__ = ["PROFILES", "draw", "execute", "prepare", "specs", "table"]

STUDY = "nbody"
PAPER_NODES = {"variant": "paper-nbody"}
BLIP = {"kind": "blip", "prior_dropout": 0.5, "bounds": [1e-5, 4.0]}
METHODS: dict[str, dict[str, Any]] = {
    "base": {"kind": "base"},
    "blip_local": {**BLIP, "estimator": "local", "encoder": PAPER_NODES},
    "blip_flipout": {**BLIP, "estimator": "flipout", "encoder": PAPER_NODES},
    "blip_local_crps": {
        **BLIP,
        "estimator": "local",
        "encoder": PAPER_NODES,
        "initial": 0.01,
    },
    "mc_dropout_0.2": {"kind": "mc_dropout", "rate": 0.2},
    "mc_dropout_0.5": {"kind": "mc_dropout", "rate": 0.5},
    "deep_ensemble_4": {"kind": "deep_ensemble", "members": 4},
}
TRAINING: dict[str, Any] = {
    "epochs": 10_000,
    "batch_size": 100,
    "loss": "mse",
    "kl_weight": 0.01,
    "optimizer": "adam",
    "lr": 5e-4,
    "schedule": {"kind": "constant"},
    "checkpoint_every": 10,
    "threads": 1,
    "tensorboard": False,
}
TRAINING_OF = {"blip_local_crps": {"loss": "crps", "samples": 2, "kl_weight": 0.001}}


@dataclass(frozen=True)
class Profile:
    """How large the study is.

    Attributes:
        seeds: of each method; as many ensembles, no two of which share a member.
        methods: by backbone.
        training: what differs from `TRAINING`.
        hyperparameters: of the backbones.
        sizes: simulations to train, validate and test.
        whole_stream: they are the first ones of the public data set; else a small stream of
            their own, which takes a second instead of minutes.
        samples: K at test time.
        bootstrap: resamples for the intervals of the metrics.
        milestones: epochs after which the best model so far is measured on validation data.
    """

    seeds: int
    methods: Mapping[str, Sequence[str]]
    training: Mapping[str, Any]
    hyperparameters: Mapping[str, int]
    sizes: Mapping[str, int]
    whole_stream: bool = True
    samples: int = 100
    bootstrap: int = 1000
    milestones: tuple[int, ...] = ()


SIZES = {"train": 3000, "valid": 2000, "test": 2000}
WIDTH = {"hidden": 64, "layers": 4}
EVERY = {"egnn": tuple(METHODS), "gnn": tuple(METHODS)}
PROFILES: dict[str, Profile] = {
    "quick": Profile(
        seeds=1,
        methods={
            "egnn": ("base", "blip_local", "mc_dropout_0.2", "deep_ensemble_4"),
            "gnn": ("blip_flipout",),
        },
        training={"epochs": 4, "batch_size": 32, "lr": 1e-3},
        hyperparameters={"hidden": 16, "layers": 2},
        sizes={"train": 64, "valid": 32, "test": 32},
        whole_stream=False,
        samples=8,
        bootstrap=50,
    ),
    "default": Profile(
        seeds=4,
        methods=EVERY,
        # 2e-3: the least validation loss of 5e-4, 1e-3, 2e-3 after 40 epochs, base and BLIP alike.
        training={"epochs": 200, "lr": 2e-3, "schedule": {"kind": "cosine"}},
        hyperparameters=WIDTH,
        sizes=SIZES,
    ),
    "long": Profile(  # the paper's settings but for a tenth of its epochs
        seeds=4,
        methods=EVERY,
        training={"epochs": 1000, "checkpoint_every": 50},
        hyperparameters=WIDTH,
        sizes=SIZES,
        milestones=(50, 100, 200, 400, 700),
    ),
    "paper": Profile(
        seeds=4,
        methods=EVERY,
        training={"checkpoint_every": 50},
        hyperparameters=WIDTH,
        sizes=SIZES,
    ),
}


def specs(profile: str) -> list[RunSpec]:
    """List the runs of a profile: EGNN first, seed by seed, so that the table fills early."""
    size = PROFILES[profile]
    found: list[RunSpec] = []
    for backbone, methods in size.methods.items():
        for seed in range(size.seeds):
            for method in methods:
                members = METHODS[method].get("members", 0)
                found += [
                    _spec(size, backbone, "base", seed)
                    for seed in range(seed * members, (seed + 1) * members)
                ]
                found.append(_spec(size, backbone, method, seed))
    return list({spec.id: spec for spec in found}.values())


def _spec(size: Profile, backbone: str, method: str, seed: int) -> RunSpec:
    settings = {
        "backbone": backbone,
        "hyperparameters": dict(size.hyperparameters),
        "method": METHODS[method],
        "training": {**TRAINING, **size.training, **TRAINING_OF.get(method, {})},
        "data": {"sizes": dict(size.sizes), "whole_stream": size.whole_stream},
        "samples": size.samples,
        "bootstrap": size.bootstrap,
    }
    if size.milestones:
        settings["milestones"] = list(size.milestones)
    members = METHODS[method].get("members", 0)
    seeds = range(seed * members, (seed + 1) * members)
    needs = tuple(f"{backbone}-base-seed{k}" for k in seeds)
    return RunSpec(STUDY, f"{backbone}-{method}", settings, seed, needs)


def prepare(profile: str, console: Console) -> None:
    """Make and cache the data set, once."""
    if not PROFILES[profile].whole_stream:
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("making the n-body data", total=None)
        load_nbody("train", progress=lambda done, n: progress.update(task, completed=done, total=n))


COLUMNS = (
    Column("MSE x10", "mse", factor=10.0, digits=3, paper=0),
    Column("NLL", "nll", digits=2, paper=1),
    Column("CRPS", "crps", digits=4, paper=2, paper_digits=3),
    Column("CRPS sum", "crps_sum", digits=4),
    Column("ECE", "ece", digits=3),
    Column("Spearman", "spearman_structure", digits=3),
)
NOTE = """\
MSE: mean over simulations, particles and components, times 10. NLL: Gaussian, sum over the three
components, mean over particles. CRPS: closed-form Gaussian, mean over components (the paper's
numbers fit this reading); CRPS sum: sum over the three components. ECE: of components. Spearman:
variance against squared error of simulations. Checkpoints are chosen on validation data."""
LABELS = {
    "base": "base",
    "mc_dropout_0.2": "MC dropout 0.2",
    "mc_dropout_0.5": "MC dropout 0.5",
    "deep_ensemble_4": "deep ensemble of 4",
    "blip_local": "BLIP, local (paper)",
    "blip_flipout": "BLIP, flipout",
    "blip_local_crps": "BLIP, local, CRPS",
}
PAPER_NAMES = {"blip_local": "blip"}


def table(specs: Sequence[RunSpec], layout: Layout) -> Table:
    """Tabulate methods by metrics, for each backbone, of the results that there are."""
    published = paper_results()[STUDY]
    rows: list[Row] = []
    for backbone in ("gnn", "egnn"):
        for method, label in LABELS.items():
            of_method = [spec for spec in specs if spec.name == f"{backbone}-{method}"]
            results = [found for spec in of_method if (found := layout.read(spec)) is not None]
            if of_method:
                name = PAPER_NAMES.get(method, method)
                spread = published["std_over_4_seeds"][backbone].get(name, ())
                paper = published[backbone].get(name, ())
                rows.append(Row((backbone.upper(), label), results, paper, spread))
    size = specs[0].settings
    title = (
        f"N-body, test set; {size['training']['epochs']} epochs, {size['samples']} samples; "
        "mean ± standard deviation over seeds; paper: 10000 epochs, 4 seeds"
    )
    return Table(("backbone", "method"), COLUMNS, rows, title, NOTE)


DRAWN = ("base", "blip_local", "blip_local_crps")
PANELS = {"mse": (10.0, "MSE x10"), "crps": (1.0, "CRPS"), "nll": (1.0, "NLL")}


def draw(specs: Sequence[RunSpec], layout: Layout) -> None:
    """Plot validation metrics against epochs, of runs that have milestones."""
    from studies.curves import Curve, plot_curves

    panels: dict[str, list[Curve]] = {}
    for metric, (factor, title) in PANELS.items():
        for backbone in ("gnn", "egnn"):
            for method in DRAWN:
                curves = _milestones(specs, layout, f"{backbone}-{method}", metric)
                points = [
                    (float(epochs), *number)
                    for epochs, values in sorted(curves.items())
                    if (number := mean_and_spread([factor * value for value in values]))
                ]
                if points:
                    panel = panels.setdefault(f"{backbone.upper()}, {title}", [])
                    panel.append(Curve(LABELS[method], points))
    if panels:
        figure = plot_curves(panels, x_label="epochs (validation data)", logarithmic=True)
        layout.figures.mkdir(parents=True, exist_ok=True)
        figure.savefig(layout.figures / "epochs.png")


def _milestones(
    specs: Sequence[RunSpec], layout: Layout, name: str, metric: str
) -> dict[int, list[float]]:
    """Return the values of a metric by epochs, one for each finished run of that name."""
    found: dict[int, list[float]] = {}
    for spec in [spec for spec in specs if spec.name == name]:
        curve = (layout.read(spec) or {}).get("details", {}).get("curve", {})
        for epochs, metrics in curve.items():
            if metric in metrics:
                found.setdefault(int(epochs), []).append(metrics[metric])
    return found
