"""One run in a process of its own: `python -m studies.worker job.json`.

The worker calls `execute(run)` of the study's module and writes what it returns, with settings,
versions, commit and cost, as the run's result. It ends when its standard input does: the process
that started it holds the other end.
"""

import importlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import blips
from blips.errors import BlipsError
from blips.files import locked, write_atomically
from blips.train.run import environment
from studies.spec import Findings, Run, RunSpec

BEAT_SECONDS = 10.0
ORPHANED = 3  # exit code


class Stopwatch:
    """Wall and CPU seconds of a run over all its attempts, kept in a file of its folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._before = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._before = {"wall_seconds": 0.0, "cpu_seconds": 0.0}
        self._start = time.monotonic()

    def read(self) -> dict[str, float]:
        """Return the seconds so far."""
        spent = {
            "wall_seconds": time.monotonic() - self._start,
            "cpu_seconds": time.process_time(),
        }
        return {name: round(self._before[name] + value, 6) for name, value in spent.items()}

    def keep(self) -> None:
        """Write the seconds so far, every few seconds, for ever."""
        while True:
            time.sleep(BEAT_SECONDS)
            write_atomically(self.path, json.dumps(self.read()).encode())


def work(job_file: Path) -> None:
    """Do the job and write its result."""
    job = json.loads(job_file.read_text(encoding="utf-8"))
    spec = RunSpec.from_dict(job["spec"])
    folder, result = Path(job["folder"]), Path(job["result"])
    needs = {name: Path(path) for name, path in job["needs"].items()}
    with locked(folder / "lock"):  # two workers would write the same checkpoints
        stopwatch = Stopwatch(folder / "elapsed.json")
        threading.Thread(target=stopwatch.keep, daemon=True).start()
        execute: Callable[[Run], Findings] = importlib.import_module(job["module"]).execute
        findings = execute(Run(spec, folder, Path(job["figures"]), needs))
        content = {
            **asdict(spec),
            "hash": spec.hash,
            "metrics": findings.metrics,
            "details": findings.details,
            **stopwatch.read(),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "code": checkout(),
            "environment": {**environment(), "command": job["command"]},
        }
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        write_atomically(result, text.encode())


def checkout() -> dict[str, Any] | None:
    """Return the source checkout's commit and whether it was modified; None outside of one."""
    package = Path(blips.__file__).resolve().parent
    try:
        top = _git("rev-parse", "--show-toplevel", folder=package)
        if Path(top).resolve() / "src" / "blips" != package:
            return None
        code = (str(package), str(Path(top) / "studies"))
        changes = _git("status", "--porcelain", "--", *code, folder=package)
        return {"commit": _git("rev-parse", "HEAD", folder=package), "modified": bool(changes)}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str, folder: Path) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


def _end_with_parent() -> None:
    """Wait for the end of standard input; not through sys.stdin, whose lock outlives the exit."""
    while os.read(0, 1024):
        pass
    os._exit(ORPHANED)


def main() -> int:
    """Run the job named on the command line; problems go to the log."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    print(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(sys.argv[1:])}")
    try:
        work(Path(sys.argv[1]))
    except BlipsError as error:
        traceback.print_exc()
        print(f"blips: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
