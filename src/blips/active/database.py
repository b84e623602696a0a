"""The SQLite file of a campaign: one writer, transactions, `ase.db` on the same connection.

Beside the tables of `ase.db` there is one of our own: entries of a kind, a round and a number, with
JSON for content. `blips.active.store` says which there are.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Self

from ase.db.sqlite import SQLite3Database, index_statements, init_statements

from blips.errors import BlipsError
from blips.files import locked

DATABASE, LOCK = "campaign.db", "campaign.lock"
ENTRIES = "blips_campaign_4"  # our table; its name is the version of the format
CREATE = f"""CREATE TABLE {ENTRIES} (kind TEXT, round INTEGER, number INTEGER,
             content TEXT NOT NULL, checksum TEXT NOT NULL, PRIMARY KEY (kind, round, number))"""
ADVICE = {
    ("SQLITE_FULL", "SQLITE_IOERR"): (
        "cannot be written ({}): the disk is full or failing. Every finished label is safe; make "
        "room and start the campaign again"
    ),
    ("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM"): (
        "cannot be opened for writing ({}); check the permissions of the file and of its folder"
    ),
    ("SQLITE_BUSY", "SQLITE_LOCKED"): "is in use by another program ({}); close it, try again",
}


class CampaignError(BlipsError):
    """A campaign that cannot be begun, continued or read."""


class CampaignDatabase:
    """An open campaign; at most one process may have it open for writing, with its lock."""

    def __init__(self, folder: str | Path, *, writable: bool = True) -> None:
        self.folder, self.writable = Path(folder), writable
        self.path = self.folder / DATABASE
        with self._in_words(), ExitStack() as opened:
            if writable:
                opened.enter_context(locked(self.folder / LOCK))
            elif not self.path.is_file():
                raise CampaignError(f"{self.folder} holds no campaign ({DATABASE} is missing)")
            elif Path(f"{self.path}-journal").exists():
                # A reader cannot undo what a process was writing as it was killed.
                with suppress(sqlite3.Error), closing(sqlite3.connect(self.path)) as writer:
                    writer.execute("SELECT count(*) FROM sqlite_master")
            uri = f"{self.path.absolute().as_uri()}?mode={'rwc' if writable else 'ro'}"
            connection = sqlite3.connect(uri, uri=True, timeout=20, isolation_level=None)
            self.connection = opened.enter_context(closing(connection))
            self._prepare()
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file, and let another process have it."""
        if self.writable:
            with suppress(sqlite3.Error):  # somebody reads; then the log stays beside the file
                self.connection.execute("PRAGMA journal_mode = DELETE")
        self._opened.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit everything in the block at its end, or nothing if it raises."""
        if not self.writable:
            raise CampaignError(f"{self.path} was opened for reading")
        with self._in_words(), self.connection:  # which commits, or rolls back
            self.connection.execute("BEGIN IMMEDIATE")
            yield

    def write(self, kind: str, content: Any, round: int = 0, number: int = 0) -> None:
        """Write an entry in place of an earlier one, within a transaction or as one."""
        entry = (kind, round, number, json.dumps(content))
        statement = f"INSERT OR REPLACE INTO {ENTRIES} VALUES (?, ?, ?, ?, ?)"
        with nullcontext() if self.connection.in_transaction else self.transaction():
            self.connection.execute(statement, (*entry, _checksum(*entry)))

    def read(self, kind: str, round: int = 0, number: int = 0) -> Any:
        """Return the content of an entry; None where there is none."""
        return self.read_all(kind, round).get((round, number))

    def read_all(self, kind: str, round: int | None = None) -> dict[tuple[int, int], Any]:
        """Return the contents of a kind, of a round if given, by (round, number) in order."""
        statement = (
            f"SELECT * FROM {ENTRIES} WHERE kind = ?1 AND (?2 IS NULL OR round = ?2) "
            "ORDER BY round, number"
        )
        with self._in_words():
            entries = self.connection.execute(statement, (kind, round)).fetchall()
        for *entry, checksum in entries:
            if checksum != _checksum(*entry):
                raise self.damaged(f"entry {entry[:3]} is not what a campaign wrote")
        return {(round, number): json.loads(text) for _, round, number, text, _ in entries}

    def count(self, kind: str) -> int:
        """Count the entries of a kind."""
        statement = f"SELECT COUNT(*) FROM {ENTRIES} WHERE kind = ?"
        with self._in_words():
            return self.connection.execute(statement, (kind,)).fetchone()[0]

    def ase_rows(self) -> Any:
        """Open `ase.db` on our own connection, so that its rows are part of our transactions."""
        database = SQLite3Database(str(self.path), create_indices=True, use_lock_file=False)
        database.connection = self.connection
        database.change_count = 0
        return database

    def damaged(self, why: Exception | str) -> CampaignError:
        """Return the error for content that no campaign has."""
        return CampaignError(
            f"{self.path} is damaged or no campaign ({why}). It was left as it is: restore a copy, "
            f"or save what is readable with: sqlite3 {self.path.name} .recover"
        )

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """Turn errors of SQLite and the file system into advice for users."""
        try:
            yield
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            name = getattr(error, "sqlite_errorname", "") or ""
            for names, advice in ADVICE.items():
                if name.startswith(names):
                    raise CampaignError(f"{self.path} {advice.format(error)}") from error
            raise self.damaged(error) from error
        except OSError as error:
            raise CampaignError(
                f"{self.path}: {error.strerror or error}. Everything that was finished before is "
                "safe; make room or the folder writable, and start the campaign again"
            ) from error

    def _prepare(self) -> None:
        """Check the file before anything in it is changed; create the tables of a new one."""
        tables = [row[0] for row in self.connection.execute("SELECT name FROM sqlite_master")]
        if tables:
            problem = self.connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if problem != "ok":
                raise sqlite3.DatabaseError(problem)
            if ENTRIES not in tables:
                raise CampaignError(
                    f"{self.path} is no campaign of this version ({ENTRIES}); use another folder"
                )
        elif not self.writable:  # also where the disk was full as it was made
            raise CampaignError(f"{self.folder} holds no campaign ({DATABASE} is empty)")
        if self.writable:
            self.connection.execute("PRAGMA journal_mode = WAL")
            self.connection.execute("PRAGMA synchronous = FULL")
        if not tables:
            with self.transaction():
                for statement in (*init_statements, *index_statements, CREATE):
                    self.connection.execute(statement)


def _checksum(*entry: Any) -> str:
    """Return a short digest of an entry, by which damage and exchange are noticed."""
    return hashlib.sha256(repr(entry).encode()).hexdigest()[:20]
