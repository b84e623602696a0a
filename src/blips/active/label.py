"""Labels from a process of its own, which can hang or crash without harm."""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from typing import IO, Any, cast

GRACE_SECONDS = 2.0  # after which a process that ignores its own timeout is killed
LOG_CHARACTERS = 2000
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_here = threading.local()


def label(job: dict[str, Any]) -> dict[str, Any]:
    """Label one structure; runs on a worker, and never raises for what the calculator does.

    The job has: name, structure (JSON), digest, calculator, options, trust, stress, max_force,
    timeout (s), threads, journal (folder of finished labels).

    Returns:
        {"ok": True}, with the label in the journal; {"setup": message} where no structure could be
        labelled; {"error": message, "final": whether another attempt is useless}.
    """
    child = getattr(_here, "labeller", None)
    if child is None or not child.alive or child.threads != job["threads"]:
        child = _here.labeller = Labeller(job["threads"])
    return child.ask(job)


class Labeller:
    """A child process, `blips.active.labeller`, that answers one job at a time."""

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "blips.active.labeller"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **dict.fromkeys(THREADS, str(threads))},
            start_new_session=True,  # so that what it starts can be ended with it
        )

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self.process.poll() is None

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a job; end the process if there is none in time."""
        begun, stdin = time.monotonic(), cast(IO[bytes], self.process.stdin)
        try:
            stdin.write(json.dumps(job).encode() + b"\n")
            stdin.flush()
            line = self._read(job["timeout"] + GRACE_SECONDS)
        except OSError:
            line = b""
        if line.endswith(b"\n"):
            return json.loads(line)
        self.kill()
        seconds = time.monotonic() - begun
        if seconds >= job["timeout"]:
            reason = f"no label within {job['timeout']:g} s; the process was killed"
        else:
            reason = f"the process died (exit code {self.process.returncode})"
        text = f"{reason}\n{self._log_end()}".strip()
        self._log.close()
        return {"error": text, "final": False}

    def kill(self) -> None:
        """End the process and all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._close_pipes()

    def close(self) -> None:
        """Let the process finish, and end it."""
        self._close_pipes()
        self.process.wait()
        self._log.close()

    def __del__(self) -> None:
        with suppress(AttributeError):
            self._close_pipes()
            self.process.poll()
            self._log.close()

    def _close_pipes(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _read(self, timeout: float) -> bytes:
        """Read a line, or less where the process ends or the time is up."""
        deadline, data = time.monotonic() + timeout, b""
        stdout: Any = self.process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while not data.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return data
                part = os.read(stdout.fileno(), 65536)
                if not part:
                    return data
                data += part
        return data

    def _log_end(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-LOG_CHARACTERS:]


def close_labeller() -> None:
    """End the child of this thread, if it has one."""
    child = getattr(_here, "labeller", None)
    if child is not None:
        child.close()
        _here.labeller = None
