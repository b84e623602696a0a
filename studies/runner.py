"""Independent runs side by side, each a process of its own with a result of its own.

A run is known by its settings: one whose result has the same settings hash is not run again, and
an unfinished one continues from its folder, which has the hash in its name. A failed run does not
stop the others. Workers end when the process that started them does, in whatever way it ends, so
interrupting (Ctrl-C) or killing a study leaves everything resumable.
"""

import fnmatch
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console

from blips.errors import InputError
from blips.files import write_atomically
from studies.display import RunsDisplay
from studies.spec import Layout, RunSpec

POLL_SECONDS = 0.2
STOP_SECONDS = 10.0
ROOT = Path(__file__).parents[1]  # where `studies` is
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@dataclass
class Outcome:
    """How the runs ended, by id."""

    finished: list[str] = field(default_factory=list)
    reused: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # id -> why, with the log's end


def select(specs: Sequence[RunSpec], patterns: Sequence[str]) -> list[RunSpec]:
    """Return runs whose id matches a pattern, and those they need; all without patterns.

    Args:
        specs: all runs.
        patterns: shell patterns such as "egnn-blip*"; without a wildcard, an id or part of one.
    """
    if not patterns:
        return list(specs)
    by_id = {spec.id: spec for spec in specs}
    wanted: set[str] = set()
    for pattern in patterns:
        exact = pattern in by_id or any(c in pattern for c in "*?[")
        glob = pattern if exact else f"*{pattern}*"
        matches = fnmatch.filter(by_id, glob)
        if not matches:
            raise InputError(f"no run matches {pattern!r}; there are {', '.join(by_id)}")
        wanted.update(matches)
    for spec in reversed(specs):
        if spec.id in wanted:
            wanted.update(spec.needs)
    return [spec for spec in specs if spec.id in wanted]


def run_all(
    specs: Sequence[RunSpec],
    layout: Layout,
    *,
    module: str,
    workers: int | None = None,
    console: Console | None = None,
    after_each: Callable[[], object] = lambda: None,
) -> Outcome:
    """Run what is not finished; in order, as far as needs allow.

    Args:
        specs: the runs; what a run needs comes before it.
        layout: where files go.
        module: importable module with `execute(run) -> findings`, see `studies.spec`.
        workers: processes side by side, one thread each; default: the number of cores.
        console: for the display.
        after_each: called whenever a run has ended, for instance to write tables.
    """
    if workers is not None and workers < 1:
        raise InputError(f"workers={workers}; expected 1 or more processes")
    _check(specs)
    outcome, waiting = _sort_out(specs, layout)
    display = RunsDisplay(len(specs), len(outcome.reused), console or Console())
    running: dict[str, _Worker] = {}
    with display:
        try:
            while waiting or running:
                for spec in _ready(waiting, outcome):
                    if len(running) == (workers or os.cpu_count() or 1):
                        break
                    waiting.remove(spec)
                    running[spec.id] = _Worker(spec, specs, layout, module)
                    display.started(spec.id)
                time.sleep(POLL_SECONDS)
                for worker in [w for w in running.values() if w.ended]:
                    del running[worker.spec.id]
                    worker.settle(outcome)
                    display.ended(worker.spec.id, outcome.failed.get(worker.spec.id))
                    after_each()
                _give_up(waiting, outcome)
                display.show({name: worker.last_line() for name, worker in running.items()})
        finally:
            for worker in running.values():
                worker.stop()
    return outcome


def _check(specs: Sequence[RunSpec]) -> None:
    known: set[str] = set()
    for spec in specs:
        missing = set(spec.needs) - known
        if spec.id in known or missing:
            reason = f"needs {sorted(missing)} before it" if missing else "is there twice"
            raise InputError(f"run {spec.id} {reason}; check the study's list of runs")
        known.add(spec.id)


def _sort_out(specs: Sequence[RunSpec], layout: Layout) -> tuple[Outcome, list[RunSpec]]:
    """Return finished runs, and those to run, which include needed ones whose folder is lost."""
    outcome, waiting, lacking = Outcome(), [], set()
    for spec in reversed(specs):
        lost = spec.id in lacking and not layout.run_folder(spec).exists()
        if layout.read(spec) is not None and not lost:
            outcome.reused.insert(0, spec.id)
        else:
            waiting.insert(0, spec)
            lacking.update(spec.needs)
    return outcome, waiting


def _ready(waiting: list[RunSpec], outcome: Outcome) -> list[RunSpec]:
    done = {*outcome.finished, *outcome.reused}
    return [spec for spec in waiting if done.issuperset(spec.needs)]


def _give_up(waiting: list[RunSpec], outcome: Outcome) -> None:
    """Fail the runs that need a failed one."""
    for spec in list(waiting):
        failed = [name for name in spec.needs if name in outcome.failed]
        if failed:
            waiting.remove(spec)
            outcome.failed[spec.id] = f"not started: it needs {', '.join(failed)}, which failed"


class _Worker:
    """A running process; see `studies.worker` for the other side."""

    def __init__(
        self, spec: RunSpec, specs: Iterable[RunSpec], layout: Layout, module: str
    ) -> None:
        self.spec, self.layout = spec, layout
        folders = {other.id: str(layout.run_folder(other).absolute()) for other in specs}
        job = {
            "spec": asdict(spec),
            "module": module,
            "folder": folders[spec.id],
            "result": str(layout.result_file(spec).absolute()),
            "figures": str(layout.figures.absolute()),
            "needs": {name: folders[name] for name in spec.needs},
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        }
        job_file = layout.run_folder(spec) / "job.json"
        write_atomically(job_file, json.dumps(job, indent=1).encode())
        with layout.log(spec).open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "studies.worker", str(job_file)],
                stdin=subprocess.PIPE,  # its end tells the worker that nobody waits for it
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the study, which then stops its workers
            )

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def settle(self, outcome: Outcome) -> None:
        """Record how the run ended."""
        self.stop()
        if self.process.returncode == 0 and self.layout.read(self.spec) is not None:
            outcome.finished.append(self.spec.id)
            return
        log = self.layout.log(self.spec)
        outcome.failed[self.spec.id] = (
            f"exit code {self.process.returncode}, log {log}:\n{_tail(log, 12)}"
        )

    def last_line(self) -> str:
        return _tail(self.layout.log(self.spec), 1)

    def stop(self) -> None:
        """End the process; its files are whole at every moment."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _environment() -> dict[str, str]:
    """Return the variables of a worker: one thread, and `studies` importable from anywhere."""
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    path = {"PYTHONPATH": os.pathsep.join(places), "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **ONE_THREAD, **path}


def _tail(path: Path, lines: int) -> str:
    """Return the last lines of a file that are not empty."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join([line.rstrip() for line in text.splitlines() if line.strip()][-lines:])
