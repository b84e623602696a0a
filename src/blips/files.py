"""Files that stay whole whatever happens: written in one piece, and locked by one process."""

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

from blips.errors import BlipsError, InputError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file that takes the place of `path` if the block ends without an error."""
    if not path.parent.is_dir():
        raise InputError(f"{path}: the folder {path.parent} does not exist; create it first")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: str | Path, data: bytes) -> Path:
    """Write `data` to `path` so that at every moment the old or the new file is there, whole."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return path


def write_json(path: str | Path, content: Any) -> Path:
    """Write what `jsonable` makes of the content."""
    return write_atomically(path, f"{json.dumps(jsonable(content), indent=1)}\n".encode())


def jsonable(content: Any) -> Any:
    """Turn arrays into lists, and numbers that are not finite, which JSON lacks, into null."""
    if hasattr(content, "tolist"):
        content = content.tolist()
    if isinstance(content, Mapping):
        return {str(key): jsonable(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [jsonable(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content


RUN_LOCK = "run.lock"  # in the folder of a training run, while it runs


def lock(path: Path) -> TextIO:
    """Open and lock a file; the lock ends with the file or the process."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            raise BlipsError(
                f"process {holder} works in {path.parent} already; wait for it, or use another "
                "folder"
            ) from None
        if _is_at(path, file):
            break
        file.close()  # whoever held it before has removed the file: begin again
    file.seek(0)
    file.truncate()
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock within the block, and leave no file behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = lock(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Keep others from writing `path`, or from training in its folder, within the block."""
    run = path.parent / RUN_LOCK
    with (
        locked(path.with_name(f".{path.name}.lock")),
        locked(run) if run.exists() else nullcontext(),
    ):
        yield


def _is_at(path: Path, file: TextIO) -> bool:
    """Return whether an open file is still the one at this path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
