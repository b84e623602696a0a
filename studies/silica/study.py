"""Silica: fine-tuning a released potential to few structures, after the BLIP paper.

The paper fine-tunes ORB v3 to silica glass of 699 atoms; here it is a released model that everybody
has (MatterSim-1M; `model=chgnet` for another, `model=orb-v3-direct-20-omat weights=FILE` for the
paper's) and crystalline zeolites (`silica_data`): trained on five framework types, tested on new
snapshots of the same five and on five others.

| method | what it is |
|---|---|
| pretrained | the released model, its energies per element fitted to the training labels |
| plain | fine-tuned |
| deep_ensemble | four fine-tuned models that differ in the order of their batches |
| blip | fine-tuned with posterior |
| blip_frozen | the same model as a committee of frozen draws (noise shared by all rows) |
| blip_afterwards | a plain run, then a posterior around its weights, which stay |
| blip_afterwards_frozen | the same model as a committee of frozen draws |

Settings were chosen on validation structures. All seeds have the same training structures: what
differs is the order of batches, the noise and the inference network's start.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from blips.backbones import RELEASED
from blips.errors import ConfigError
from studies.silica.data import TESTS, folder
from studies.silica.run import execute
from studies.spec import Layout, RunSpec
from studies.tables import Column, Row, Table, mean_and_spread, paper_results

__all__ = ["PROFILES", "draw", "execute", "prepare", "specs", "table"]

STUDY = "silica"
MODEL = "mattersim-1m"
MEMBERS = 4
TRAINING: dict[str, Any] = {
    "loss": "huber",
    "huber_delta": 0.01,
    "energy_per_atom": True,
    "weights": {"energy": 0.3, "forces": 1.0},
    "optimizer": "adamw",
    "lr": 2e-4,
    "schedule": {"kind": "cosine", "warmup": 0.05},
    "clip_norm": 0.5,
    "ema_decay": 0.97,
    "batch_size": 2,
    "threads": 1,
    "tensorboard": False,
}
BLIP_TRAINING = {"kl_weight": 3e-5, "encoder_lr": 1e-3}
AFTERWARDS = {"loss": "crps", "samples": 2, "kl_weight": 1e-5, "freeze_backbone": True, "lr": 1e-3}
AFTERWARDS_STRUCTURES = 256  # the first of a larger training set, to save time
BLIP = {"kind": "blip", "initial": 1e-4}


@dataclass(frozen=True)
class Method:
    """A kind of run.

    Attributes:
        label: what the table calls it.
        model: its kind and the options of its posterior, see `finetune_run`.
        training: what differs from the profile's.
        built_on: the method whose runs it takes.
        paper: name of the paper's row beside it.
    """

    label: str
    model: Mapping[str, Any]
    training: Mapping[str, Any] = field(default_factory=dict)
    built_on: str | None = None
    paper: str | None = None


METHODS: dict[str, Method] = {
    "pretrained": Method("pretrained", {"kind": "pretrained"}),
    "plain": Method("fine-tuned", {"kind": "plain"}),
    "blip": Method("BLIP, sample mean", BLIP, BLIP_TRAINING, paper="blip"),
    "blip_frozen": Method("BLIP, frozen draws", {"kind": "frozen"}, built_on="blip"),
    "blip_afterwards": Method(
        "fine-tuned, then BLIP around it", {"kind": "blip_afterwards"}, AFTERWARDS, "plain"
    ),
    "blip_afterwards_frozen": Method(
        "the same, frozen draws", {"kind": "frozen"}, built_on="blip_afterwards"
    ),
    "conditioned": Method("fine-tuned, conditioned", {"kind": "conditioned"}, built_on="plain"),
    "deep_ensemble": Method(
        "deep ensemble of 4", {"kind": "deep_ensemble"}, {}, "plain", "deep_ensemble_4"
    ),
}
OF_MEANS = {"blip": "BLIP, MAP", "blip_afterwards": "fine-tuned, then BLIP around it, MAP"}
AFTERWARDS_RUNS = ("blip_afterwards", "blip_afterwards_frozen")
UNTRAINED = (
    "pretrained",
    "conditioned",
    "deep_ensemble",
    "blip_frozen",
    "blip_afterwards_frozen",
)


@dataclass(frozen=True)
class Profile:
    """How large the study is.

    Attributes:
        epochs: by number of training structures.
        seeds: of BLIP, by number of training structures.
        afterwards_epochs: of the inference network alone, where there is such a run.
        data: structures to validate, calibrate and test.
        samples: K at test time.
        bootstrap: resamples for the intervals of the metrics.
        training: what differs from `TRAINING`.
    """

    epochs: Mapping[int, int]
    seeds: Mapping[int, int]
    afterwards_epochs: Mapping[int, int]
    data: Mapping[str, int]
    samples: int
    bootstrap: int = 500
    training: Mapping[str, Any] = field(default_factory=dict)


PROFILES: dict[str, Profile] = {
    "quick": Profile(
        epochs={4: 2},
        seeds={4: 1},
        afterwards_epochs={4: 1},
        data={"valid": 2, "calibration": 3, "known": 4, "new": 4},
        samples=4,
        bootstrap=20,
    ),
    "default": Profile(
        epochs={32: 30, 128: 12, 1024: 1},  # 480, 768, 512 steps
        seeds={32: 3, 128: 3, 1024: 1},
        afterwards_epochs={32: 6, 128: 2, 1024: 1},
        data={"valid": 16, "calibration": 32, "known": 50, "new": 50},
        samples=24,
    ),
    "paper": Profile(
        epochs={32: 50, 128: 50, 1024: 50},
        seeds={32: 4, 128: 4, 1024: 4},
        afterwards_epochs={32: 20, 128: 10, 1024: 5},
        data={"valid": 128, "calibration": 128, "known": 300, "new": 300},
        samples=100,
        training={"batch_size": 8, "ema_decay": 0.99, "threads": None},
    ),
}


def specs(profile: str, model: str = MODEL, weights: str | None = None) -> list[RunSpec]:
    """List the runs of a profile: every row of the smallest training set first.

    Args:
        profile: one of `PROFILES`.
        model: name of a released model.
        weights: file of its weights, where its package has none.
    """
    if model not in RELEASED:
        raise ConfigError(f"unknown model {model!r}; use one of {', '.join(sorted(RELEASED))}")
    size = PROFILES[profile]
    released = {"backbone": model} | ({"weights": weights} if weights else {})
    found: list[RunSpec] = []
    for count, seeds in size.seeds.items():

        def run(name: str, seed: int, count: int = count) -> RunSpec:
            return _spec(size, released, name, count, seed)

        afterwards = count in size.afterwards_epochs
        found += [run("pretrained", 0), run("plain", 0), run("blip", 0), run("blip_frozen", 0)]
        found += [run("plain", seed) for seed in range(1, max(MEMBERS, seeds))]
        found.append(run("deep_ensemble", 0))
        for seed in range(seeds):
            found.append(run("conditioned", seed))
            found += [run("blip", seed), run("blip_frozen", seed)] if seed else []
            found += [run(name, seed) for name in AFTERWARDS_RUNS] if afterwards else []
    return found


def _spec(size: Profile, released: Mapping[str, str], name: str, count: int, seed: int) -> RunSpec:
    method = METHODS[name]
    seeds = range(MEMBERS) if name == "deep_ensemble" else (seed,)
    needs = tuple(f"{count}-{method.built_on}-seed{k}" for k in seeds) if method.built_on else ()
    epochs = size.afterwards_epochs if name == "blip_afterwards" else size.epochs
    training = {**TRAINING, "epochs": epochs[count], **size.training, **method.training}
    data = {"train": count, **size.data}
    if name == "blip_afterwards" and count > AFTERWARDS_STRUCTURES:
        data["afterwards"] = AFTERWARDS_STRUCTURES
    settings = {
        "model": dict(released),
        "method": dict(method.model),
        "training": {} if name in UNTRAINED else training,
        "data": data,
        "samples": size.samples,
        "bootstrap": size.bootstrap,
    }
    return RunSpec(STUDY, f"{count}-{name}", settings, seed, needs)


def prepare(profile: str, console: Console) -> None:
    """Refuse to start without the structures."""
    folder()


def _columns(test: str) -> tuple[Column, ...]:
    return (
        Column("E MAE", f"{test}_atom_energy_mae", factor=1e3, digits=2),
        Column("F MAE", f"{test}_forces_mae", factor=1e3, digits=1),
        Column("F ECE", f"{test}_forces_ece"),
        Column("calibrated", f"{test}_forces_ece_calibrated", paper=0),
        Column("rho structure", f"{test}_structure_spearman", paper=1),
        Column("rho atom", f"{test}_atom_spearman"),
        Column("F NLL", f"{test}_forces_nll_calibrated", digits=2),
        Column("F CRPS", f"{test}_forces_crps_calibrated", factor=1e3, digits=1),
        Column("F within 90 %", f"{test}_forces_coverage_90_calibrated"),
        Column("E within 90 %", f"{test}_energy_coverage_90_calibrated"),
    )


NOTE = """\
E MAE: meV/atom. F MAE and CRPS: meV/A, of force components; so are ECE and coverage of the central
90 % interval. NLL: Gaussian, sum of an atom's three components. rho: Spearman, variance against
squared error of structures and of atoms. NLL, CRPS and coverage are after calibration: one factor
each on the sigmas of energies and forces, fitted on structures of known topologies that are neither
trained nor tested on. "known" are new snapshots of the framework types of the training set, "new"
are of other types. Energies per element are fitted to the training labels for every row.
Spreads are over seeds with the same training structures. The ensemble is one, of four fine-tuned
models. The paper has another model (ORB v3, direct forces) and other data (glass, 699 atoms, 1024
structures): its numbers show what was found there, and are not to be compared with these."""


def table(specs: Sequence[RunSpec], layout: Layout) -> Table:
    """Tabulate tests, training sizes and methods by metrics, of the results that there are."""
    published = paper_results()["silica_1024"]
    rows: list[Row] = []
    for test in TESTS:
        for count in _counts(specs):
            for name, method in METHODS.items():
                results = [
                    _of_test(found["metrics"], test)
                    for found in _results(specs, layout, count, name)
                ]
                if not any(spec.name == f"{count}-{name}" for spec in specs):
                    continue
                labels = (test, str(count))
                if name in OF_MEANS:
                    rows.append(Row((*labels, OF_MEANS[name]), [_of_means(r) for r in results]))
                rows.append(Row((*labels, method.label), results, published.get(method.paper, ())))
    size = specs[0].settings
    title = (
        f"Silica: {size['model']['backbone']} fine-tuned; {size['samples']} samples; "
        "mean ± standard deviation over seeds"
    )
    return Table(("topologies", "trained on", "method"), _columns("test"), rows, title, NOTE)


def draw(specs: Sequence[RunSpec], layout: Layout) -> None:
    """Plot force and energy errors against the size of the training set."""
    from studies.curves import Curve, plot_curves

    panels: dict[str, list[Curve]] = {}
    rows = [(name, "", method.label) for name, method in METHODS.items()]
    rows.insert(2, ("blip", "_map", "BLIP, MAP"))
    for test in TESTS:
        for quantity, label in (
            ("forces", "force MAE, meV/Å"),
            ("atom_energy", "energy MAE, meV/atom"),
        ):
            panel = panels.setdefault(f"{test} topologies\n{label}", [])
            for name, suffix, title in rows:
                metric = f"{test}_{quantity}_mae{suffix}"
                points = []
                for count in _counts(specs):
                    found = [r["metrics"] for r in _results(specs, layout, count, name)]
                    values = [1e3 * metrics[metric]["value"] for metrics in found]
                    if (number := mean_and_spread(values)) is not None:
                        points.append((float(count), *number))
                if points and name not in (*AFTERWARDS_RUNS, "blip_frozen"):
                    panel.append(Curve(title, points))
    if any(panels.values()):
        figure = plot_curves(panels, x_label="training structures", logarithmic=True)
        layout.figures.mkdir(parents=True, exist_ok=True)
        figure.savefig(layout.figures / "errors.png")


def _counts(specs: Sequence[RunSpec]) -> list[int]:
    return list(dict.fromkeys(spec.settings["data"]["train"] for spec in specs))


def _results(
    specs: Sequence[RunSpec], layout: Layout, count: int, name: str
) -> list[dict[str, Any]]:
    of_row = [spec for spec in specs if spec.name == f"{count}-{name}"]
    return [found for spec in of_row if (found := layout.read(spec)) is not None]


def _of_test(metrics: Mapping[str, Any], test: str) -> dict[str, Any]:
    """Return the metrics of one test under names without it, to share the table's columns."""
    start = f"{test}_"
    chosen = {f"test_{k.removeprefix(start)}": v for k, v in metrics.items() if k.startswith(start)}
    return {"metrics": chosen}


def _of_means(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of the posterior means alone."""
    return {
        "metrics": {
            name.removesuffix("_map"): value
            for name, value in result["metrics"].items()
            if name.endswith("_map")
        }
    }
