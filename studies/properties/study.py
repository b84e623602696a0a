"""Are error bars of properties right? Released models against DFT.

| run | quantities | DFT |
|---|---|---|
| MODEL-elastic | bulk and shear modulus (Hill), to first order | Materials Project |
| MODEL-elastic-members | the same of fewer materials, by members | the same |
| MODEL-formation | formation energy from DFT energies of elements, or the model's own | WBM |
| MODEL-heat | heat capacity at 300 K, to first order | Alexandria |
| acac-scan, ethanol-scan | energies along a path by a small PaiNN, see `barriers.py` | BOTNet's |

Materials are drawn at random among those with few atoms in the cell; a run ends after its minutes
of processor time and judges what it has. Files are kept by structure, so that it resumes. Forces
are relaxed to 0.01 eV/A: with 0.002, at twice the cost, K of eight materials changed by 1.3 % and
less, G by 6.5 % and less but for one that is not stable.
"""

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from ase.data import atomic_numbers, chemical_symbols
from ase.formula import Formula
from rich.console import Console

from blips.properties.phonons import IMAGINARY
from blips.properties.pool import run_pool
from blips.properties.result import Properties, Property
from studies.properties import barriers
from studies.properties.data import Material, dft_references, elemental_crystals, materials
from studies.properties.measure import aligned, judged, scaled, softening
from studies.spec import Findings, Layout, Run, RunSpec
from studies.tables import Column, Row, Table

STUDY = "properties"
FEWEST = 20  # materials, to fit a correction on half of them
Known = dict[str, tuple[float, float, float]]  # quantity -> value, std, what DFT says


@dataclass(frozen=True)
class Profile:
    """How large the study is.

    Attributes:
        models: released ones.
        structures: table -> how many at most, and atoms in the largest cell.
        minutes: of processor time for each run.
    """

    models: tuple[str, ...]
    structures: Mapping[str, tuple[int, int]]
    minutes: float


PROFILES: dict[str, Profile] = {
    "quick": Profile(("chgnet",), {"elastic": (6, 3), "formation": (6, 3), "heat": (4, 3)}, 2),
    "default": Profile(
        ("chgnet", "mattersim-1m", "sevennet-0"),
        {"elastic": (100, 6), "formation": (300, 12), "heat": (67, 8), "elastic-members": (10, 6)},
        20,
    ),
}


def specs(profile: str) -> list[RunSpec]:
    """List one run for each model and table."""
    size = PROFILES[profile]
    found = []
    for model in size.models:
        for table, (count, largest) in size.structures.items():
            settings = {"model": model, "table": table, "structures": count, "members": 16}
            settings |= {"largest": largest, "minutes": size.minutes, "fmax": 0.01}
            found.append(RunSpec(STUDY, f"{model}-{table}", settings, 0))
    for scan in barriers.SCANS:
        settings = {"scan": scan, **barriers.SETTINGS}
        found += [RunSpec(STUDY, f"{scan}-scan", settings, seed) for seed in range(3)]
    return found


def prepare(profile: str, console: Console) -> None:
    """Do nothing: no data have to be made before the runs."""


def execute(run: Run) -> Findings:
    """Compute one table with one model, and judge it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of elements without data
    settings = run.spec.settings
    if "scan" in settings:
        return barriers.scan(run)
    table, _, way = settings["table"].partition("-")
    chosen = materials(table, settings["structures"], settings["largest"], run.spec.seed)
    options = {name: settings[name] for name in ("members", "fmax")}
    options["method"] = way or "linear"
    judge = {"elastic": _elastic, "formation": _formation, "heat": _heat}[table]
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for number, (material, found) in enumerate(judge(run, chosen, options)):
        if isinstance(found, str):
            failed[f"{number} {material.formula}"] = found  # formulas may stand for two crystals
        else:
            atoms = len(material.atoms)
            rows.append({"formula": material.formula, "atoms": atoms, "quantities": found})
    return _findings(rows, failed)


def _computed(
    run: Run, kind: str, chosen: Sequence[Material], **options: Any
) -> Iterator[tuple[Material, Properties | str]]:
    """Yield properties of materials, or why there are none, until the minutes are over."""
    settings = run.spec.settings
    end = time.process_time() + 60 * settings["minutes"]
    structures = [one.atoms for one in chosen]
    for number, found in run_pool(kind, settings["model"], structures, run.folder, **options):
        print(number, chosen[number].formula, str(found).replace("\n", ", "), flush=True)
        yield chosen[number], found if isinstance(found, Properties) else str(found)
        if time.process_time() > end:
            return


Judged = Iterator[tuple[Material, Known | str]]


def _elastic(run: Run, chosen: Sequence[Material], options: Mapping[str, Any]) -> Judged:
    for material, found in _computed(run, "elastic", chosen, **options):
        if not isinstance(found, str):
            names = ("bulk_modulus", "shear_modulus")
            found = {name: _known(found[name], material.known[f"{name}_vrh"]) for name in names}
        yield material, found


def _heat(run: Run, chosen: Sequence[Material], options: Mapping[str, Any]) -> Judged:
    """Yield the heat capacity of the cell, J/K/mol, at 300 K."""
    options = {**options, "temperatures": (300.0,)}
    for material, found in _computed(run, "phonons", chosen, **options):
        if not isinstance(found, str) and found.details["lowest_frequency"] < IMAGINARY:
            found = found.details["notes"][0]
        if not isinstance(found, str):
            one = found["heat_capacity"]
            number = Property.of(one.name, float(one.value[0]), one.members[:, 0], one.units)  # pyright: ignore[reportIndexIssue]
            found = {"heat_capacity": _known(number, material.known["heat_capacity"])}
        yield material, found


def _formation(run: Run, chosen: Sequence[Material], options: Mapping[str, Any]) -> Judged:
    """Yield formation energies with elements by DFT, and by the model where crystals are simple."""
    references, own = dft_references(), _own_references(run, options)
    for material, found in _computed(run, "formation", chosen, references=references, **options):
        if isinstance(found, str):
            yield material, found
            continue
        one, symbols = found["formation_energy"], list(material.atoms.symbols)
        plain, corrected = (
            material.known[f"{name}formation_energy_per_atom"] for name in ("", "corrected_")
        )
        known = {"formation": _known(one, plain), "formation_corrected": _known(one, corrected)}
        if set(symbols) <= own.keys():
            dft = np.mean([references[s] for s in symbols])
            value = float(one.value) + dft - np.mean([float(own[s].value) for s in symbols])
            members = one.members + dft - np.mean([own[s].members for s in symbols], axis=0)
            shared = Property.of(one.name, float(value), members, one.units)
            known["formation_own_references"] = _known(shared, corrected)
        yield material, known


def _own_references(run: Run, options: Mapping[str, Any]) -> dict[str, Property]:
    """Compute energies of elemental crystals by the model and its members, eV/atom."""
    elements, model = elemental_crystals(), run.spec.settings["model"]
    names, crystals = list(elements), list(elements.values())
    relaxed = run_pool("relax", model, crystals, run.folder / "elements", **options)
    return {
        names[number]: found["energy"].scaled(1 / len(crystals[number]))
        for number, found in relaxed
        if isinstance(found, Properties)
    }


def _known(one: Property, known: float) -> tuple[float, float, float]:
    return float(one.value), float(one.std), known


def _findings(rows: list[dict[str, Any]], failed: dict[str, str]) -> Findings:
    """Compute metrics of every quantity; of moduli also after a correction for softening."""
    metrics: dict[str, Any] = {"failed": {"value": float(len(failed)), "low": None, "high": None}}
    for name in sorted({name for row in rows for name in row["quantities"]}):
        numbers = np.array([row["quantities"][name] for row in rows if name in row["quantities"]])
        if len(numbers) < 4:
            continue
        value, std, known = numbers.T
        found = judged(value, std, known)
        if name.endswith("modulus") and len(numbers) >= FEWEST:
            scale, scale_std = softening(value, known)
            found["scale"] = {
                "value": scale,
                "low": scale - 2 * scale_std,
                "high": scale + 2 * scale_std,
            }
            found |= {f"scaled_{k}": m for k, m in scaled(value, std, known).items()}
        if name.startswith("formation") and len(numbers) >= FEWEST:
            shares = np.array(
                [_shares(row["formula"]) for row in rows if name in row["quantities"]]
            )
            found |= {f"aligned_{k}": m for k, m in aligned(shares, value, std, known).items()}
        metrics |= {f"{name}_{key}": metric for key, metric in found.items()}
    return Findings(metrics, {"rows": rows, "failed": failed})


def _shares(formula: str) -> np.ndarray:
    """Return the share of each element, [119]."""
    found = np.zeros(len(chemical_symbols))
    for symbol, count in Formula(formula).count().items():
        found[atomic_numbers[symbol]] = count
    return found / found.sum()


NOTE = """\
Materials at random among those with at most 6 atoms in the cell (heat capacities: all with at most
8, formation energies: 12). "rho" is Spearman's between the std and the absolute error with its 95 %
interval, "rho, right" what it would be if the error bars were exactly right, "rho, value" that of
the value's magnitude in place of the std. "aligned": energies of elements, "scaled": one factor on
the values, are fitted to half of the materials, at most 50; all figures are of the others, means
over 100 random choices, with the range of 90 % of these as interval. "differences" of all pairs of
energies along a scan: by members, as if independent, with the misfit. "factor" makes 90 % intervals
right on half of the materials, at most 50; coverage and ECE after it are those of the other
materials, means over 500 random halves. "scale" is what moduli are to be multiplied with: the
median of DFT's over the model's."""
QUANTITIES = (
    "bulk_modulus", "bulk_modulus_scaled", "shear_modulus", "shear_modulus_scaled",
    "heat_capacity",
    "formation", "formation_aligned", "formation_corrected", "formation_corrected_aligned",
    "formation_own_references",
    "differences", "differences_if_independent", "differences_with_misfit",
)  # fmt: skip
COLUMNS = (
    ("n", "n", 0), ("MAE", "mae", 3), ("rho", "spearman", 2),
    ("rho, right", "spearman_ideal", 2), ("rho, value", "spearman_value", 2),
    ("68 % covers", "coverage68", 2), ("90 % covers", "coverage90", 2), ("ECE", "ece", 3),
    ("factor", "quantile_factor", 2), ("68 % after", "quantile_coverage68", 2),
    ("90 % after", "quantile_coverage90", 2), ("ECE after", "quantile_ece", 3),
    ("scale", "scale", 2),
)  # fmt: skip


def table(specs: Sequence[RunSpec], layout: Layout) -> Table:
    """Tabulate models and quantities by metrics, of the results that there are."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for spec in specs:
        result = layout.read(spec)
        for name in QUANTITIES if result is not None else ():
            prefix = f"{name}_"
            found = {
                key.removeprefix(prefix): metric
                for key, metric in result["metrics"].items()  # pyright: ignore[reportOptionalSubscript]
                if key.startswith(prefix)
            }
            if "n" in found and "mae" in found:
                words = (spec.name, name.replace("_", " "))
                rows.setdefault(words, []).append({"metrics": found})
    columns = [Column(header, metric, digits=digits) for header, metric, digits in COLUMNS]
    title = "Error bars of properties against DFT"
    tabulated = [Row((*words, _interval(found)), found) for words, found in rows.items()]
    return Table(("run", "quantity", "interval of rho"), columns, tabulated, title, NOTE)


def _interval(results: list[dict[str, Any]]) -> str:
    """Return the interval of rho of a single run, in words."""
    low, high = (results[0]["metrics"]["spearman"][name] for name in ("low", "high"))
    return "" if low is None else f"[{low:.2f}, {high:.2f}]"
