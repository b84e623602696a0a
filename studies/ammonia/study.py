"""Ammonia: the out-of-distribution study of the BLIP paper, with more methods beside.

PaiNN learns energies and forces of NH3 near its minimum and is tested on distorted geometries:

| set | train | validation | test |
|---|---|---|---|
| shipped | 64, 0-5 kcal/mol (`blips.data.ammonia`) | 14 of the same kind | 129, 5-70 kcal/mol |
| public | first 64 of `train_78` | those of the other 14 that are no copies | 30, `attack_30a` |

The public set needs $BLIPS_DATA/ammonia; five of its validation geometries are copies of training
geometries. Validation data choose checkpoints and learning rates, give LLPR and the mixture their
scales, and calibrate all. Nothing is chosen on test data.

Loss: MAE, 0.1 energy + 1.0 forces in kcal/mol and A, for BLIP + lambda KL with p = 0.5 and
coefficients up to 4. Mean-variance and evidential models have their likelihoods, the shallow
ensemble the CRPS, with the same weights. K = 100 samples at test time.

| method | what it is |
|---|---|
| base | the plain model |
| deep_ensemble | five seeds of `base` together, others in every ensemble |
| llpr, gmm | error bars for `base` from its last-layer features, or its embeddings' density |
| mean_variance, evidential, shallow_ensemble, mc_dropout | see `studies.baselines` |
| blip_local_paper | local estimator on scalar maps, paper's inference network, lambda 10 |
| blip_flipout | flipout, vector maps too, nodes see their neighbours, lambda 3 |
| blip_flipout_crps | the same with the CRPS of two samples, lambda 1 |
| blip_beyond | flipout with the prior beyond the data (KL on displaced structures) |
| blip_afterwards | `base`, trained; then a posterior around its weights, which stay as they are |
| conditioned | `base`, and a posterior of its readout that is conditioned on the training data |
| blip_conditioned | the same on top of `blip_local_paper`, with its means and coefficients |
| ..._frozen | the same trained model as a committee of frozen draws (noise shared by all rows) |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from studies.ammonia.data import public_folder
from studies.ammonia.run import execute
from studies.spec import Layout, RunSpec
from studies.tables import Column, Row, Table, paper_results

__all__ = ["PROFILES", "execute", "prepare", "specs", "table"]

STUDY = "ammonia"
PAINN = {"cutoff": 5.0, "blocks": 3, "num_basis": 16}


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        label: what the table calls it.
        model: its kind and options, see `ammonia_run`.
        training: what differs from the profile's.
        built_on: the method whose trained models it takes, None for one that is trained itself.
        paper: name of the paper's row beside it.
    """

    label: str
    model: Mapping[str, Any]
    training: Mapping[str, Any] = field(default_factory=dict)
    built_on: str | None = None
    paper: str | None = None


BLIP = {"kind": "blip", "prior_dropout": 0.5, "bounds": [1e-5, 4.0]}
FLIPOUT = {**BLIP, "estimator": "flipout", "encoder": {"variant": "neighbourhood"}}
LOCAL = {
    **BLIP,
    "estimator": "local",
    "exclude": ["blocks.*.update.mixing"],
    "encoder": {"variant": "paper-ammonia"},
}
FROZEN = {"kind": "frozen"}
# Chosen in the study `ammonia-choices`, on training data alone.
BEYOND = {"kl_weight": 0.03, "beyond_weight": 0.3, "beyond_displacement": 0.5, "encoder_lr": 5e-3}
AFTERWARDS = {
    **BEYOND,
    "loss": "crps",
    "samples": 2,
    "epochs": 100,
    "freeze_backbone": True,
    "schedule": {"kind": "cosine"},
}
METHODS: dict[str, Method] = {
    "base": Method("base", {"kind": "base"}),
    "deep_ensemble": Method(
        "deep ensemble", {"kind": "deep_ensemble"}, built_on="base", paper="deep_ensemble"
    ),
    "evidential": Method("evidential", {"kind": "evidential", "penalty": 0.2}, paper="evidential"),
    "mean_variance": Method("mean-variance", {"kind": "mean_variance"}, paper="mean_variance"),
    "gmm": Method("GMM", {"kind": "gmm", "components": 2}, built_on="base", paper="gmm"),
    "llpr": Method("LLPR", {"kind": "llpr"}, built_on="base"),
    "conditioned": Method("conditioned", {"kind": "conditioned"}, built_on="base"),
    "shallow_ensemble": Method(
        "shallow ensemble", {"kind": "shallow_ensemble", "heads": 16, "loss": "crps"}
    ),
    "mc_dropout": Method("MC dropout 0.1", {"kind": "mc_dropout", "rate": 0.1}),
    "blip_local_paper": Method("BLIP, local (paper)", LOCAL, {"kl_weight": 10.0}, paper="blip"),
    "blip_local_paper_frozen": Method(
        "BLIP, local (paper), frozen", FROZEN, built_on="blip_local_paper"
    ),
    "blip_conditioned": Method(
        "BLIP, local (paper), conditioned",
        {"kind": "conditioned", "coefficients": "network"},
        built_on="blip_local_paper",
    ),
    "blip_flipout": Method("BLIP, flipout", FLIPOUT, {"kl_weight": 3.0}),
    "blip_flipout_frozen": Method("BLIP, flipout, frozen", FROZEN, built_on="blip_flipout"),
    "blip_beyond": Method("BLIP, flipout, beyond", FLIPOUT, BEYOND),
    "blip_beyond_frozen": Method("BLIP, flipout, beyond, frozen", FROZEN, built_on="blip_beyond"),
    "blip_afterwards": Method(
        "BLIP around base", {**FLIPOUT, "kind": "blip_afterwards"}, AFTERWARDS, built_on="base"
    ),
    "blip_flipout_crps": Method(
        "BLIP, flipout, CRPS", FLIPOUT, {"kl_weight": 1.0, "loss": "crps", "samples": 2}
    ),
    "blip_flipout_crps_frozen": Method(
        "BLIP, flipout, CRPS, frozen", FROZEN, built_on="blip_flipout_crps"
    ),
}
EARLY = (
    "base",
    "blip_beyond",
    "blip_afterwards",
    "blip_flipout",
    "blip_local_paper",
    "llpr",
    "shallow_ensemble",
    "gmm",
)
TRAINING: dict[str, Any] = {
    "epochs": 500,
    "batch_size": 64,
    "loss": "mae",
    "loss_unit": "kcal/mol",
    "weights": {"energy": 0.1, "forces": 1.0},
    "optimizer": "adam",
    "lr": 1e-3,
    "schedule": {"kind": "plateau", "factor": 0.5, "patience": 30},
    "checkpoint_every": 10,
    "threads": 1,
    "tensorboard": False,
}


@dataclass(frozen=True)
class Profile:
    """How large the study is.

    Attributes:
        features: width of PaiNN.
        seeds: of each method but the deep ensemble.
        training: what differs from `TRAINING`.
        sizes: geometries to train, validate and test, at most.
        methods: the rows.
        sets: of `shipped` and `public`.
        members: of a deep ensemble.
        ensembles: how many of them; no two share a member.
        samples: K at test time.
        bootstrap: resamples for the intervals of the metrics.
    """

    features: int
    seeds: int
    training: Mapping[str, Any]
    sizes: Mapping[str, int]
    methods: tuple[str, ...] = tuple(METHODS)
    sets: tuple[str, ...] = ("shipped", "public")
    members: int = 5
    ensembles: int = 1
    samples: int = 100
    bootstrap: int = 1000


SIZES = {"train": 64, "valid": 14, "test": 129}
OF_THE_PAPER = (  # its rows, and what can be put around the same models
    "base",
    "deep_ensemble",
    "evidential",
    "mean_variance",
    "gmm",
    "llpr",
    "conditioned",
    "mc_dropout",
    "blip_local_paper",
    "blip_local_paper_frozen",
    "blip_conditioned",
    "blip_flipout",
)
PROFILES: dict[str, Profile] = {
    "quick": Profile(
        features=8,
        seeds=1,
        training={"epochs": 3, "batch_size": 8},
        sizes={"train": 16, "valid": 6, "test": 8},
        sets=("shipped",),
        members=2,
        samples=8,
        bootstrap=50,
    ),
    "default": Profile(
        features=64,
        seeds=3,
        # Least validation loss of batches of 16 and 64, plateau and cosine, base and BLIP alike.
        training={"epochs": 300, "batch_size": 16},
        sizes=SIZES,
    ),
    "paper": Profile(128, 4, {}, SIZES, OF_THE_PAPER, ensembles=4),
}


def specs(profile: str) -> list[RunSpec]:
    """List the runs of a profile, ordered so that every row of the table gets a seed early."""
    size = PROFILES[profile]
    sets = [name for name in size.sets if name == "shipped" or public_folder() is not None]
    early = [*EARLY, *(f"{name}_frozen" for name in EARLY)]
    order = sorted(
        size.methods, key=lambda name: early.index(name) if name in early else len(early)
    )
    order.remove("deep_ensemble")
    plain = range(1, max(size.members * size.ensembles, size.seeds))
    found: list[RunSpec] = []
    for data in sets:
        found += [_spec(size, data, method, 0) for method in order]
        found += [_spec(size, data, "base", k) for k in plain]
        found += [_spec(size, data, "deep_ensemble", k) for k in range(size.ensembles)]
    for seed in range(1, size.seeds):
        for data in sets:
            found += [_spec(size, data, method, seed) for method in order if method != "base"]
    return found


def _spec(size: Profile, data: str, name: str, seed: int) -> RunSpec:
    method = METHODS[name]
    seeds: Sequence[int] = (seed,)
    if name == "deep_ensemble":
        seeds = range(seed * size.members, (seed + 1) * size.members)
    needs = tuple(f"{data}-{method.built_on}-seed{k}" for k in seeds) if method.built_on else ()
    is_trained = bool(method.training) or method.built_on is None
    trained = method if is_trained else METHODS[method.built_on or name]
    settings = {
        "hyperparameters": {**PAINN, "features": size.features},
        "method": dict(method.model),
        "trained": dict(trained.model),
        "training": {**TRAINING, **size.training, **trained.training},
        "data": {"set": data, **size.sizes},
        "samples": size.samples,
        "bootstrap": size.bootstrap,
    }
    return RunSpec(STUDY, f"{data}-{name}", settings, seed, needs)


def prepare(profile: str, console: Console) -> None:
    """Warn where the public geometries are missing."""
    if "public" in PROFILES[profile].sets and public_folder() is None:
        console.print("without the public geometries: there is no $BLIPS_DATA/ammonia")


COLUMNS = (
    Column("E MAE", "energy_mae", digits=2, paper=0),
    Column("F MAE", "forces_mae", digits=2, paper=1),
    Column("F ECE", "forces_ece", paper=2),
    Column("calibrated", "forces_ece_calibrated"),
    Column("rho structure", "structure_spearman", paper=3),
    Column("rho atom", "atom_spearman"),
    Column("F NLL", "forces_nll", digits=2),
    Column("calibrated", "forces_nll_calibrated", digits=2),
    Column("F CRPS", "forces_crps", digits=2),
    Column("calibrated", "forces_crps_calibrated", digits=2),
    Column("F within 90 %", "forces_coverage_90"),
    Column("calibrated", "forces_coverage_90_calibrated"),
)
NOTE = """\
kcal/mol and A. E MAE: of structures. F MAE, ECE, CRPS and coverage of the central 90 % interval:
of force components. NLL: Gaussian, sum of an atom's three components. rho: Spearman, variance
against squared error of structures and of atoms. Calibrated: after one factor on all sigmas, fitted
on validation data; it leaves MAE and rho as they are. The validation geometries are near the
minimum, those of the test are not. LLPR, GMM and conditioned rows have their scale from validation
data already. Frozen: a committee of draws with the same noise for all rows; other BLIP
rows have noise of their own for each row. The paper tests on other geometries: compare rows with
each other, not with its numbers."""


def table(specs: Sequence[RunSpec], layout: Layout) -> Table:
    """Tabulate methods by metrics, for each set, of the results that there are."""
    published = paper_results()["ammonia_ood"]
    rows: list[Row] = []
    for data in dict.fromkeys(spec.settings["data"]["set"] for spec in specs):
        for name, method in METHODS.items():
            of_method = [spec for spec in specs if spec.name == f"{data}-{name}"]
            if not of_method:
                continue
            results = [found for spec in of_method if (found := layout.read(spec)) is not None]
            paper = published.get(method.paper, ()) if data == "shipped" else ()
            spread = published["blip_std"] if paper and method.paper == "blip" else ()
            rows.append(Row((data, method.label), results, paper, spread))
    size = specs[0].settings
    title = (
        f"Ammonia, out of distribution; PaiNN with {size['hyperparameters']['features']} features "
        f"(paper: 128), {size['training']['epochs']} epochs (paper: 500), {size['samples']} "
        "samples; mean ± standard deviation over seeds"
    )
    return Table(("data", "method"), COLUMNS, rows, title, NOTE)
