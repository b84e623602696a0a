"""Files that stay whole whatever happens: written in one piece, and locked by one process."""

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

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


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock until the block or the process ends; the block leaves no file behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise BlipsError(
                f"process {file.read().strip() or 'unknown'} works in {path.parent} already; wait "
                "for it, or use another folder"
            ) from None
        try:
            is_there = os.path.samefile(path, file.fileno())
        except FileNotFoundError:
            is_there = False
        if is_there:
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return
    with locked(path):  # whoever held it before has removed the file: begin again
        yield


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Keep others from writing `path`, or from training in its folder, within the block."""
    run = path.parent / RUN_LOCK
    with (
        locked(path.with_name(f".{path.name}.lock")),
        locked(run) if run.exists() else nullcontext(),
    ):
        yield
