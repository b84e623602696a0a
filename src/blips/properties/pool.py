"""Properties of many structures: on any executor, resumable, with a file for each structure.

    with make_executor(ExecutorConfig(kind="local", workers=4)) as executor:  # of blips.active
        for number, found in run_pool("elastic", "chgnet", structures, "out", executor):
            print(number, found)

A structure whose file is there, of the same model, geometry and options, is not computed again. One
that fails is a `PropertyError` in the stream and a file with its reason, which is not tried again
either; the others go on. What all structures are refused for, such as an option's wrong value, is
raised instead, and earlier files stay.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms

from blips.errors import InputError, TooLargeError, refuse_unknown
from blips.files import write_atomically
from blips.inference.monte_carlo import kept_num_threads
from blips.properties.barrier import barrier
from blips.properties.dynamics import dynamics
from blips.properties.elastic import elastic
from blips.properties.energies import formation_energy, relax
from blips.properties.eos import equation_of_state
from blips.properties.phonons import phonons
from blips.properties.result import Properties, PropertyError
from blips.train.released import load_once

KINDS: dict[str, Callable[..., Properties]] = {
    "relax": relax,
    "formation": formation_energy,
    "equation_of_state": equation_of_state,
    "elastic": elastic,
    "phonons": phonons,
    "barrier": barrier,
    "dynamics": dynamics,
}
Outcome = Properties | PropertyError
Structure = Atoms | Sequence[Atoms]  # a path, of barriers


@dataclass(frozen=True)
class Job:
    """One property of one structure, and the file that keeps it."""

    kind: str
    model: str
    structure: Structure
    options: Mapping[str, Any]
    file: Path

    def digest(self) -> str:
        """Digest everything that the result depends on."""
        file = Path(self.model)
        model = hashlib.sha256(file.read_bytes() if file.is_file() else self.model.encode())
        content = [self.kind, self.structure, dict(self.options), model.hexdigest()]
        text = json.dumps(content, sort_keys=True, default=_plain)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def finished(self) -> Outcome | None:
        """Read the result, if it is there."""
        try:
            content = json.loads(self.file.read_text(encoding="utf-8"))
            if content["job"] != self.digest():
                return None
            if "error" in content:
                return PropertyError(content["error"])
            return Properties.from_dict(content)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, outcome: Outcome) -> None:
        """Write the result, or why there is none."""
        found = outcome.to_dict() if isinstance(outcome, Properties) else {"error": str(outcome)}
        write_atomically(self.file, json.dumps({"job": self.digest(), **found}, indent=1).encode())


def run_pool(
    kind: str,
    model: str,
    structures: Sequence[Structure],
    folder: str | Path,
    executor: Any = None,
    **options: Any,
) -> Iterator[tuple[int, Outcome]]:
    """Compute one of `KINDS` of every structure (of paths for barriers), as they finish.

    The model is what `blips.load` takes; every worker loads it once. Structures are numbered from
    0, for `<kind>-<number>.json` in the folder. The executor is one of `blips.active.executor`; by
    default one structure after the other, here. Options are those of the kind's function.

    A job whose workers were lost again and again, or that needs more memory than there is, is a
    `PropertyError` without a file: the next call tries it again.
    """
    refuse_unknown("property", kind, KINDS)
    if Path(model).is_file():
        model = str(Path(model).absolute())
    folder = Path(folder).absolute()
    left: dict[int, Job] = {}
    for number, one in enumerate(structures):
        job = Job(kind, model, one, options, folder / f"{kind}-{number:04d}.json")
        if (known := job.finished()) is not None:
            yield number, known
        else:
            left[number] = job
    numbers, jobs = list(left), list(left.values())
    refused: list[tuple[Job, Outcome]] = []
    work = partial(compute, threads=1)
    finished = enumerate(map(compute, jobs)) if executor is None else executor.run(work, jobs)
    for place, found in finished:
        outcome = found if isinstance(found, Outcome) else PropertyError(str(found))
        if isinstance(found, InputError):
            refused.append((jobs[place], outcome))
        yield numbers[place], outcome
    reasons = {str(why) for _, why in refused}
    if len(refused) == len(structures) and len(reasons) == 1:
        raise InputError(*reasons)
    for job, why in refused:
        job.keep(why)


def compute(job: Job, threads: int | None = None) -> Outcome | InputError:
    """Compute and keep one structure's property, or why it has none; a refusal is not kept."""
    potential = load_once(job.model)
    try:
        with kept_num_threads(threads):
            found: Outcome = KINDS[job.kind](potential, job.structure, **job.options)
    except TooLargeError as error:
        return PropertyError(str(error))
    except InputError as error:
        return error
    except PropertyError as error:
        found = error
    job.keep(found)
    return found


def _plain(one: Any) -> Any:
    """Turn a structure, with its masses and constraints, or an array into lists."""
    if isinstance(one, Atoms):
        arrays = (one.numbers, one.pbc, one.positions, one.cell.array, one.get_masses())
        rounded = [np.asarray(array, dtype=float).round(8).tolist() for array in arrays]
        return [*rounded, [constraint.todict() for constraint in one.constraints]]
    return np.asarray(one).tolist()
