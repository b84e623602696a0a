"""What brings one model to the accuracy of a deep ensemble, at the ensemble's training cost?

Sets, splits and the plain recipe are those of the study errorbars, where four plain models
together are up to 17 % more accurate than one of them. Every recipe but `plain` gets about the
processor time of these four trainings. The recipe to take is the one with the least error on
validation structures, near the training data; errors far away are shown, and choose nothing.

| recipe | what differs from the plain one |
|---|---|
| long | four times the epochs |
| ema | the same, weights averaged on the way (decay 0.999) |
| batch_4, batch_16 | four times the structures seen, in smaller or larger batches |
| wide | twice the features, twice the epochs |
| decay | long, AdamW with weight decay 0.01 |
| noise | long; BLIP's noise in the first half, plain from its means on in the second |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from studies.accuracy.run import execute
from studies.errorbars.data import data_folder
from studies.errorbars.study import PAPER, TRAINING
from studies.spec import Layout, RunSpec
from studies.tables import Column, Row, Table

__all__ = ["PROFILES", "execute", "prepare", "specs", "table"]

STUDY = "accuracy"


@dataclass(frozen=True)
class Recipe:
    """How one model is trained.

    Attributes:
        epochs: in units of the plain recipe's.
        width: in units of the plain model's.
        training: what else differs from the plain recipe.
        noise: training with BLIP's noise that comes before, in the first half of the epochs.
    """

    epochs: int = 4
    width: int = 1
    training: Mapping[str, Any] = field(default_factory=dict)
    noise: Mapping[str, Any] | None = None


RECIPES: dict[str, Recipe] = {
    "plain": Recipe(epochs=1),
    "long": Recipe(),
    "ema": Recipe(training={"ema_decay": 0.999}),
    "wide": Recipe(epochs=2, width=2),
    "batch_4": Recipe(epochs=2, training={"batch_size": 4}),
    "batch_16": Recipe(training={"batch_size": 16}),
    "decay": Recipe(training={"optimizer": "adamw", "weight_decay": 0.01}),
    "noise": Recipe(noise={"kl_weight": 10.0, "loss_unit": "kcal/mol"}),
}


@dataclass(frozen=True)
class Profile:
    """How large the study is: set -> width of PaiNN and epochs of the plain recipe; seeds."""

    sets: Mapping[str, tuple[int, int]]
    seeds: int
    tested: int = 300


PROFILES: dict[str, Profile] = {
    "quick": Profile({"nh3": (8, 2)}, seeds=1, tested=8),
    "default": Profile({"nh3": (64, 400), "acac-100": (64, 300)}, seeds=3),
}


def specs(profile: str) -> list[RunSpec]:
    """List the runs of a profile, the first seed of every recipe first."""
    size = PROFILES[profile]
    sets = [name for name in size.sets if name == "nh3" or data_folder() is not None]
    return [
        _spec(size, data, recipe, seed)
        for seed in range(size.seeds)
        for data in sets
        for recipe in RECIPES
    ]


def _spec(size: Profile, data: str, name: str, seed: int) -> RunSpec:
    recipe = RECIPES[name]
    features, epochs = size.sets[data]
    training = {**TRAINING, "epochs": recipe.epochs * epochs, **recipe.training}
    settings: dict[str, Any] = {
        "hyperparameters": {"cutoff": 5.0, "features": recipe.width * features},
        "training": training,
        "data": data,
        "tested": size.tested,
    }
    if recipe.noise is not None:
        half = training["epochs"] // 2
        settings["training"] = {**training, "epochs": half}
        settings["noise"] = {
            "bayes": {name: value for name, value in PAPER.items() if name != "kind"},
            "training": {**training, "epochs": half, "noise": True, **recipe.noise},
        }
    return RunSpec(STUDY, f"{data}-{name}", settings, seed)


def prepare(profile: str, console: Console) -> None:
    """Warn where the public data are missing."""
    if data_folder() is None:
        console.print("ammonia alone: there is no $BLIPS_DATA")


COLUMNS = (
    Column("valid F MAE", "valid_forces_mae", factor=1e3, digits=1),
    Column("valid E MAE", "valid_energy_mae", factor=1e3, digits=1),
    Column("near F MAE", "near_forces_mae", factor=1e3, digits=1),
    Column("near E MAE", "near_energy_mae", factor=1e3, digits=1),
    Column("far F MAE", "far_forces_mae", factor=1e3, digits=1),
    Column("far E MAE", "far_energy_mae", factor=1e3, digits=1),
    Column("seconds", "cpu_seconds", digits=0),
)
NOTE = """\
MAE of force components (meV/A) and of energies of structures (meV). "valid" chooses the epoch, and
the recipe; nothing is chosen on near and far. Seconds: processor time of one run."""


def table(specs: Sequence[RunSpec], layout: Layout) -> Table:
    """Tabulate recipes by errors, for each set, of the results that there are."""
    rows: list[Row] = []
    for data in dict.fromkeys(spec.settings["data"] for spec in specs):
        for name in RECIPES:
            of_recipe = [spec for spec in specs if spec.name == f"{data}-{name}"]
            found = [result for spec in of_recipe if (result := layout.read(spec)) is not None]
            rows.append(Row((data, name), [_with_seconds(result) for result in found]))
    title = "One PaiNN, several recipes; mean ± standard deviation over seeds"
    return Table(("data", "recipe"), COLUMNS, rows, title, NOTE)


def _with_seconds(result: dict[str, Any]) -> dict[str, Any]:
    metrics = {**result["metrics"], "cpu_seconds": {"value": result["cpu_seconds"]}}
    return {**result, "metrics": metrics}
