"""One member of ANI-1x with conditioned error bars beside the spread of its eight members.

    python -m studies.released.ani --data $BLIPS_DATA --output results/released/ani

Acetylacetone: 100 geometries of 300 K condition member 0; 50 more, labelled, give its scale, and
the factor of the spread. Near: 100 of test_MD_300K, far: 100 of test_MD_600K. Ethanol the same with
its training set; near: 100 of test_MD, far: the 60 of test_H_removal, which have energies only.
Labels are PBE-D3, ANI-1x is omegaB97X: each molecule's energies are shifted by the mean difference
of its 50 validation structures (all of one composition, so energies per element are one number),
and the force errors hold the difference of the functionals, which no spread can know.

Each method is judged by its own errors: the conditioned member by member 0's, the spread by the
mean's of the eight. Last, the std are compared with one another.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

import blips
from blips.data.structures import read_structures
from blips.potential import BayesianPotential
from blips.uq.metrics import coverage, ece, force_items, spearman
from studies.released.ani_backbone import ANI, MEMBERS

CONDITIONED, VALID, TEST = 100, 50, 100
SETS = {
    "acac": ("train_300K.xyz", "test_MD_300K.xyz", "test_MD_600K.xyz"),
    "ethanol": ("train.xyz", "test_MD.xyz", "test_H_removal.xyz"),
}
COLUMNS = {
    "mae": "F MAE, eV/A",
    "covers": "within 90 %",
    "ece": "ECE",
    "rho_structures": "rho structures",
    "rho_atoms": "rho atoms",
    "energy_mae": "E MAE, meV",
    "energy_covers": "E within 90 %",
    "energy_rho": "E rho",
}
Arrays = dict[str, np.ndarray]


def main() -> None:
    """Run and write `table.md` and `metrics.json`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("BLIPS_DATA", "data")))
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    rows = [row for name in SETS for row in compare(arguments.data / name, name)]
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "metrics.json").write_text(json.dumps(rows, indent=1))
    (arguments.output / "table.md").write_text(table(rows))
    print(table(rows))


def compare(folder: Path, name: str) -> list[dict[str, Any]]:
    """Compute metrics of both methods, near and far, for one molecule."""
    train, near, far = (shuffled(folder / file) for file in SETS[name])
    members = [blips.bayesianize(ANI.released(member=k)) for k in range(MEMBERS)]
    first, valid = members[0], train[CONDITIONED : CONDITIONED + VALID]
    true = labels(valid)["energy"]
    shift = [float(np.mean(energies(member, valid) - true)) for member in members]
    first.condition(train[:CONDITIONED], valid=shifted(valid, shift[0]))
    fitted = {
        quantity: float(np.sqrt(np.mean(((mean - true) / std) ** 2)))
        for quantity, (mean, std, true) in spread(members, shift, valid).items()
    }
    rows: list[dict[str, Any]] = []
    for place, structures in (("near", near[:TEST]), ("far", far[:TEST])):
        own, others = conditioned(first, shift[0], structures), spread(members, shift, structures)
        scaled = {q: (m, fitted[q] * s, t) for q, (m, s, t) in others.items()}
        sizes = np.array([len(atoms) for atoms in structures])
        agreement = {q: agree(own[q][1], others[q][1]) for q in own}
        for method, found in (
            ("one member, conditioned", own),
            ("eight members, spread", others),
            ("eight members, spread times a factor", scaled),
        ):
            rows.append({"set": f"{name}, {place}", "method": method, **judged(found, sizes)})
        rows[-3]["rank_agreement_with_spread"] = agreement
        rows[-1]["factor"] = fitted
    return rows


def shuffled(path: Path) -> list[Atoms]:
    """Return all structures of a file in a seeded order."""
    structures = read_structures(path)
    return [structures[k] for k in np.random.default_rng(0).permutation(len(structures))]


def labels(structures: list[Atoms]) -> Arrays:
    """Return energies [S] and, where there are any, forces [N, 3]."""
    found = {"energy": np.array([atoms.get_potential_energy() for atoms in structures])}
    if all("forces" in atoms.calc.results for atoms in structures if atoms.calc is not None):
        found["forces"] = np.concatenate([atoms.get_forces() for atoms in structures])
    return found


def shifted(structures: list[Atoms], shift: float) -> list[Atoms]:
    """Return structures with `shift` added to the labels of their energies."""
    copies = []
    for atoms in structures:
        copy = atoms.copy()
        energy, forces = atoms.get_potential_energy() + shift, atoms.get_forces()
        copy.calc = SinglePointCalculator(copy, energy=energy, forces=forces)
        copies.append(copy)
    return copies


def energies(member: BayesianPotential, structures: list[Atoms]) -> np.ndarray:
    """Compute the energies of a member, [S] eV."""
    return member.predict(structures, method="map", forces=False).array("energy")


def conditioned(
    member: BayesianPotential, shift: float, structures: list[Atoms]
) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return mean, std and label of each quantity by one member's conditioned posterior."""
    prediction, true = member.predict(structures), labels(structures)
    found = {}
    for name in true:
        mean = prediction.array(name) - (shift if name == "energy" else 0.0)
        found[name] = (mean, prediction.array(f"{name}_total_std"), true[name])
    return found


def spread(
    members: list[BayesianPotential], shift: list[float], structures: list[Atoms]
) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return mean, std and label of each quantity by the eight members."""
    true = labels(structures)
    predictions = [member.predict(structures, method="map") for member in members]
    found = {}
    for name in true:
        several = np.stack([prediction.array(name) for prediction in predictions])
        if name == "energy":
            several = several - np.asarray(shift)[:, None]
        found[name] = (several.mean(axis=0), several.std(axis=0, ddof=1), true[name])
    return found


def judged(
    found: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]], sizes: np.ndarray
) -> dict[str, float]:
    """Compute the metrics of one method on one set."""
    mean, std, true = found["energy"]
    row = {
        "energy_mae": 1000.0 * float(np.abs(mean - true).mean()),
        "energy_covers": coverage(mean, std, true, 0.9),
        "energy_rho": spearman(std, np.abs(mean - true)),
    }
    if "forces" in found:
        mean, std, true = found["forces"]
        atoms, structures = force_items(mean, std, true), force_items(mean, std, true, sizes)
        row |= {
            "mae": float(np.abs(mean - true).mean()),
            "covers": coverage(mean, std, true, 0.9),
            "ece": ece(mean, std, true),
            "rho_structures": spearman(structures.std, structures.error),
            "rho_atoms": spearman(atoms.std, atoms.error),
        }
    return row


def agree(one: np.ndarray, other: np.ndarray) -> float:
    """Compute the rank correlation of two stds; of forces, of their norms over components."""
    if one.ndim == 2:
        one, other = np.linalg.norm(one, axis=1), np.linalg.norm(other, axis=1)
    return spearman(one, other)


def table(rows: list[dict[str, Any]]) -> str:
    """Format the results as Markdown."""
    lines = [
        "| set | method | " + " | ".join(COLUMNS.values()) + " |",
        "|---|---|" + "---|" * len(COLUMNS),
    ]
    for row in rows:
        cells = (f"{row[name]:.3g}" if name in row else "" for name in COLUMNS)
        lines.append(f"| {row['set']} | {row['method']} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "Rank correlation of the std of the conditioned member with the spread of the eight:",
        "",
    ]
    for row in rows:
        if agreement := row.get("rank_agreement_with_spread"):
            text = ", ".join(f"{name} {value:.2f}" for name, value in agreement.items())
            lines.append(f"- {row['set']}: {text}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
