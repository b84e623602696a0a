"""Properties of many structures: on any executor, resumable, with a file for each structure.

    from distributed import Client                 # or concurrent.futures, or no executor at all
    with Client(n_workers=4, threads_per_worker=1) as client:
        executor = client.get_executor()
        for number, found in run_pool("elastic", "chgnet", structures, "out", executor):
            print(number, found)

A structure whose file is there, of the same model, geometry and options, is not computed again. One
that fails is a `PropertyError` in the stream and a file with its reason; the others go on.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms

from blips.errors import InputError
from blips.files import write_atomically
from blips.potential import BayesianPotential
from blips.properties.elastic import elastic
from blips.properties.eos import equation_of_state
from blips.properties.formation import formation_energy
from blips.properties.phonons import phonons
from blips.properties.relax import relax
from blips.properties.result import Properties, PropertyError
from blips.train.released import load

KINDS: dict[str, Callable[..., Properties]] = {
    "relax": relax,
    "equation_of_state": equation_of_state,
    "elastic": elastic,
    "formation_energy": formation_energy,
    "phonons": phonons,
}
Outcome = Properties | PropertyError


def run_pool(
    kind: str,
    model: str,
    structures: Sequence[Atoms],
    folder: str | Path,
    executor: Executor | None = None,
    **options: Any,
) -> Iterator[tuple[int, Outcome]]:
    """Compute one kind of property of every structure, as they finish.

    Args:
        kind: one of `KINDS`.
        model: what `blips.load` takes; every worker loads it once.
        structures: numbered from 0.
        folder: for `<kind>-<number>.json`.
        executor: of concurrent.futures, or a Dask client's `get_executor()`; by default here.
        options: of the kind's function.
    """
    if kind not in KINDS:
        raise InputError(f"unknown property {kind!r}; use one of {', '.join(KINDS)}")
    waiting: dict[Future[Outcome], int] = {}
    for number, atoms in enumerate(structures):
        path = Path(folder) / f"{kind}-{number:04d}.json"
        job = (kind, model, atoms, dict(options), str(path.absolute()))
        if (known := _finished(path, _digest(*job[:4]))) is not None:
            yield number, known
        elif executor is None:
            yield number, compute(*job)
        else:
            waiting[executor.submit(compute, *job)] = number
    for future in as_completed(waiting):
        yield waiting[future], future.result()


def compute(kind: str, model: str, atoms: Atoms, options: Mapping[str, Any], path: str) -> Outcome:
    """Compute and keep one structure's property, or why it has none."""
    try:
        found: Outcome = KINDS[kind](_loaded(model), atoms, **options)
        content = found.to_dict()
    except PropertyError as error:
        found, content = error, {"error": str(error)}
    digest = _digest(kind, model, atoms, options)
    write_atomically(Path(path), json.dumps({"job": digest, **content}, indent=1).encode())
    return found


@lru_cache(maxsize=1)
def _loaded(model: str) -> BayesianPotential:
    potential = load(model)
    if not isinstance(potential, BayesianPotential):
        raise InputError(f"{model} is no Bayesian potential; properties need its members")
    return potential


def _digest(kind: str, model: str, atoms: Atoms, options: Mapping[str, Any]) -> str:
    """Digest everything that a result depends on."""
    digest = hashlib.sha256(repr((kind, model, sorted(options.items()))).encode())
    if Path(model).is_file():
        digest.update(_contents(model, Path(model).stat().st_mtime))
    for array in (atoms.numbers, atoms.pbc, atoms.positions, atoms.cell.array):
        digest.update(np.asarray(array, dtype=float).round(8).tobytes())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=1)
def _contents(model: str, changed: float) -> bytes:
    """Digest the contents of a file as they are now."""
    return hashlib.sha256(Path(model).read_bytes()).digest()


def _finished(path: Path, digest: str) -> Outcome | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["job"] != digest:
            return None
        if "error" in content:
            return PropertyError(content["error"])
        return Properties.from_dict(content)
    except (OSError, ValueError, KeyError, TypeError):
        return None
