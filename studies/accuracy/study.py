"""What brings one model to the accuracy of a deep ensemble, at the ensemble's training cost?

Two PaiNNs from scratch, with sets, splits and the plain recipe of the study errorbars, and
MatterSim fine-tuned to 32 silica structures as in the study silica. Four plain models together are
up to 17 % more accurate than one of them. Recipes get at most about the processor
time of these four trainings, single structures of ammonia more. They are judged by errors on
validation structures near the training data, and by their cost; README.md says what was taken.

| recipe | what differs from the plain one |
|---|---|
| long | four times the epochs |
| ema | the same, weights averaged on the way (decay 0.999) |
| half_batch, quarter_batch | four times the steps, in smaller batches |
| single | batches of an eighth, one structure each; eight times the steps |
| noise_quarter | quarter_batch, with noise first as below |
| double_batch | four times the epochs, in larger batches |
| wide | twice the features, twice the epochs (from scratch only) |
| decay | long, AdamW with weight decay 0.01 |
| restart | long; the second half of the epochs goes through the schedule of rates again |
| noise | the same, with BLIP's noise in the first half, and plain from its means on |

The profile `finetuning` asks whether fine-tuning with BLIP is more accurate than without, with as
many steps and the learning rate that each of them needs by validation: `plain` and `blip` (noise to
the end; its posterior means are measured), 1 or 4 times the epochs, half, once or twice the rate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rich.console import Console

from studies.accuracy.run import execute
from studies.errorbars.data import data_folder
from studies.errorbars.study import PAPER, TRAINING
from studies.silica.study import BLIP as SILICA_BLIP
from studies.silica.study import BLIP_TRAINING as SILICA_NOISE
from studies.silica.study import TRAINING as SILICA_TRAINING
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
        batch: in units of the plain recipe's.
        rate: in units of the plain recipe's.
        training: what else differs from the plain recipe.
        first: what the training begins with, before it is plain.
        share: of the epochs that is.
    """

    epochs: int = 4
    width: int = 1
    batch: float = 1.0
    rate: float = 1.0
    training: Mapping[str, Any] = field(default_factory=dict)
    first: Literal["noise", "plain"] | None = None
    share: float = 0.5


RECIPES: dict[str, Recipe] = {
    "plain": Recipe(epochs=1),
    "long": Recipe(),
    "ema": Recipe(training={"ema_decay": 0.999}),
    "wide": Recipe(epochs=2, width=2),
    "half_batch": Recipe(epochs=2, batch=0.5),
    "quarter_batch": Recipe(epochs=1, batch=0.25),
    "single": Recipe(epochs=1, batch=0.125),
    "noise_quarter": Recipe(epochs=1, batch=0.25, first="noise"),
    "double_batch": Recipe(batch=2.0),
    "decay": Recipe(training={"optimizer": "adamw", "weight_decay": 0.01}),
    "restart": Recipe(first="plain"),
    "noise": Recipe(first="noise"),
}
FINETUNING: dict[str, Recipe] = {
    f"{name}_{epochs}x_rate{rate:g}": replace(recipe, epochs=epochs, rate=rate)
    for name, recipe in (("plain", Recipe()), ("blip", Recipe(first="noise", share=1.0)))
    for epochs in (1, 4)
    for rate in (0.5, 1.0, 2.0)
}


@dataclass(frozen=True)
class Plain:
    """The plain recipe of a set, and BLIP's noise there as its own study has it.

    Attributes:
        model: backbone and hyperparameters.
        training: settings, the epochs among them.
        bayes: settings of the posterior.
        noise: what training with the noise adds to the settings.
    """

    model: Mapping[str, Any]
    training: Mapping[str, Any]
    bayes: Mapping[str, Any]
    noise: Mapping[str, Any]

    @property
    def from_scratch(self) -> bool:
        """Whether the width is free to choose."""
        return "hyperparameters" in self.model

    def allows(self, recipe: Recipe) -> bool:
        """Whether the recipe can be had: a free width, and batches of one structure at least."""
        is_whole = recipe.batch * self.training["batch_size"] >= 1
        return is_whole and (recipe.width == 1 or self.from_scratch)


def _painn(features: int, epochs: int) -> Plain:
    return Plain(
        {"backbone": "painn", "hyperparameters": {"cutoff": 5.0, "features": features}},
        {**TRAINING, "epochs": epochs},
        {name: value for name, value in PAPER.items() if name != "kind"},
        {"kl_weight": 10.0, "loss_unit": "kcal/mol"},
    )


@dataclass(frozen=True)
class Profile:
    """How large the study is: the sets, the recipes, and the seeds of each."""

    sets: Mapping[str, Plain]
    seeds: int
    tested: int = 300
    recipes: Mapping[str, Recipe] = field(default_factory=lambda: RECIPES)


SILICA = Plain(
    {"backbone": "mattersim-1m"},
    {**SILICA_TRAINING, "epochs": 30},
    {name: value for name, value in SILICA_BLIP.items() if name != "kind"},
    SILICA_NOISE,
)
PROFILES: dict[str, Profile] = {
    "quick": Profile({"nh3": _painn(8, 2)}, seeds=1, tested=8),
    "default": Profile(
        {"nh3": _painn(64, 400), "acac-100": _painn(64, 300), "silica-32": SILICA}, seeds=3
    ),
    "finetuning": Profile({"silica-32": SILICA}, seeds=1, recipes=FINETUNING),
}


def specs(profile: str) -> list[RunSpec]:
    """List the runs of a profile, the first seed of every recipe first."""
    size = PROFILES[profile]
    sets = [name for name in size.sets if name == "nh3" or data_folder() is not None]
    return [
        _spec(size, data, name, seed)
        for seed in range(size.seeds)
        for data in sets
        for name, recipe in size.recipes.items()
        if size.sets[data].allows(recipe)
    ]


def _spec(size: Profile, data: str, name: str, seed: int) -> RunSpec:
    recipe, plain = size.recipes[name], size.sets[data]
    model, training = dict(plain.model), {**plain.training, **recipe.training}
    training["batch_size"] = int(recipe.batch * training["batch_size"])
    training["epochs"] *= recipe.epochs
    training["lr"] *= recipe.rate
    if plain.from_scratch:
        given = plain.model["hyperparameters"]
        model["hyperparameters"] = {**given, "features": recipe.width * given["features"]}
    settings: dict[str, Any] = {
        "model": model,
        "training": training,
        "data": data,
        "tested": size.tested,
    }
    if recipe.first:
        epochs = round(recipe.share * training["epochs"])
        settings["training"] = {**training, "epochs": training["epochs"] - epochs}
        first, bayes = {**training, "epochs": epochs}, None
        if recipe.first == "noise":
            first, bayes = {**first, **plain.noise, "noise": True}, dict(plain.bayes)
        settings["first"] = {"bayes": bayes, "training": first}
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
the recipe; nothing is chosen on near and far (silica: known and new topologies). Seconds: processor
time of one run."""


def table(specs: Sequence[RunSpec], layout: Layout) -> Table:
    """Tabulate recipes by errors, for each set, of the results that there are."""
    rows: list[Row] = []
    for name in dict.fromkeys(spec.name for spec in specs):
        of_recipe = [spec for spec in specs if spec.name == name]
        found = [result for spec in of_recipe if (result := layout.read(spec)) is not None]
        data = of_recipe[0].settings["data"]
        rows.append(Row((data, name.removeprefix(f"{data}-")), [_with_seconds(r) for r in found]))
    title = "One model, several recipes; mean ± standard deviation over seeds"
    return Table(("data", "recipe"), COLUMNS, rows, title, NOTE)


def _with_seconds(result: dict[str, Any]) -> dict[str, Any]:
    metrics = {**result["metrics"], "cpu_seconds": {"value": result["cpu_seconds"]}}
    return {**result, "metrics": metrics}
