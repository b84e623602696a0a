"""The state of a campaign: one SQLite file, written in transactions.

Labelled structures are rows of `ase.db` (`ase db campaign.db`, `ase.db.connect`), with the keys
`round` and `pick`. Beside them are tables of our own:

| table | a row |
|---|---|
| blips_facts | the configuration, the version |
| blips_stages | a finished stage of a round and its result, JSON |
| blips_walks | a finished trajectory: its frames with their origins, JSON |
| blips_chunks | a screened chunk of candidates: the best of them, and how many were thrown out |
| blips_picks | a structure to label: where it is from, score, reason, status |
| blips_attempts | a failed attempt at a label, with its log |

A transaction is a whole stage, trajectory, chunk or label. A label is written together with the
status of its pick, so it is either there and never asked for again, or not there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

from blips.active.config import CampaignConfig
from blips.active.database import DATABASE, CampaignDatabase, CampaignError, sealed
from blips.active.frames import digest, from_json, to_json
from blips.config import different_settings

__all__ = ["DATABASE", "CampaignStore", "Pick"]
STATUSES = ("open", "labelled", "quarantined")
# Settings that may change when a campaign goes on: they leave what was decided as it is.
CHANGEABLE = ("executor.", "stop.", "folder.", "label.timeout.", "label.retries.")
FINISH = "INSERT OR REPLACE INTO blips_stages VALUES (?, ?, ?)"


@dataclass(frozen=True)
class Pick:
    """A structure that was chosen for labelling."""

    round: int
    number: int  # within the round
    atoms: Atoms  # without labels
    score: float | None  # of the selection, None for initial structures
    reason: dict[str, Any]  # where the candidate came from and how it was chosen, JSON-able
    status: str = "open"  # or "labelled", "quarantined"

    @property
    def name(self) -> str:
        """Unique within the campaign."""
        return f"{self.round:04d}-{self.number:05d}"


class CampaignStore(CampaignDatabase):
    """Reads and writes what a campaign has decided and found."""

    # Facts and stages

    def begin(self, config: CampaignConfig) -> None:
        """Record the configuration, or check that it is the one the campaign began with."""
        now = config.model_dump(mode="json")
        before = self.fact("config")
        if before is None:
            self.write("INSERT INTO blips_facts VALUES ('config', ?)", sealed(now))
            return
        different = sorted(different_settings(before, now))
        if changed := [name for name in different if not f"{name}.".startswith(CHANGEABLE)]:
            raise CampaignError(
                f"{self.folder} holds a campaign with other settings: {', '.join(changed)} differ; "
                "use the same, or another folder"
            )
        self.picks()  # checks them, their statuses among others

    def fact(self, name: str) -> Any:
        """Return a recorded fact, or None."""
        return self.value("SELECT value FROM blips_facts WHERE name = ?", name)

    def stage(self, round: int, stage: str) -> dict[str, Any] | None:
        """Return the result of a finished stage, or None."""
        statement = "SELECT result FROM blips_stages WHERE round = ? AND stage = ?"
        return self.value(statement, round, stage)

    def finish(self, round: int, stage: str, result: Mapping[str, Any]) -> None:
        """Record that a stage is finished, in place of an earlier result."""
        self.write(FINISH, round, stage, sealed(result))

    def last_round(self) -> int:
        """Return the last round with anything finished; -1 where there is none."""
        statement = "SELECT MAX(round), COUNT(DISTINCT round) FROM blips_stages"
        last, rounds = self.rows(statement, kinds=(int | None, int))[0]
        if last is not None and not 0 <= last < rounds:
            raise self.damaged(f"of the rounds up to {last} only {rounds} are there")
        return -1 if last is None else last

    # Candidates

    def add_frames(
        self, round: int, walker: int, frames: Sequence[tuple[str, Mapping[str, Any]]]
    ) -> None:
        """Add the frames of a finished trajectory: structures (JSON) and their origins."""
        self.write("INSERT INTO blips_walks VALUES (?, ?, ?)", round, walker, sealed(frames))

    def finished_walkers(self, round: int) -> set[int]:
        """Return the numbers of the finished trajectories."""
        return {r[0] for r in self.rows("SELECT walker FROM blips_walks WHERE round = ?", round)}

    def frames(self, round: int) -> list[tuple[Atoms, dict[str, Any]]]:
        """Return the frames of a round, in an order independent of which finished first."""
        rows = self.rows("SELECT frames FROM blips_walks WHERE round = ? ORDER BY walker", round)
        found = [frame for row in rows for frame in self.unsealed(row[0])]
        return [(from_json(structure), origin) for structure, origin in found]

    def add_chunk(self, round: int, chunk: int, best: Mapping[str, Any]) -> None:
        """Add the result of screening a chunk of candidates."""
        self.write("INSERT INTO blips_chunks VALUES (?, ?, ?)", round, chunk, sealed(best))

    def chunks(self, round: int) -> dict[int, dict[str, Any]]:
        """Return the screened chunks by number."""
        rows = self.rows("SELECT chunk, best FROM blips_chunks WHERE round = ?", round)
        return {chunk: self.unsealed(best) for chunk, best in rows}

    # Picks and labels

    def add_picks(self, picks: Sequence[Pick], round: int, result: Mapping[str, Any]) -> None:
        """Add the picks of a round, and finish its stage "select"."""
        with self.transaction() as cursor:
            for pick in picks:
                structure = to_json(pick.atoms), digest(pick.atoms)
                cursor.execute(
                    "INSERT INTO blips_picks VALUES (?, ?, ?, ?, ?, ?, 'open', NULL, NULL)",
                    (pick.round, pick.number, *structure, pick.score, sealed(pick.reason)),
                )
            cursor.execute("DELETE FROM blips_chunks WHERE round = ?", (round,))
            cursor.execute(FINISH, (round, "select", sealed(result)))

    def picks(self, round: int | None = None, status: str | None = None) -> list[Pick]:
        """Return the picks in order, of a round, with a status."""
        rows = self.rows(
            "SELECT round, number, score, status, reason, digest, structure FROM blips_picks "
            "WHERE (?1 IS NULL OR round = ?1) AND (?2 IS NULL OR status = ?2) "
            "ORDER BY round, number",
            round,
            status,
            kinds=(int, int, float | None, str, str, str, str),
        )
        found = []
        for of_round, number, score, state, reason, name, structure in rows:
            atoms = from_json(structure)
            if digest(atoms) != name or state not in STATUSES:
                raise self.damaged(f"the structure or the status {state!r} of a pick was changed")
            found.append(Pick(of_round, number, atoms, score, self.unsealed(reason), state))
        return found

    def known_digests(self) -> set[str]:
        """Return the digests of all geometries that were ever picked."""
        return {row[0] for row in self.rows("SELECT digest FROM blips_picks")}

    def add_label(self, pick: Pick, results: Mapping[str, Any], seconds: float = 0.0) -> None:
        """Add a label, once: the row of `ase.db` and the pick's status in one transaction."""
        atoms = pick.atoms.copy()
        atoms.calc = SinglePointCalculator(atoms, **results)
        with self.transaction() as cursor:
            row = self.ase_rows().write(atoms, round=pick.round, pick=pick.number)
            changed = cursor.execute(
                "UPDATE blips_picks SET status = 'labelled', row = ?, seconds = ? "
                "WHERE round = ? AND number = ? AND status = 'open'",
                (row, seconds, pick.round, pick.number),
            ).rowcount
            if changed != 1:
                raise CampaignError(f"pick {pick.name} is not open; it was labelled before")

    def add_attempt(self, pick: Pick, message: str, *, quarantine: bool) -> None:
        """Add a failed attempt at a label; with `quarantine` the last."""
        with self.transaction() as cursor:
            cursor.execute(
                "INSERT INTO blips_attempts SELECT ?1, ?2, COUNT(*), ?3 FROM blips_attempts "
                "WHERE round = ?1 AND number = ?2",
                (pick.round, pick.number, message),
            )
            if quarantine:
                cursor.execute(
                    "UPDATE blips_picks SET status = 'quarantined' WHERE round = ? AND number = ?",
                    (pick.round, pick.number),
                )

    def attempts(self, pick: Pick) -> list[str]:
        """Return the logs of failed attempts."""
        rows = self.rows(
            "SELECT message FROM blips_attempts WHERE round = ? AND number = ? ORDER BY attempt",
            pick.round,
            pick.number,
            kinds=(str,),
        )
        return [row[0] for row in rows]

    def labelled(self, before: int | None = None) -> list[Atoms]:
        """Return the labelled structures of rounds before one, in the order of their choice."""
        rows = self.rows(
            "SELECT row FROM blips_picks WHERE status = 'labelled' AND (?1 IS NULL OR round < ?1) "
            "ORDER BY round, number",
            before,
            kinds=(int,),
        )
        try:
            database = self.ase_rows()
            return [database.get_atoms(id=row[0]) for row in rows]
        except Exception as error:  # whatever ASE makes of content that it did not write
            raise self.damaged(f"a label cannot be read: {error}") from None

    def count(self, status: str) -> int:
        """Count the picks with a status."""
        return self.rows("SELECT COUNT(*) FROM blips_picks WHERE status = ?", status)[0][0]
