"""Study: how close error bars without sampling come to those of a thousand samples.

For each model, structures near what it knows and far from it (`fast_data`). Reference: standard
deviations of `samples` posterior samples. Compared with it, by Spearman's coefficient, the median
ratio of sigma and its scatter (standard deviation of the ratio's logarithm):

* ``onepass``: `predict(method="onepass")`, energies alone;
* ``mc4``, ``mc8``, ``mc32``: so few samples, with other seeds;
* ``probes3``: derivatives of the forces by the noise along three random directions, that is three
  samples of the model made linear in its noise. Each costs what a sample costs;
* ``halves``: one half of the reference's samples against the other; ``ceiling``: what a method
  that is right can reach, given the noise of the reference (`fast_reference`).

Every model leaves one JSON file, which a second run does not make again, and one file for each
structure in the folder of runs, so that a study that was stopped goes on where it was.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from blips.errors import BlipsError
from blips.experiments.fast_data import Case, Counts
from blips.experiments.fast_models import SUBJECTS, Subject
from blips.experiments.fast_reference import Reference, ceiling, each, reference
from blips.potential import BayesianPotential
from blips.prediction import Array, Prediction
from blips.train.run import environment

LINEAR = 1e-2  # size of the noise that the model is linear in, over its real size
FEW = (4, 8, 32)


def study(
    folder: Path,
    *,
    samples: int = 1000,
    counts: Counts = Counts(),  # noqa: B008, immutable
    only: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    runs: Path = Path("runs/fast"),
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure all models whose packages are there; JSON for each, and one table.

    Args:
        folder: for the results.
        samples: of the reference.
        counts: structures in each set.
        only: beginnings of names of models; all if empty.
        seeds: of initial weights and training; every model is made once for each.
        runs: for the training of our own models, and references.
        report: told of what is done and what is left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for (name, subject), seed in product(SUBJECTS.items(), seeds):
        short = name.split(" ")[0]
        own, place = (short, runs) if seed == 0 else (f"{short}-seed-{seed}", runs / f"seed-{seed}")
        path = folder / f"{own}.json"
        name = name.replace(short, own)
        if path.exists():
            found[name] = json.loads(path.read_text())
            continue
        if only and not short.startswith(tuple(only)):
            continue
        try:
            result = measure(subject, counts, samples, place, short, seed)
        except BlipsError as error:
            report(f"{name} is left out: {error}")
            continue
        found[name] = {"environment": environment(), "samples": samples, "sets": result}
        path.write_text(json.dumps(found[name], indent=1) + "\n")
        report(f"{name} done")
    (folder / "table.md").write_text(table(found))
    return found


def measure(
    subject: Subject, counts: Counts, samples: int, runs: Path, name: str, seed: int
) -> dict[str, Any]:
    """Comparison of every way on both sets; references are kept in `runs / name`."""
    potential, sets = subject.make(runs, seed), subject.sets(counts)
    references = {
        label: reference(potential, cases, samples, runs / name / label)
        for label, cases in (("near", sets.near), ("far", sets.far))
    }
    result: dict[str, Any] = {}
    for label, cases in (("near", sets.near), ("far", sets.far)):
        ways = ways_of(potential, cases)
        known = references[label]
        result[label] = {
            "structures": len(cases),
            "atoms": int(known.whole.n_atoms.sum()),
            "sigma_energy_range": _range(known.whole.array("energy_std")),
            "sigma_forces_range": _range(known.whole.array("forces_std")),
            **rows(ways, known, cases),
        }
    return result


def ways_of(potential: BayesianPotential, cases: Sequence[Case]) -> dict[str, Prediction]:
    """Predictions of every way."""
    ways = {"onepass": each(potential, cases, method="onepass")}
    for count in FEW:
        ways[f"mc{count}"] = each(potential, cases, samples=count, seed=100 + count)
    with linear_in_noise(potential):
        ways["probes3"] = each(potential, cases, samples=3, seed=200)
    return ways


def rows(
    ways: dict[str, Prediction], known: Reference, cases: Sequence[Case]
) -> dict[str, dict[str, Any]]:
    """Comparison of every way with the reference, on all structures and on those of each kind."""
    found: dict[str, dict[str, Any]] = {}
    kinds = dict.fromkeys(case.kind for case in cases)
    for way, prediction in {**ways, "halves": known.halves[0]}.items():
        right = known.halves[1] if way == "halves" else known.whole
        found[way] = compare(prediction, right)
        found[way]["kinds"] = {
            kind: compare(of_kind(prediction, cases, kind), of_kind(right, cases, kind))
            for kind in kinds
        }
    _without_ratios(found["probes3"])  # their noise is smaller on purpose
    found["ceiling"] = {
        **_ceilings(found["halves"]),
        "kinds": {kind: _ceilings(row) for kind, row in found["halves"]["kinds"].items()},
    }
    return found


def of_kind(prediction: Prediction, cases: Sequence[Case], kind: str) -> Prediction:
    """The structures of that kind."""
    return Prediction.join([prediction[k] for k, case in enumerate(cases) if case.kind == kind])


def _without_ratios(row: dict[str, Any]) -> None:
    for part in (row, *row["kinds"].values()):
        for name in ("energy_ratio", "energy_scatter", "forces_ratio", "forces_scatter"):
            del part[name]


def _ceilings(halves: dict[str, Any]) -> dict[str, float]:
    return {
        name: round(ceiling(value), 3)
        for name, value in halves.items()
        if name.endswith("spearman") and np.isfinite(value)
    }


@contextmanager
def linear_in_noise(potential: BayesianPotential) -> Iterator[None]:
    """Coefficients so small that outputs are linear in the noise; ranks are those of real size."""
    own = potential.coefficients

    def tiny(graph: Any) -> dict[str, Any]:
        return {name: LINEAR**2 * value for name, value in own(graph).items()}

    potential.coefficients = tiny  # type: ignore[method-assign]
    try:
        yield
    finally:
        del potential.coefficients


def compare(found: Prediction, reference: Prediction) -> dict[str, Any]:
    """Spearman's coefficients, median ratios of sigma and their scatter."""
    result: dict[str, Any] = {}
    for name in ("energy", "forces"):
        sigma, expected = getattr(found, f"{name}_std"), reference.array(f"{name}_std")
        if sigma is None:
            continue
        if sigma.size > 2:
            result[f"{name}_spearman"] = _rho(sigma.ravel(), expected.ravel())
        result[f"{name}_ratio"] = round(float(np.median(sigma / expected)), 3)
        result[f"{name}_scatter"] = round(float(np.std(np.log(sigma / expected))), 3)
        if name == "forces":
            of_atoms = (np.sqrt(np.square(s).sum(axis=1)) for s in (sigma, expected))
            result["atoms_spearman"] = _rho(*of_atoms)
    return result


def _rho(a: Array, b: Array) -> float:
    return round(float(spearmanr(a, b).statistic), 3)  # type: ignore[attr-defined]


def _range(values: Array) -> list[float]:
    return [float(np.percentile(values, q)) for q in (5, 50, 95)]


COLUMNS = (
    "energy_spearman",
    "energy_ratio",
    "energy_scatter",
    "forces_spearman",
    "forces_ratio",
    "forces_scatter",
    "atoms_spearman",
)


def table(found: dict[str, Any]) -> str:
    """Markdown: all structures, and those of each kind where there are several."""
    head = ["model", "K", "set", "structures", "way", *(c.replace("_", " ") for c in COLUMNS)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, content in found.items():
        for label in ("near", "far"):
            ways = {w: r for w, r in content["sets"][label].items() if isinstance(r, dict)}
            first = [name, str(content["samples"]), label]
            kinds = next(iter(ways.values()))["kinds"]
            for way, row in ways.items():
                lines.append(_line([*first, "all", way], row))
            for kind in kinds if len(kinds) > 1 else ():
                for way in ("onepass", "mc32", "ceiling"):
                    if way in ways:
                        lines.append(_line([*first, kind, way], ways[way]["kinds"][kind]))
    return "\n".join(lines) + "\n"


def _line(first: Sequence[str], row: dict[str, Any]) -> str:
    return "| " + " | ".join([*first, *(str(row.get(c, "-")) for c in COLUMNS)]) + " |"
