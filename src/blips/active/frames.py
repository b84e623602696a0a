"""Structures as JSON: what the store, the journal and the workers exchange. No code in it."""

import hashlib
import json
from typing import Any

import numpy as np
from ase import Atoms

from blips.errors import InputError


def to_json(atoms: Atoms) -> str:
    """Serialise elements, positions, cell, periodicity (exactly) and charges where set."""
    content: dict[str, Any] = {
        "numbers": atoms.numbers.tolist(),
        "positions": atoms.positions.tolist(),
        "cell": atoms.cell.array.tolist(),
        "pbc": atoms.pbc.tolist(),
    }
    for name in ("initial_charges", "initial_magmoms"):
        if atoms.has(name):
            content[name] = atoms.get_array(name).tolist()
    return json.dumps(content)


def from_json(text: str) -> Atoms:
    """Return the structure that `to_json` wrote."""
    try:
        content = json.loads(text)
        atoms = Atoms(
            numbers=content["numbers"],
            positions=np.asarray(content["positions"], dtype=float).reshape(-1, 3),
            cell=content["cell"],
            pbc=content["pbc"],
        )
        for name in ("initial_charges", "initial_magmoms"):
            if name in content:
                atoms.set_array(name, np.asarray(content[name], dtype=float))
    except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise InputError(f"this is no structure of a campaign: {error}") from None
    return atoms


def digest(atoms: Atoms) -> str:
    """Return a digest of a geometry: its numbers, positions, cell and periodicity."""
    return hashlib.sha256(to_json(atoms).encode()).hexdigest()[:20]
