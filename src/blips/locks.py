"""Locks on files: one process at a time works in a folder."""

import fcntl
import os
from pathlib import Path
from typing import TextIO

from blips.errors import BlipsError


class Locked(BlipsError):
    """Another process holds the lock.

    Attributes:
        holder: its id, as far as known.
    """

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(
            f"process {holder} works in {path.parent} already; wait for it, or use another folder"
        )
        self.holder = holder


def lock(path: Path) -> TextIO:
    """Open and lock a file; the lock ends with the file, at the latest with the process.

    Raises:
        Locked: another process holds it.
    """
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise Locked(path, holder) from None
    file.seek(0)
    file.truncate()
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file
