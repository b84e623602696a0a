"""The state of a campaign: one SQLite file, written in transactions.

Labelled structures are rows of `ase.db` (`ase db campaign.db`, `ase.db.connect`), with the keys
`round` and `pick`. Beside them are entries of our own, by round and number:

| kind | what it is |
|---|---|
| config | the configuration |
| select, train, evaluate, surprise, end | the result of a finished stage of a round |
| walk | a finished trajectory: its frames with their origins |
| chunk | a screened chunk of candidates: those that could be chosen, and why others could not |
| pick | a structure to label: where it is from, score, reason |
| labelled | a pick with a label: its row of `ase.db`, and the seconds that it took |
| attempts | logs of a pick's failed attempts |
| quarantined | a pick that is set aside |

A transaction is a whole stage, trajectory, chunk or label. A label is written together with the
entry of its pick, so it is either there and never asked for again, or not there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

from blips.active.config import CampaignConfig
from blips.active.database import ENTRIES, CampaignDatabase, CampaignError
from blips.active.frames import from_json, to_json
from blips.config import different_settings

# Settings that may change when a campaign goes on: they leave what was decided as it is.
CHANGEABLE = ("executor.", "stop.", "folder.", "label.timeout.", "label.retries.")


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
    def key(self) -> tuple[int, int]:
        """Unique within the campaign."""
        return self.round, self.number

    @property
    def name(self) -> str:
        """The same as text."""
        return f"{self.round:04d}-{self.number:05d}"


class CampaignStore(CampaignDatabase):
    """Reads and writes what a campaign has decided and found."""

    def begin(self, config: CampaignConfig) -> None:
        """Record the configuration, or check that it is the one the campaign began with."""
        now, before = config.model_dump(mode="json"), self.read("config")
        if before is None:
            self.write("config", now)
            return
        different = sorted(different_settings(before, now))
        if changed := [name for name in different if not f"{name}.".startswith(CHANGEABLE)]:
            raise CampaignError(
                f"{self.folder} holds a campaign with other settings: {', '.join(changed)} differ; "
                "use the same, or another folder"
            )

    def last_round(self) -> int:
        """Return the last round whose model is trained; 0 before the first."""
        return max((round for round, _ in self.read_all("train")), default=0)

    def add_picks(self, picks: Sequence[Pick], round: int, result: Mapping[str, Any]) -> None:
        """Add the picks of a round, and finish its stage "select"."""
        with self.transaction():
            for pick in picks:
                self.write("pick", [to_json(pick.atoms), pick.score, pick.reason], *pick.key)
            cleared = f"DELETE FROM {ENTRIES} WHERE kind = 'chunk' AND round = ?"
            self.connection.execute(cleared, (round,))
            self.write("select", result, round)

    def picks(self, round: int | None = None, status: str | None = None) -> list[Pick]:
        """Return the picks in order, of a round, with a status."""
        states = {key: name for name in ("labelled", "quarantined") for key in self.read_all(name)}
        found = [
            Pick(*key, from_json(structure), score, reason, states.get(key, "open"))
            for key, (structure, score, reason) in self.read_all("pick", round).items()
        ]
        return [pick for pick in found if status in (None, pick.status)]

    def add_label(self, pick: Pick, results: Mapping[str, Any], seconds: float = 0.0) -> None:
        """Add a label, once: the row of `ase.db` and the entry of its pick in one transaction."""
        atoms = pick.atoms.copy()
        atoms.calc = SinglePointCalculator(atoms, **results)
        with self.transaction():
            if pick.key in self.read_all("labelled", pick.round):
                raise CampaignError(f"pick {pick.name} was labelled before")
            row = self.ase_rows().write(atoms, round=pick.round, pick=pick.number)
            self.write("labelled", {"row": row, "seconds": seconds}, *pick.key)

    def add_attempt(self, pick: Pick, message: str, *, quarantine: bool) -> None:
        """Add a failed attempt at a label; with `quarantine` the last."""
        with self.transaction():
            self.write("attempts", [*self.attempts(pick), message], *pick.key)
            if quarantine:
                self.write("quarantined", None, *pick.key)

    def attempts(self, pick: Pick) -> list[str]:
        """Return the logs of failed attempts."""
        return self.read("attempts", *pick.key) or []

    def labelled(self, before: int | None = None) -> list[Atoms]:
        """Return the labelled structures of rounds before one, in the order of their choice."""
        labels = self.read_all("labelled").items()
        try:
            rows = self.ase_rows()
            kept = [label for (round, _), label in labels if before is None or round < before]
            return [rows.get_atoms(id=label["row"]) for label in kept]
        except Exception as error:  # whatever ASE makes of content that it did not write
            raise self.damaged(f"a label cannot be read: {error}") from None
