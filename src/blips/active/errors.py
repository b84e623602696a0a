"""Errors of campaigns, and SQLite's in words."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blips.errors import BlipsError


class CampaignError(BlipsError):
    """A campaign that cannot be begun, continued or read."""


class DamagedCampaignError(CampaignError):
    """A campaign's database that cannot be trusted."""


@contextmanager
def in_words(path: Path) -> Iterator[None]:
    """Turn what SQLite and the file system say about `path` into what to do about it."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise _explained(path, error) from error
    except UnicodeDecodeError as error:
        raise _damaged(path, error) from error
    except OSError as error:
        raise CampaignError(
            f"{path}: {error.strerror or error}. Everything that was finished before is safe; make "
            "room or the folder writable, and start the campaign again"
        ) from error


def _explained(path: Path, error: sqlite3.DatabaseError) -> CampaignError:
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith(("SQLITE_FULL", "SQLITE_IOERR")):
        return CampaignError(
            f"{path} cannot be written ({error}): the disk is full or failing. Every finished "
            "label is safe; make room and start the campaign again"
        )
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return CampaignError(
            f"{path} cannot be opened for writing ({error}); check the permissions of the file and "
            "of its folder"
        )
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return CampaignError(f"{path} is in use by another program ({error}); close it, try again")
    return _damaged(path, error)


def _damaged(path: Path, error: Exception) -> DamagedCampaignError:
    return DamagedCampaignError(
        f"{path} is damaged or no campaign ({error}). It was left as it is: restore a copy, or "
        f"save what is readable with: sqlite3 {path.name} .recover"
    )
