"""Structures as JSON: what the store, the journal and the workers exchange. No code in it."""

import hashlib
import json

import numpy as np
from ase import Atoms


def to_json(atoms: Atoms) -> str:
    """Serialise elements, positions, cell, periodicity (exactly) and charges where set."""
    content = {
        "numbers": atoms.numbers,
        "positions": atoms.positions,
        "cell": atoms.cell.array,
        "pbc": atoms.pbc,
    }
    for name in ("initial_charges", "initial_magmoms"):
        if atoms.has(name):
            content[name] = atoms.get_array(name)
    return json.dumps({name: array.tolist() for name, array in content.items()})


def from_json(text: str) -> Atoms:
    """Return the structure that `to_json` wrote."""
    content = {name: np.asarray(values) for name, values in json.loads(text).items()}
    content["positions"] = content["positions"].reshape(-1, 3)  # also where there are no atoms
    return Atoms.fromdict(content)


def digest(atoms: Atoms) -> str:
    """Return a digest of a geometry: its numbers, positions, cell and periodicity."""
    return hashlib.sha256(to_json(atoms).encode()).hexdigest()[:20]
