"""Labels from a process of its own, which can hang or crash without harm.

The process is this module: one JSON job per line in, one JSON answer per line out. It outlives
nothing: a job that takes longer than its timeout ends the process and everything that the
calculator started. It forgets nothing: a finished label is in the journal, on disk, before anybody
is told. If the process that asked is gone, the label at hand is still finished and kept. A lock for
each label sees to it that two processes never compute the same one.
"""

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from blips.active.frames import from_json
from blips.errors import ConfigError, MissingPackageError
from blips.files import write_atomically
from blips.sim.reference import make_calculator

GRACE_SECONDS = 2.0  # after which a process that ignores its own timeout is killed
LOG_CHARACTERS = 4000
LOG_FILES = 3
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_here = threading.local()


def label(job: dict[str, Any]) -> dict[str, Any]:
    """Label one structure; runs on a worker, and never raises for what the calculator does.

    The job has: structure (JSON), calculator, options, trust, stress, max_force, timeout (s),
    threads, file (of the finished label, in the journal).

    Returns:
        {"results", "seconds"}, which are in the file, too; {"setup": message} where no structure
        could be labelled; {"error": message, "final": whether another attempt is useless}.
    """
    child = getattr(_here, "labeller", None)
    if child is None or child.process.poll() is not None:
        child = _here.labeller = Labeller(job["threads"])
    return child.ask(job)


def close_labeller() -> None:
    """End the child of this thread, if it has one."""
    if hasattr(_here, "labeller"):
        _here.labeller.close()
        del _here.labeller


class Labeller:
    """A child process that answers one job at a time."""

    def __init__(self, threads: int) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self.process: Any = subprocess.Popen(
            [sys.executable, "-m", "blips.active.labeller"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **dict.fromkeys(THREADS, str(threads))},
            start_new_session=True,  # so that what it starts can be ended with it
        )

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a job; end the process if there is none in time."""
        begun, line, answer = time.monotonic(), b"", select.poll()
        answer.register(self.process.stdout, select.POLLIN)
        with suppress(OSError):
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()
            if answer.poll(1e3 * (job["timeout"] + GRACE_SECONDS)):
                line = self.process.stdout.readline()
        if line.endswith(b"\n"):
            return json.loads(line)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # and all that it started
        code, seconds = self.process.wait(), time.monotonic() - begun
        reason = f"the process died (exit code {code})"
        if seconds >= job["timeout"]:
            reason = f"no label within {job['timeout']:g} s; the process was killed"
        self._log.seek(0)
        log = self._log.read().decode(errors="replace")[-LOG_CHARACTERS:]
        self.close()
        return {"error": f"{reason}\n{log}".strip(), "final": False}

    def close(self) -> None:
        """Let the process finish, and end it."""
        self.process.communicate()
        self._log.close()

    def __del__(self) -> None:
        with suppress(AttributeError):
            self.close()


def read_label(file: str | Path) -> dict[str, Any] | None:
    """Return a finished label of the journal, or None."""
    with suppress(OSError, ValueError):
        return json.loads(Path(file).read_text())
    return None


# The process


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
    """Label one structure, or say why not; see `label`."""
    own_group = (os.getpgid(0), signal.SIGKILL)  # with all that the calculator started
    watchdog = threading.Timer(job["timeout"], os.killpg, own_group)
    watchdog.daemon = True
    watchdog.start()
    begun = time.time()
    try:
        with Path(job["file"]).with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return read_label(job["file"]) or _label(job, calculators)
    except (ConfigError, MissingPackageError) as error:
        return {"setup": str(error)}
    except Exception:
        text = traceback.format_exc()[-LOG_CHARACTERS:]
        return {"error": text + _newest_logs(begun), "final": False}
    finally:
        watchdog.cancel()


def _label(job: dict[str, Any], calculators: dict[str, Any]) -> dict[str, Any]:
    key = json.dumps([job["calculator"], job["options"]])
    if key not in calculators:
        calculators[key] = make_calculator(job["calculator"], job["options"], trust=job["trust"])
    atoms = from_json(job["structure"])
    begun = time.monotonic()
    atoms.calc = calculators[key]
    results: dict[str, Any] = {
        "energy": float(atoms.get_potential_energy()),
        "forces": atoms.get_forces(apply_constraint=False).tolist(),
    }
    if job["stress"]:
        results["stress"] = atoms.get_stress(apply_constraint=False).tolist()
    seconds = round(time.monotonic() - begun, 6)
    for name, value in results.items():
        if not np.isfinite(value).all():
            text = f"the calculator gave {name} that are not finite numbers"
            return {"error": text, "final": True}
    largest, limit = float(np.linalg.norm(results["forces"], axis=1).max()), job["max_force"]
    if limit is not None and largest > limit:
        text = f"a force of {largest:.3g} eV/A exceeds label.max_force = {limit:g}"
        return {"error": text, "final": True}
    finished = {"results": results, "seconds": seconds}
    write_atomically(Path(job["file"]), json.dumps(finished).encode())
    return finished


def _newest_logs(since: float) -> str:
    """Return the last lines of the newest log files of an external code, newest first."""
    written = [(path.stat().st_mtime, path) for path in Path().rglob("*") if path.is_file()]
    ends = []
    for _, path in sorted((entry for entry in written if entry[0] >= since), reverse=True):
        content = path.read_bytes()
        if content.strip() and b"\0" not in content[:1000]:
            ends.append(f"\n{path}:\n{content[-LOG_CHARACTERS:].decode(errors='replace')}")
    return "".join(ends[:LOG_FILES])


if __name__ == "__main__":
    main()
