"""The SQLite file of a campaign: one writer, transactions, `ase.db` on the same connection.

What is in its tables is in `blips.active.store`.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from ase.db.sqlite import SQLite3Database, index_statements, init_statements

from blips.errors import BlipsError
from blips.files import lock

FORMAT = "blips-campaign-3"
DATABASE, LOCK = "campaign.db", "campaign.lock"
TABLES = (
    "CREATE TABLE blips_facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    """CREATE TABLE blips_stages (round INTEGER, stage TEXT, result TEXT NOT NULL,
       PRIMARY KEY (round, stage))""",
    """CREATE TABLE blips_walks (round INTEGER, walker INTEGER, frames TEXT NOT NULL,
       PRIMARY KEY (round, walker))""",
    """CREATE TABLE blips_chunks (round INTEGER, chunk INTEGER, best TEXT NOT NULL,
       PRIMARY KEY (round, chunk))""",
    """CREATE TABLE blips_picks (round INTEGER, number INTEGER, structure TEXT NOT NULL,
       digest TEXT NOT NULL, score REAL, reason TEXT NOT NULL, status TEXT NOT NULL,
       row INTEGER, seconds REAL, PRIMARY KEY (round, number))""",
    """CREATE TABLE blips_attempts (round INTEGER, number INTEGER, attempt INTEGER,
       message TEXT NOT NULL, PRIMARY KEY (round, number, attempt))""",
)
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
                self.folder.mkdir(parents=True, exist_ok=True)
                opened.enter_context(lock(self.folder / LOCK))
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
    def transaction(self) -> Iterator[sqlite3.Cursor]:
        """Commit everything in the block at its end, or nothing if it raises."""
        if not self.writable:
            raise CampaignError(f"{self.path} was opened for reading")
        with self._in_words(), self.connection:  # which commits, or rolls back
            yield self.connection.execute("BEGIN IMMEDIATE")

    def write(self, statement: str, *values: Any) -> None:
        """Run one statement as a transaction."""
        with self.transaction() as cursor:
            cursor.execute(statement, values)

    def ase_rows(self) -> Any:
        """Open `ase.db` on our own connection, so that its rows are part of our transactions."""
        database = SQLite3Database(str(self.path), create_indices=True, use_lock_file=False)
        database.connection = self.connection
        database.change_count = 0
        return database

    def rows(self, statement: str, *values: Any, kinds: Sequence[Any] = ()) -> list[Any]:
        """Return all rows that a statement finds; their values must be of these kinds, if given."""
        with self._in_words():
            rows = self.connection.execute(statement, values).fetchall()
        for row in rows:
            for value, kind in zip(row, kinds, strict=False):
                if not isinstance(value, kind):
                    raise self.damaged(f"{str(value)[:40]!r} is not what a campaign wrote")
        return rows

    def value(self, statement: str, *values: Any) -> Any:
        """Read the first row that a statement finds; None where there is none."""
        rows = self.rows(statement, *values)
        return self.unsealed(rows[0][0]) if rows else None

    def unsealed(self, text: str) -> Any:
        """Return what `sealed` wrote, unchanged; an error where it was changed."""
        try:
            seal, content = json.loads(text)
            if seal == checksum(json.dumps(content)):
                return content
        except (ValueError, TypeError, RecursionError):
            pass
        raise self.damaged(f"{str(text)[:40]!r} is not what a campaign wrote")

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
        except sqlite3.DatabaseError as error:
            name = getattr(error, "sqlite_errorname", "") or ""
            for names, advice in ADVICE.items():
                if name.startswith(names):
                    raise CampaignError(f"{self.path} {advice.format(error)}") from error
            raise self.damaged(error) from error
        except UnicodeDecodeError as error:
            raise self.damaged(error) from error
        except OSError as error:
            raise CampaignError(
                f"{self.path}: {error.strerror or error}. Everything that was finished before is "
                "safe; make room or the folder writable, and start the campaign again"
            ) from error

    def _prepare(self) -> None:
        """Check the file before anything in it is changed; create the tables of a new one."""
        tables = self.connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables > 0:
            problem = self.connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if problem != "ok":
                raise sqlite3.DatabaseError(problem)
            statement = "SELECT value FROM blips_facts WHERE name = 'format'"
            if self.connection.execute(statement).fetchone() != (json.dumps(FORMAT),):
                raise CampaignError(f"{self.path} is no campaign of this version ({FORMAT})")
        elif not self.writable:  # also where the disk was full as it was made
            raise CampaignError(f"{self.folder} holds no campaign ({DATABASE} is empty)")
        if self.writable:
            self.connection.execute("PRAGMA journal_mode = WAL")
            self.connection.execute("PRAGMA synchronous = FULL")
        if tables == 0:
            with self.transaction() as cursor:
                for statement in (*init_statements, *index_statements, *TABLES):
                    cursor.execute(statement)
                facts = "INSERT INTO blips_facts VALUES ('format', ?)"
                cursor.execute(facts, (json.dumps(FORMAT),))


def sealed(content: Any) -> str:
    """Write JSON with its checksum, [checksum, content], so that damage is noticed."""
    text = json.dumps(content)
    return json.dumps([checksum(text), json.loads(text)])


def checksum(text: str) -> str:
    """Return a short digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:20]
