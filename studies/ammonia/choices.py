"""What drives the quality of a Bayesian potential: one choice varied at a time, on ammonia.

Choices are made here, on training data alone: of the 92 geometries of `blips.data.ammonia` below
5 kcal/mol, those of the lower half are trained on (and, every fifth, validated on), and those of
the upper half stand for what lies beyond the data. The test geometries of the ammonia study
(5 to 70 kcal/mol) are not looked at.

Every row differs from the centre (lambda 0.1, mu 1, 0.5 A) in what its name says. Rows "frozen"
and "K = ..." are the same trained model, predicting in another way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from studies.ammonia.run import execute
from studies.ammonia.study import AFTERWARDS, BLIP, FLIPOUT, PAINN, TRAINING
from studies.spec import Layout, RunSpec
from studies.tables import Column, Row, Table

__all__ = ["PROFILES", "execute", "prepare", "specs", "table"]

STUDY = "ammonia-choices"
CENTRE = {"kl_weight": 0.1, "beyond_weight": 1.0, "beyond_displacement": 0.5, "encoder_lr": 5e-3}
LOCAL = {**BLIP, "estimator": "local", "encoder": {"variant": "neighbourhood"}}
SMALL_START = {"initial": 0.01}
WITHOUT_VECTORS = {"exclude": ["blocks.*.update.mixing"]}


@dataclass(frozen=True)
class Choice:
    """A row of the table: what differs from the default, in model, training and prediction.

    Attributes:
        group: what is varied.
        label: to what.
        model: options in place of the default model's.
        training: options in place of the default training's.
        built_on: the row whose trained models it takes.
        samples: K at test time, None for the profile's.
    """

    group: str
    label: str
    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    built_on: str | None = None
    samples: int | None = None


def _training(group: str, key: str, *values: float) -> dict[str, Choice]:
    return {
        f"{key}_{value:g}": Choice(group, f"{value:g}", training={key: value}) for value in values
    }


CHOICES: dict[str, Choice] = {
    "default": Choice("centre", "centre"),
    "default_frozen": Choice("prediction", "frozen draws", {"kind": "frozen"}, built_on="default"),
    "samples_8": Choice("prediction", "K = 8", {"kind": "sampled"}, built_on="default", samples=8),
    "samples_32": Choice(
        "prediction", "K = 32", {"kind": "sampled"}, built_on="default", samples=32
    ),
    "samples_400": Choice(
        "prediction", "K = 400", {"kind": "sampled"}, built_on="default", samples=400
    ),
    "base": Choice("no posterior", "plain model", {"kind": "base"}),
    **_training("mu, beyond the data", "beyond_weight", 0.0, 0.1, 10.0),
    **_training("displacement, A", "beyond_displacement", 0.2, 1.0),
    **_training("lambda", "kl_weight", 0.01, 1.0, 10.0),
    "paper_objective": Choice(
        "lambda", "3, and mu = 0", training={"kl_weight": 3.0, "beyond_weight": 0.0}
    ),
    **{
        f"weights_{a:g}_{b:g}": Choice(
            "lambda and mu", f"{a:g} and {b:g}", training={"kl_weight": a, "beyond_weight": b}
        )
        for a, b in ((0.01, 0.1), (0.03, 0.3), (0.01, 0.03))
    },
    "elbo": Choice(
        "KL reduction",
        "elbo, 0.01",
        training={"kl_reduction": "elbo", "kl_weight": 0.01, "beyond_weight": 0.01},
    ),
    "prior_0.1": Choice("prior p", "0.1", {"prior_dropout": 0.1}),
    "prior_0.3": Choice("prior p", "0.3", {"prior_dropout": 0.3}),
    "prior_0.7": Choice("prior p", "0.7", {"prior_dropout": 0.7}),
    "local": Choice("estimator", "local, scalar maps", {**LOCAL, **WITHOUT_VECTORS}),
    "scalar_maps": Choice("estimator", "flipout, scalar maps", WITHOUT_VECTORS),
    "crps": Choice("loss", "CRPS, 2 samples", training={"loss": "crps", "samples": 2}),
    "nll": Choice("loss", "NLL, 4 samples", training={"loss": "nll", "samples": 4}),
    "initial": Choice("start", "coefficients 0.01", SMALL_START),
    **{
        name: Choice(
            "lambda, mu, start, prior",
            f"{a:g}, {b:g}, {SMALL_START['initial']:g}, {prior:g}",
            {**SMALL_START, "prior_dropout": prior},
            {"kl_weight": a, "beyond_weight": b},
        )
        for name, a, b, prior in (
            ("together", 0.03, 0.3, 0.5),
            ("together_mu_1", 0.03, 1.0, 0.5),
            ("together_prior_0.3", 0.03, 1.0, 0.3),
        )
    },
    "afterwards": Choice(
        "start",
        "plain model, then posterior",
        {"kind": "blip_afterwards"},
        {**AFTERWARDS, **CENTRE},
        "base",
    ),
    "shared": Choice(
        "coefficients",
        "one per layer",
        {"encoder": {"variant": "neighbourhood", "share": "layer"}},
    ),
    "no_neighbours": Choice(
        "coefficients", "nodes see their element alone", {"encoder": {"variant": "paper-nbody"}}
    ),
    "encoder_lr_0.001": Choice("inference network", "lr 0.001", training={"encoder_lr": 0.001}),
    "encoder_lr_0.01": Choice("inference network", "lr 0.01", training={"encoder_lr": 0.01}),
}


@dataclass(frozen=True)
class Profile:
    """How large the study is: width of PaiNN, seeds, training, K, bootstrap resamples."""

    features: int
    seeds: int
    training: Mapping[str, Any]
    samples: int = 100
    bootstrap: int = 200
    choices: tuple[str, ...] = tuple(CHOICES)


PROFILES: dict[str, Profile] = {
    "quick": Profile(8, 1, {"epochs": 3, "batch_size": 8}, 8, 20, ("default", "default_frozen")),
    "default": Profile(64, 2, {"epochs": 300, "batch_size": 16}),
    "paper": Profile(128, 4, {}),
}


def specs(profile: str) -> list[RunSpec]:
    """List the runs of a profile, seed by seed."""
    size = PROFILES[profile]
    return [_spec(size, name, seed) for seed in range(size.seeds) for name in size.choices]


def _spec(size: Profile, name: str, seed: int) -> RunSpec:
    choice = CHOICES[name]
    is_trained = bool(choice.training) or choice.built_on is None
    trained = choice if is_trained else CHOICES[choice.built_on or name]
    method = {**FLIPOUT, **choice.model}
    plain = choice.model.get("kind") in ("base", "frozen", "sampled")
    settings = {
        "hyperparameters": {**PAINN, "features": size.features},
        "method": dict(choice.model) if plain else method,
        "trained": {**FLIPOUT, **trained.model},
        "training": {**TRAINING, **size.training, **CENTRE, **trained.training},
        "data": {"set": "inner", "train": 92, "valid": 92, "test": 92},
        "samples": choice.samples or size.samples,
        "bootstrap": size.bootstrap,
    }
    needs = (f"{choice.built_on}-seed{seed}",) if choice.built_on else ()
    return RunSpec(STUDY, name, settings, seed, needs)


def prepare(profile: str, console: Console) -> None:
    """Do nothing: no data have to be made."""


COLUMNS = (
    Column("F MAE valid", "valid_forces_mae", digits=2),
    Column("F MAE", "forces_mae", digits=2),
    Column("MAP", "forces_mae_map", digits=2),
    Column("F ECE", "forces_ece"),
    Column("rho structure", "structure_spearman"),
    Column("rho atom", "atom_spearman"),
    Column("F NLL", "forces_nll", digits=2),
    Column("F CRPS", "forces_crps", digits=2),
    Column("F within 90 %", "forces_coverage_90"),
    Column("E rho", "energy_spearman"),
    Column("E NLL", "energy_nll", digits=2),
)
NOTE = """\
kcal/mol and A, as predicted (not calibrated). "F MAE valid" is on validation geometries of the
lower half, of the posterior means; all other columns are on the upper half. "F MAE" is of the
sample mean, "MAP" of the posterior means; the other metrics are those of the ammonia study."""


def table(specs: Sequence[RunSpec], layout: Layout) -> Table:
    """Tabulate choices by metrics, of the results that there are."""
    rows = []
    for name in dict.fromkeys(spec.name for spec in specs):
        found = [layout.read(spec) for spec in specs if spec.name == name]
        results = [result for result in found if result is not None]
        rows.append(Row((CHOICES[name].group, CHOICES[name].label), results))
    title = (
        f"Choices, on the upper half of the training energies of ammonia; "
        f"{specs[0].settings['training']['epochs']} epochs; mean ± standard deviation over seeds"
    )
    return Table(("varied", "to"), COLUMNS, rows, title, NOTE)
