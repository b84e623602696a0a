"""Reader of the ammonia and silica sets of Tan et al. (npj Comput. Mater. 9, 225, 2023).

The sets live in the Materials Cloud archive (record tz6a0-hsb25). Their authors' code keeps them
as property tables of NeuralForceField, one row per geometry:

    nxyz         [N, 4]  atomic number and position (A)
    energy       []      kcal/mol
    energy_grad  [N, 3]  kcal/mol/A, minus the forces
    lattice      [3, 3]  A, rows are lattice vectors; periodic sets only

Pickled tables (`.pth.tar`, `.pt`, `.pkl`) are refused: opening one runs whatever code it holds.
What is read are the same tables as JSON or NumPy arrays, and extended xyz files. In `.npz`,
geometries of equal size are stacked ([M, N, 4]) or, for any sizes, joined ([sum N, 4] with
`num_atoms` [M]). The names of rMD17 (`nuclear_charges`, `coords`, `energies`, `forces`), the
third set of the article, are understood too.
"""

import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

from blips import keys
from blips.data.labels import Labels, available, extract
from blips.data.structures import read_structures
from blips.data.xyz import XYZ_SUFFIXES
from blips.errors import InputError

PICKLE_SUFFIXES = (".pth", ".pt", ".tar", ".pkl", ".pickle")
PICKLE_MAGIC = b"\x80"
GRADIENT = "energy_grad"
RMD17_NAMES = {"energies": "energy"}


def read_materials_cloud(path: str | Path, energy_unit: str = "kcal/mol") -> list[Atoms]:
    """Structures with energy (eV) and forces (eV/A) as calculator results.

    Args:
        path: `.xyz` or `.extxyz` (energy, and forces or energy_grad), `.npz` or `.json`.
        energy_unit: unit of the energies, and of those in forces and gradients.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    _refuse_pickle(path)
    if path.suffix in XYZ_SUFFIXES:
        return _read_xyz(path, energy_unit)
    if path.suffix == ".npz":
        table: Mapping[str, Any] = _read_npz(path)
    elif path.suffix == ".json":
        table = _read_json(path)
    else:
        raise InputError(f"{path}: expected a file .xyz, .extxyz, .npz or .json")
    return _structures(path, table, energy_unit)


def _refuse_pickle(path: Path) -> None:
    """Error for pickles, by name or by content (also inside the zip files that torch writes)."""
    with path.open("rb") as file:
        pickled = file.read(1) == PICKLE_MAGIC
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            pickled |= any(name.endswith(".pkl") for name in archive.namelist())
    if pickled or path.suffix in PICKLE_SUFFIXES:
        raise InputError(
            f"{path}: a pickle, which runs code of its author when it is opened, so blips does not "
            "open it. Where you trust it, open it once with the authors' package and save its "
            "table: np.savez('set.npz', nxyz=np.concatenate(nxyz), num_atoms=[len(g) for g in "
            "nxyz], energy=energy, energy_grad=np.concatenate(energy_grad)), then read set.npz"
        )


def _read_xyz(path: Path, energy_unit: str) -> list[Atoms]:
    labels = Labels(energy_unit=energy_unit)
    gradient = Labels(forces_key=GRADIENT, energy_unit=energy_unit)
    structures = read_structures(path)
    for frame, atoms in enumerate(structures):
        sign = -1 if keys.FORCES not in available(atoms, labels) else 1
        try:
            found = extract(atoms, labels=labels if sign == 1 else gradient)
        except InputError as error:
            raise InputError(f"{path}, frame {frame}: {error}") from error
        _set_labels(atoms, found[keys.ENERGY], sign * found[keys.FORCES])
    return structures


def _read_npz(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as file:
            table = {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{path}: cannot be read without running code ({error}); expected plain arrays"
        ) from error
    if "coords" in table:
        return _from_rmd17(path, table)
    if "num_atoms" in table:
        ends = np.cumsum(table["num_atoms"])[:-1]
        for name in {"nxyz", GRADIENT, keys.FORCES} & table.keys():
            table[name] = np.split(table[name], ends)
    return table


def _from_rmd17(path: Path, table: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """nuclear_charges [N], coords [M, N, 3], energies [M], forces [M, N, 3]."""
    if "nuclear_charges" not in table:
        raise InputError(f"{path}: coords without nuclear_charges; has {', '.join(table)}")
    coords = table["coords"]
    numbers = np.broadcast_to(table["nuclear_charges"][:, None], (*coords.shape[:2], 1))
    renamed = {RMD17_NAMES.get(name, name): value for name, value in table.items()}
    return {**renamed, "nxyz": np.concatenate([numbers, coords], axis=2)}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error})") from error
    if not isinstance(table, dict):
        raise InputError(f"{path}: expected a JSON object of properties such as 'nxyz'")
    return table


def _structures(path: Path, table: Mapping[str, Any], energy_unit: str) -> list[Atoms]:
    sign, forces_name = (1, keys.FORCES) if keys.FORCES in table else (-1, GRADIENT)
    missing = {"nxyz", keys.ENERGY, forces_name} - table.keys()
    if missing:
        raise InputError(
            f"{path}: no {', '.join(sorted(missing))}; it has {', '.join(table)}; expected "
            "nxyz, energy, and energy_grad or forces"
        )
    rows: Sequence[Any] = table["nxyz"]
    lattices = table.get("lattice", [None] * len(rows))
    columns = (rows, table[keys.ENERGY], table[forces_name], lattices)
    if len({len(column) for column in columns}) > 1:
        raise InputError(
            f"{path}: nxyz, energy, {forces_name} and lattice have {[len(c) for c in columns]} rows"
        )
    labels = Labels(energy_unit=energy_unit)
    structures = []
    for number, (nxyz, energy, forces, lattice) in enumerate(zip(*columns, strict=True)):
        try:
            atoms = _atoms(np.asarray(nxyz, dtype=float), lattice)
            atoms.info[keys.ENERGY] = np.asarray(energy, dtype=float).reshape(())
            atoms.arrays[keys.FORCES] = sign * np.asarray(forces, dtype=float)
            found = extract(atoms, labels=labels)
        except ValueError as error:
            raise InputError(f"{path}, row {number}: {error}") from error
        _set_labels(atoms, found[keys.ENERGY], found[keys.FORCES])
        structures.append(atoms)
    return structures


def _atoms(nxyz: np.ndarray, lattice: Any) -> Atoms:
    if nxyz.ndim != 2 or nxyz.shape[1] != 4:
        raise InputError(f"nxyz has shape {nxyz.shape}; expected [atoms, 4]")
    cell = None if lattice is None else np.asarray(lattice, dtype=float)
    return Atoms(nxyz[:, 0].astype(int), nxyz[:, 1:], cell=cell, pbc=cell is not None)


def _set_labels(atoms: Atoms, energy: np.ndarray, forces: np.ndarray) -> None:
    """Labels in eV and eV/A as calculator results, in place of those in the file's units."""
    for name in (keys.ENERGY, keys.FORCES, GRADIENT):
        atoms.info.pop(name, None)
        atoms.arrays.pop(name, None)
    atoms.calc = SinglePointCalculator(atoms, energy=float(energy), forces=forces)
