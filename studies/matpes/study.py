"""MatPES: active learning of a released potential from a labelled pool, after the BLIP paper.

From a few known structures, a potential is fine-tuned in rounds; before each it may choose a tenth
of the pool to have labelled. The paper does it with ORB v3 on 0.1 % (known), 2.5 % (pool) and 79 %
(test) of MatPES. By default it is CHGNet here, which knows relaxations, on compounds at high
temperature and pressure, which it does not know (`matpes_data`); `data=mptrj` is relaxations,
`data=FILE` a MatPES release, `model=` another model.

| method | what it is |
|---|---|
| no_blip | the plain model, on the structures that `blip_random` drew |
| blip_random | BLIP, the batch drawn at random |
| blip_energy | BLIP, largest energy std per atom (the paper's rule) |

All methods of a seed start from the same known structures and choose from the same pool.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from blips.backbones import RELEASED
from blips.errors import ConfigError
from studies.matpes.run import execute
from studies.spec import Layout, RunSpec
from studies.tables import Column, Row, Table, mean_and_spread, paper_results

__all__ = ["PROFILES", "draw", "execute", "prepare", "specs", "table"]

STUDY = "matpes"
MODEL = "chgnet"
DATA = "hot"
TRAINING: dict[str, Any] = {
    "loss": "huber",
    "huber_delta": 0.01,
    "energy_per_atom": True,
    "weights": {"energy": 0.1, "forces": 1.0},
    "optimizer": "adamw",
    "lr": 1e-3,
    "encoder_lr": 1e-3,
    "kl_weight": 3e-4,
    "clip_norm": 0.5,
    "batch_size": 4,
    "schedule": {"kind": "cosine", "warmup": 0.05},
    "ema_decay": 0.95,
    "threads": 1,
    "tensorboard": False,
}
BAYES = {"initial": 1e-4}
METHODS: dict[str, tuple[str, dict[str, Any] | None, str | None]] = {  # label, selection, paper
    "no_blip": ("no BLIP, random", None, "no_blip"),
    "blip_random": ("BLIP, random", {"score": "random"}, "blip_random"),
    "blip_energy": (
        "BLIP, energy std (paper)",
        {"score": "energy_std", "diversity": False},
        "blip_uncertainty",
    ),
}
ORDER = ("blip_random", "blip_energy", "no_blip")


@dataclass(frozen=True)
class Profile:
    """How large the study is.

    Attributes:
        data: `initial`, `pool` and `test` structures, and `max_atoms` of each.
        batch: labels in a round.
        rounds: of selection; the model is trained once more than that.
        epochs: of every round.
        seeds: of every method.
        samples: K for selection and test.
        valid: fraction of labels that choose the epoch.
        bootstrap: resamples for the intervals of the metrics.
        training: what differs from `TRAINING`.
    """

    data: Mapping[str, int]
    batch: int
    rounds: int
    epochs: int
    seeds: int
    samples: int
    valid: float = 0.15
    bootstrap: int = 200
    training: Mapping[str, Any] = field(default_factory=dict)


PROFILES: dict[str, Profile] = {
    "quick": Profile(
        data={"initial": 4, "pool": 8, "test": 4, "max_atoms": 5},
        batch=2,
        rounds=1,
        epochs=1,
        seeds=1,
        samples=3,
        valid=0.25,
        bootstrap=10,
    ),
    "default": Profile(
        data={"initial": 12, "pool": 120, "test": 60, "max_atoms": 10},
        batch=12,
        rounds=5,
        epochs=6,
        seeds=3,
        samples=6,
    ),
    # 0.1 %, 2.5 % and 79 % of the 434,712 structures of MatPES-PBE, a tenth of the pool at once.
    "paper": Profile(
        data={"initial": 435, "pool": 10868, "test": 343422, "max_atoms": 1000},
        batch=1087,
        rounds=5,
        epochs=25,
        seeds=3,
        samples=32,
        training={
            "weights": {"energy": 1.0, "forces": 1.0},
            "batch_size": 128,
            "schedule": {"kind": "constant"},
            "lr": 1e-5,
            "kl_weight": 3e-5,
            "threads": None,
        },
    ),
}


def specs(
    profile: str, model: str = MODEL, weights: str | None = None, data: str = DATA
) -> list[RunSpec]:
    """List the runs of a profile, all methods of a seed together.

    Args:
        profile: one of `PROFILES`.
        model: name of a released model.
        weights: file of its weights, where its package has none.
        data: name of a set, MatPES release, or another labelled file, see `matpes_data`.
    """
    if model not in RELEASED:
        raise ConfigError(f"unknown model {model!r}; use one of {', '.join(sorted(RELEASED))}")
    size = PROFILES[profile]
    released = {"backbone": model} | ({"weights": weights} if weights else {})
    return [_spec(size, released, data, name, seed) for seed in range(size.seeds) for name in ORDER]


def _spec(size: Profile, released: Mapping[str, str], data: str, name: str, seed: int) -> RunSpec:
    settings = {
        "model": dict(released),
        "bayes": dict(BAYES),
        "training": {**TRAINING, "epochs": size.epochs, **size.training},
        "data": {"name": data, **size.data},
        "select": METHODS[name][1],
        "batch": size.batch,
        "rounds": size.rounds,
        "samples": size.samples,
        "method": "frozen",
        "valid": size.valid,
        "bootstrap": size.bootstrap,
    }
    needs = (f"blip_random-seed{seed}",) if name == "no_blip" else ()
    return RunSpec(STUDY, name, settings, seed, needs)


def prepare(profile: str, console: Console) -> None:
    """Do nothing: every run looks for the structures itself."""


NOTE = """\
E MAE: meV/atom. F MAE: meV/A, of force components. Both of the posterior means, on test structures
that no run trains on or chooses; "at first": trained on the known structures alone. ECE and rho
(Spearman, variance against squared error of atoms) are of frozen draws of the last model, not
calibrated. Spreads are over seeds, which differ in known structures, pool, batches and noise; of
one seed, all methods have the same ones. The paper has another model (ORB v3) and other data
(MatPES, thousands of structures): its numbers are not to be compared with these."""


def _columns(last: int) -> tuple[Column, ...]:
    return (
        Column("E MAE at first", "round0_atom_energy_mae", factor=1e3, digits=1),
        Column("E MAE", f"round{last}_atom_energy_mae", factor=1e3, digits=1, paper=0),
        Column("F MAE at first", "round0_forces_mae", factor=1e3, digits=1),
        Column("F MAE", f"round{last}_forces_mae", factor=1e3, digits=1, paper=1),
        Column("F RMSE", f"round{last}_forces_rmse", factor=1e3, digits=0),
        Column("F ECE", "final_forces_ece"),
        Column("rho atom", "final_atom_spearman"),
    )


def table(specs: Sequence[RunSpec], layout: Layout) -> Table:
    """Tabulate methods by metrics of the last round, of the results that there are."""
    published = paper_results()["matpes_al"]
    rows = [
        Row((label,), _results(specs, layout, name), published.get(paper, ()))
        for name, (label, _, paper) in METHODS.items()
    ]
    size = specs[0].settings
    title = (
        f"Active learning: {size['model']['backbone']}, {size['data']['initial']} known "
        f"structures, then {size['rounds']} times {size['batch']} from a pool of "
        f"{size['data']['pool']}; {size['training']['epochs']} epochs a round; "
        "mean ± standard deviation over seeds"
    )
    return Table(("method",), _columns(size["rounds"]), rows, title, NOTE)


def draw(specs: Sequence[RunSpec], layout: Layout) -> None:
    """Plot test errors against the number of labels."""
    from studies.curves import Curve, plot_curves

    size = specs[0].settings
    panels: dict[str, list[Curve]] = {}
    metrics = {"forces_mae": "force MAE, meV/Å", "atom_energy_mae": "energy MAE, meV/atom"}
    for metric, y_label in metrics.items():
        panel = panels.setdefault(y_label, [])
        for name, (label, _, _) in METHODS.items():
            results = _results(specs, layout, name)
            points = []
            for number in range(size["rounds"] + 1):
                values = [1e3 * r["metrics"][f"round{number}_{metric}"]["value"] for r in results]
                if (found := mean_and_spread(values)) is not None:
                    labels = size["data"]["initial"] + number * size["batch"]
                    points.append((float(labels), *found))
            if points:
                panel.append(Curve(label, points))
    if any(panels.values()):
        figure = plot_curves(panels, x_label="labels")
        layout.figures.mkdir(parents=True, exist_ok=True)
        figure.savefig(layout.figures / "errors.png")


def _results(specs: Sequence[RunSpec], layout: Layout, name: str) -> list[dict[str, Any]]:
    of_method = [spec for spec in specs if spec.name == name]
    return [found for spec in of_method if (found := layout.read(spec)) is not None]
