"""DFT properties of public tables ($BLIPS_DATA/properties), in a seeded order."""

import gzip
import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.build import bulk

from blips.errors import InputError

FILES = {
    "elastic": "elasticity_300",
    "formation": "formation_energy_300",
    "heat": "heat_capacity_200",
}


@dataclass(frozen=True)
class Material:
    """A structure with what DFT says about it, by quantity."""

    atoms: Atoms
    formula: str
    known: dict[str, float]


def materials(table: str, count: int, largest: int, seed: int) -> list[Material]:
    """Choose materials at random among those with at most `largest` atoms in the cell."""
    found = [_material(entry) for entry in _entries(table)]
    found = [one for one in found if len(one.atoms) <= largest]
    order = np.random.default_rng(seed).permutation(len(found))
    return [found[i] for i in order[:count]]


def dft_references() -> dict[str, float]:
    """Return the elements' energies behind the formation energies of the table, eV/atom.

    Total energy minus formation energy is linear in the composition; the 300 compounds give all
    elements without residual.
    """
    entries = _entries("formation")
    counts = [Counter(_atoms(entry["structure"]).symbols) for entry in entries]
    symbols = sorted(set().union(*counts))
    matrix = np.array([[count[symbol] for symbol in symbols] for count in counts], dtype=float)
    total = np.array([entry["energy"] for entry in entries])
    formed = np.array([entry["formation_energy_per_atom"] for entry in entries])
    energies, *_ = np.linalg.lstsq(matrix, total - matrix.sum(axis=1) * formed, rcond=None)
    return dict(zip(symbols, energies.tolist(), strict=True))


def elemental_crystals() -> dict[str, Atoms]:
    """Return crystals of the elements that are fcc, bcc, hcp or diamond at low temperature."""
    found: dict[str, Atoms] = {}
    for symbol in dft_references():
        try:
            crystal = bulk(symbol)
        except (ValueError, RuntimeError, KeyError):
            continue
        found[symbol] = crystal
    return found


def _entries(table: str) -> list[dict[str, Any]]:
    path = Path(os.environ.get("BLIPS_DATA", ".")) / "properties" / f"{FILES[table]}.json.gz"
    if not path.is_file():
        raise InputError(f"{path} is missing; set BLIPS_DATA to the folder of reference data")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


def _material(entry: dict[str, Any]) -> Material:
    known = {name: float(value) for name, value in entry.items() if isinstance(value, float | int)}
    return Material(_atoms(entry["structure"]), entry["formula"], known)


def _atoms(structure: dict[str, Any]) -> Atoms:
    """Convert a structure of pymatgen's dictionary."""
    return Atoms(
        [site["species"][0]["element"] for site in structure["sites"]],
        scaled_positions=[site["abc"] for site in structure["sites"]],
        cell=structure["lattice"]["matrix"],
        pbc=True,
    )
