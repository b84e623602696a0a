"""Active learning from labelled pools: which rule needs the fewest labels?

Every campaign of a seed begins with the same random labels of the pool and adds batches until the
budget is spent, each time training a PaiNN from scratch and conditioning it on its labels; only
the rule of selection differs (`blips.active.rules`). Pools and test sets are in `data`.

The figure that counts: with how many labels does a campaign reach the error that the random one of
the same seed has at its end, and which fraction of the random labels is that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ase.io
from rich.console import Console

from blips.active.campaign import run_campaign
from blips.active.config import load_campaign
from blips.active.summary import labels_to_reach
from studies.active.data import SETS
from studies.spec import Findings, Layout, Run, RunSpec
from studies.tables import Column, Row, Table, mean_and_spread

STUDY = "active"
RULES = ("random", "force_std", "energy_std", "information", "expected_reduction", "auto")
ERRORS = ("force_mae", "force_rmse", "energy_mae")
TRAINING = {
    "loss": "mae",
    "loss_unit": "kcal/mol",
    "schedule": {"kind": "cosine", "warmup": 0.02},
    "checkpoint_every": 100,
    "threads": 1,
    "tensorboard": False,
}


FINETUNING = {  # as in the studies of MatPES and silica
    "loss": "huber",
    "huber_delta": 0.01,
    "loss_unit": "eV",
    "energy_per_atom": True,
    "weights": {"energy": 0.1, "forces": 1.0},
    "optimizer": "adamw",
    "clip_norm": 0.5,
    "schedule": {"kind": "cosine", "warmup": 0.05},
    "ema_decay": 0.95,
}


@dataclass(frozen=True)
class Size:
    """How large the campaigns on one pool are: a PaiNN from scratch, or a released model."""

    initial: int
    batch: int
    budget: int
    epochs: int
    batch_size: int
    lr: float
    cutoff: float = 5.0
    features: int = 32
    released: str | None = None
    samples: int = 16


@dataclass(frozen=True)
class Profile:
    """Campaigns by pool, and the number of paired seeds."""

    sets: Mapping[str, Size]
    seeds: int
    rules: tuple[str, ...] = RULES


PROFILES: dict[str, Profile] = {
    "quick": Profile({"nh3": Size(6, 4, 10, 3, 8, 3e-3, features=8)}, 1, ("random", "information")),
    "default": Profile(
        {
            "nh3": Size(10, 10, 50, 400, 64, 8e-3),
            "xtb": Size(10, 10, 50, 400, 64, 8e-3),
            "acac": Size(20, 20, 80, 60, 8, 3e-3),
            "si": Size(10, 10, 40, 60, 4, 3e-3, cutoff=4.5),
            "hot": Size(12, 12, 48, 6, 4, 1e-3, released="chgnet", samples=4),
            "mptrj": Size(12, 12, 48, 6, 4, 1e-3, released="chgnet", samples=4),
            "silica": Size(8, 8, 32, 8, 2, 2e-4, released="mattersim-1m", samples=4),
        },
        5,
    ),
    "long": Profile(  # four times the training: what is left where single trainings decide less
        {
            "nh3": Size(10, 10, 50, 1600, 64, 8e-3),
            "xtb": Size(10, 10, 50, 1600, 64, 8e-3),
            "acac": Size(20, 20, 80, 240, 8, 3e-3),
        },
        5,
    ),
    "fine": Profile(  # batches of half the size, twice the trainings
        {
            "nh3": Size(10, 5, 50, 400, 64, 8e-3),
            "acac": Size(20, 10, 80, 60, 8, 3e-3),
        },
        5,
        ("random", "force_std", "information", "expected_reduction"),
    ),
}


def specs(profile: str) -> list[RunSpec]:
    """List all rules of a pool and a seed together, so that partial studies have whole pairs."""
    size = PROFILES[profile]
    return [
        RunSpec(STUDY, f"{data}-{rule}", {"data": data, "campaign": _campaign(one, rule)}, seed)
        for seed in range(size.seeds)
        for data, one in size.sets.items()
        for rule in size.rules
    ]


def _campaign(size: Size, rule: str) -> dict[str, Any]:
    """Return the configuration of a campaign, without files and seed."""
    return {
        **(_from_scratch(size) if size.released is None else _from_released(size.released)),
        "training": {
            **TRAINING,
            **({} if size.released is None else FINETUNING),
            "epochs": size.epochs,
            "batch_size": size.batch_size,
            "lr": size.lr,
        },
        "initial": {"count": size.initial, "displacement": 0.0},
        "explore": {"kind": "pool"},
        "limits": {"force_std": None, "force": None, "closest": None},
        "select": {"rule": rule, "batch": size.batch, "samples": size.samples, "chunk": 64},
        "stop": {"rounds": 1000, "labels": size.budget},
        "executor": {"kind": "inline"},
    }


def _from_scratch(size: Size) -> dict[str, Any]:
    given = {"cutoff": size.cutoff, "features": size.features, "blocks": 2, "num_basis": 12}
    return {"model": {"hyperparameters": given}}


def _from_released(name: str) -> dict[str, Any]:
    """Fine-tune from round to round; a few labels do not determine energies of 80 elements."""
    return {"model": {"backbone": name}, "retrain": "continue", "reference_energies": "none"}


def prepare(profile: str, console: Console) -> None:
    """Do nothing: no data have to be made before the runs."""


def execute(run: Run) -> Findings:
    """Run (or continue) one campaign; labels are looked up."""
    pool, test = run.folder / "pool.extxyz", run.folder / "test.extxyz"
    if not test.exists():
        known = SETS[run.spec.settings["data"]]()
        for path, frames in ((pool, known.pool), (test, known.test)):
            ase.io.write(path, frames)
    config = load_campaign(
        run.spec.settings["campaign"],
        {
            "seed": run.spec.seed,
            "folder": str(run.folder / "campaign"),
            "initial": {"structures": str(pool)},
            "explore": {"pool": str(pool)},
            "label": {
                "calculator": "studies.matpes.data.KnownLabels",
                "options": {"files": [str(pool.absolute())]},
                "trust": True,
            },
            "evaluate": {"structures": str(test)},
        },
    )
    summary = run_campaign(config)
    metrics = {
        f"{name}_{point['labels']}": _metric(point[name])
        for point in summary["curve"]
        for name in (*ERRORS, "force_rank_correlation")
    }
    picks = [
        {"round": p["round"], "score": p["score"], "frame": p["reason"]["origin"]["frame"]}
        for p in summary["picks"]
    ]
    return Findings(metrics, {"curve": summary["curve"], "picks": picks})


def _metric(value: float | None) -> dict[str, float | None]:
    return {"value": float("nan") if value is None else float(value), "low": None, "high": None}


NOTE = """\
Errors on test structures at the end of the budget, mean ± standard deviation over seeds: MAE of
force components (meV/A) and of energies (meV/atom). "over random's": the last error over that of
the random campaign of the same seed; "better": in how many seeds it is smaller. "of its labels":
the fraction of the random campaign's labels with which the error is first as low as the random
one's at its end (interpolated; 1 where it never is); that of random itself is below 1 where errors
go up and down, and shows what of the others' is chance. "twice": the error with twice the labels
over that with half of these, the largest numbers for which the curve has both (1: more labels do
not help, so no choice of them can)."""
COLUMNS = tuple(
    column
    for name, unit, digits in (("force", "force MAE", 1), ("energy", "energy MAE", 2))
    for column in (
        Column(unit, f"{name}_mae", factor=1e3, digits=digits),
        Column("over random's", f"{name}_mae_ratio", digits=2),
        Column("better", f"{name}_mae_better", counted=True),
        Column("of its labels", f"{name}_mae_fraction", digits=2),
        Column("twice", f"{name}_mae_twice", digits=2),
    )
)


def table(specs: Sequence[RunSpec], layout: Layout) -> Table:
    """Tabulate pools and rules by last errors and labels needed, of the results so far."""
    rows = []
    for name in dict.fromkeys(spec.name for spec in specs):
        data, rule = name.split("-")
        found = []
        for spec in specs:
            result, random = layout.read(spec), _random_of(spec, specs, layout)
            if spec.name == name and result is not None and random is not None:
                found.append({"metrics": _compared(result["details"], random["details"])})
        rows.append(Row((data, rule), found))
    title = "Active learning from labelled pools: errors and labels needed, by rule"
    return Table(("pool", "rule"), COLUMNS, rows, title, NOTE)


def _random_of(spec: RunSpec, specs: Sequence[RunSpec], layout: Layout) -> dict[str, Any] | None:
    """Return the result of the random campaign of the same pool and seed."""
    data = spec.settings["data"]
    return next(
        (layout.read(s) for s in specs if s.name == f"{data}-random" and s.seed == spec.seed), None
    )


def _compared(
    own: Mapping[str, Any], random: Mapping[str, Any]
) -> dict[str, dict[str, float | None]]:
    """Compare the last errors with random's, and the labels that it takes to reach these."""
    found = {}
    for name in ("force_mae", "energy_mae"):
        last, all_labels = random["curve"][-1][name], random["curve"][-1]["labels"]
        error = own["curve"][-1][name]
        found[name] = _metric(error)
        needed = labels_to_reach(own["curve"], last, name)
        found[f"{name}_fraction"] = _metric(min(1.0, needed / all_labels))
        if own != random:
            found[f"{name}_ratio"] = _metric(error / last)
            found[f"{name}_better"] = _metric(error < last)
        at = {point["labels"]: point[name] for point in own["curve"]}
        if halves := [labels for labels in at if 2 * labels in at]:
            found[f"{name}_twice"] = _metric(at[2 * max(halves)] / at[max(halves)])
    return found


def draw(specs: Sequence[RunSpec], layout: Layout) -> None:
    """Plot test errors against the number of labels, with the std over seeds."""
    from studies.curves import Curve, plot_curves

    units = {"force_mae": "force MAE, meV/Å", "energy_mae": "energy MAE, meV/atom"}
    panels: dict[str, list[Curve]] = {}
    for data in dict.fromkeys(spec.settings["data"] for spec in specs):
        for name, unit in units.items():
            for rule in RULES:
                of_rule = [spec for spec in specs if spec.name == f"{data}-{rule}"]
                curves = [r["details"]["curve"] for s in of_rule if (r := layout.read(s))]
                points = []
                for labels in sorted({point["labels"] for curve in curves for point in curve}):
                    values = [1e3 * p[name] for c in curves for p in c if p["labels"] == labels]
                    if (found := mean_and_spread(values)) is not None:
                        points.append((float(labels), *found))
                if points:
                    panels.setdefault(f"{data}: {unit}", []).append(Curve(rule, points))
    if panels:
        figure = plot_curves(panels, x_label="labels")
        layout.figures.mkdir(parents=True, exist_ok=True)
        figure.savefig(layout.figures / "errors.png")
