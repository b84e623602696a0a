"""Reader of the MatPES releases (JSON lists or one entry per line, plain or gzip).

Each entry holds a pymatgen structure and the labels of one static VASP calculation: energy (eV),
forces (eV/A) and stress (kbar, Voigt order xx, yy, zz, yz, xz, xy). VASP's stress is positive
under compression, ASE's (and ours) under tension, dE/dstrain / V, so

    stress [eV/A^3] = -0.1 GPa/kbar * stress [kbar]

as in the tutorial "Training a MatPES model" of the authors (https://matpes.ai). Kaplan et al.,
arXiv:2503.04070. Entries are read one at a time; the file never is in memory as a whole.
"""

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms, units
from ase.calculators.singlepoint import SinglePointCalculator

from blips.errors import InputError

KBAR_TO_ASE = -0.1 * units.GPa  # eV/A^3, with the change of sign
CHUNK = 1 << 20  # characters
MAX_ENTRY = 1 << 26  # characters; a longer entry is a damaged one
SEPARATORS = re.compile(r"[\s,]*")
GZIP_MAGIC = b"\x1f\x8b"
KEPT = ("matpes_id", "functional", "chemsys", "cohesive_energy_per_atom", "bandgap")


def read_matpes(path: str | Path, limit: int | None = None) -> list[Atoms]:
    """Read the first `limit` (or all) structures of a MatPES file, see `iter_matpes`."""
    structures = []
    for atoms in iter_matpes(path):
        if limit is not None and len(structures) >= limit:
            break
        structures.append(atoms)
    if not structures:
        raise InputError(f"{path}: no structures; expected a list of MatPES entries")
    return structures


def iter_matpes(path: str | Path) -> Iterator[Atoms]:
    """Yield the structures of a MatPES file, one at a time.

    Energy (eV), forces (eV/A) and stress (eV/A^3, ASE's sign) are calculator results, those that
    an entry has; `info` has its `matpes_id`, functional and, for splits by parent structure, the
    `original_mp_id` that the snapshot comes from.
    """
    for number, entry in enumerate(iter_entries(path)):
        try:
            yield _to_atoms(entry)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            name = entry.get("matpes_id", "without matpes_id")
            reason = error if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
            raise InputError(
                f"{path}, entry {number} ({name}): not a MatPES entry ({reason})"
            ) from error


def iter_entries(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a JSON list, or of one JSON object after another."""
    number = 0
    try:
        with _open_text(Path(path)) as file:
            for entry in _json_objects(file):
                yield entry
                number += 1
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise InputError(f"{path}, entry {number}: cannot be read ({error})") from error


@contextmanager
def _open_text(path: Path) -> Iterator[io.TextIOBase]:
    """Open the text of a plain or gzip file, told apart by content, not name."""
    with path.open("rb") as file:
        compressed = file.peek(2).startswith(GZIP_MAGIC)
        yield io.TextIOWrapper(gzip.GzipFile(fileobj=file) if compressed else file, "utf-8")


def _json_objects(file: io.TextIOBase) -> Iterator[dict[str, Any]]:
    """Yield objects between the brackets and commas of a list, or on lines of their own."""
    decoder = json.JSONDecoder()
    text = file.read(CHUNK).lstrip()
    in_list = text.startswith("[")
    position = int(in_list)
    while True:
        position = SEPARATORS.match(text, position).end()  # type: ignore[union-attr]
        if in_list and text.startswith("]", position):
            return
        try:
            entry, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            text, position = text[position:], 0
            more = file.read(max(CHUNK, len(text)))
            if not (more or text or in_list):
                return
            if not more or len(text) > MAX_ENTRY:
                raise ValueError(f"damaged or cut off: {error.msg}") from error
            text += more
            continue
        if not isinstance(entry, dict):
            raise ValueError(f"expected a JSON object, found {str(entry)[:40]!r}")
        yield entry


def _to_atoms(entry: Mapping[str, Any]) -> Atoms:
    structure = entry["structure"]
    lattice = structure["lattice"]
    cell = np.asarray(lattice["matrix"], dtype=float)  # rows are lattice vectors
    sites = structure["sites"]
    if all("abc" in site for site in sites):
        positions = np.array([site["abc"] for site in sites], dtype=float) @ cell
    else:
        positions = np.array([site["xyz"] for site in sites], dtype=float)
    atoms = Atoms(
        [_element(site["species"]) for site in sites],
        positions=positions,
        cell=cell,
        pbc=lattice.get("pbc", True),
        info={key: entry[key] for key in KEPT if entry.get(key) is not None},
    )
    parent = (entry.get("provenance") or {}).get("original_mp_id")
    if parent is not None:
        atoms.info["original_mp_id"] = parent
    atoms.calc = SinglePointCalculator(atoms, **_results(entry, len(atoms)))
    return atoms


def _element(species: list[dict[str, Any]]) -> str:
    if len(species) != 1 or species[0].get("occu", 1) != 1:
        raise InputError(f"a site with the partial occupancy {species}; expected one element")
    return species[0]["element"]


def _results(entry: Mapping[str, Any], num_atoms: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    if entry.get("energy") is not None:
        results["energy"] = float(entry["energy"])
    if entry.get("forces") is not None:
        results["forces"] = np.array(entry["forces"], dtype=float)
        if results["forces"].shape != (num_atoms, 3):
            raise InputError(f"forces {results['forces'].shape} of {num_atoms} atoms")
    if entry.get("stress") is not None:
        stress = np.array(entry["stress"], dtype=float)
        if stress.shape != (6,):
            raise InputError(f"stress of shape {stress.shape}; expected six components")
        results["stress"] = KBAR_TO_ASE * stress
    return results
