"""A process that labels structures: one JSON job per line in, one JSON answer per line out.

It outlives nothing: a job that takes longer than its timeout ends the process and everything that
the calculator started. It forgets nothing: a finished label is in the journal, on disk, before
anybody is told. If the process that asked is gone, the label at hand is still finished and kept.
A lock for each label sees to it that two processes never compute the same one.
"""

import fcntl
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from blips.active.frames import digest, from_json
from blips.errors import ConfigError, MissingPackageError
from blips.files import write_atomically
from blips.sim.reference import make_calculator

LOG_CHARACTERS = 4000
LOG_FILES = 3


def journal_file(folder: Path, name: str) -> Path:
    """Return the file in which a finished label waits to be added to the database."""
    return folder / f"{name}.json"


def read_journal(path: Path, expected_digest: str) -> dict[str, Any] | None:
    """Return a finished label of this geometry, or None."""
    try:
        entry = json.loads(path.read_text())
        return entry if entry["digest"] == expected_digest else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def main() -> None:
    """Answer jobs until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what calculators print goes to the log
    calculators: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="blips-label-") as scratch:
        os.chdir(scratch)
        for line in sys.stdin:
            answer = answer_job(json.loads(line), calculators)
            try:
                answers.write(json.dumps(answer) + "\n")
                answers.flush()
            except BrokenPipeError:
                break
        os.chdir("/")


def answer_job(job: dict[str, Any], calculators: dict[str, Any]) -> dict[str, Any]:
    """Label one structure, or say why not; see `blips.active.label.Labeller` for the keys."""
    folder = Path(job["journal"])
    path = journal_file(folder, job["name"])
    watchdog = threading.Timer(job["timeout"], _give_up)
    watchdog.daemon = True
    watchdog.start()
    begun = time.time()
    try:
        with (folder / f"{job['name']}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if read_journal(path, job["digest"]) is None:
                _label(job, path, calculators)
        return {"ok": True}
    except (ConfigError, MissingPackageError) as error:
        return {"setup": str(error)}
    except Refused as error:
        return {"error": str(error), "final": True}
    except Exception:
        text = traceback.format_exc()[-LOG_CHARACTERS:]
        return {"error": text + _newest_logs(begun), "final": False}
    finally:
        watchdog.cancel()


class Refused(Exception):
    """A label that is not wanted, and that another attempt would not change."""


def _label(job: dict[str, Any], path: Path, calculators: dict[str, Any]) -> None:
    key = json.dumps([job["calculator"], job["options"]])
    if key not in calculators:
        calculators[key] = make_calculator(job["calculator"], job["options"], trust=job["trust"])
    atoms = from_json(job["structure"])
    if digest(atoms) != job["digest"]:
        raise Refused("the structure was changed on its way to the calculator")
    begun = time.monotonic()
    atoms.calc = calculators[key]
    results: dict[str, Any] = {
        "energy": float(atoms.get_potential_energy()),
        "forces": atoms.get_forces(apply_constraint=False).tolist(),
    }
    if job["stress"]:
        results["stress"] = atoms.get_stress(apply_constraint=False).tolist()
    _check(results, job["max_force"])
    entry = {
        "digest": job["digest"],
        "results": results,
        "seconds": round(time.monotonic() - begun, 6),
    }
    write_atomically(path, json.dumps(entry).encode())


def _check(results: dict[str, Any], max_force: float | None) -> None:
    for name, value in results.items():
        if not np.isfinite(value).all():
            raise Refused(f"the calculator gave {name} that are not finite numbers")
    largest = float(np.linalg.norm(results["forces"], axis=1).max())
    if max_force is not None and largest > max_force:
        raise Refused(f"a force of {largest:.3g} eV/A exceeds label.max_force = {max_force:g}")


def _newest_logs(since: float) -> str:
    """Return the last lines of the newest log files of an external code, newest first."""
    written = [(path.stat().st_mtime, path) for path in Path().rglob("*") if path.is_file()]
    ends = []
    for _, path in sorted((entry for entry in written if entry[0] >= since), reverse=True):
        content = path.read_bytes()
        if content.strip() and b"\0" not in content[:1000]:
            ends.append(f"\n{path}:\n{content[-LOG_CHARACTERS:].decode(errors='replace')}")
    return "".join(ends[:LOG_FILES])


def _give_up() -> None:
    """End this process and all that it started."""
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main()
