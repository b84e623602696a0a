"""What a campaign shows while it runs: rounds, budget, errors, queue."""

from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text


class CampaignDisplay(Live):
    """A live table on terminals; elsewhere one line for each stage, and the table at the end."""

    def __init__(self, title: str, console: Console) -> None:
        self._status = self._queue = ""
        names = ("round", "labels", "energy MAE eV/atom", "force MAE eV/A", "force std eV/A")
        self._table = Table(*(Column(name, justify="right") for name in names), title=title)
        super().__init__(console=console, get_renderable=self._shown)

    def stage(self, round: int, stage: str, detail: str = "") -> None:
        """Show that a stage began or advanced."""
        self._status = f"round {round}: {stage} {detail}".rstrip()
        if not self.console.is_terminal and not detail:
            self.console.print(self._status, highlight=False)

    def finished(self, row: dict[str, Any]) -> None:
        """Show the errors of a round's model: on the test set, or on the labels it asked for."""
        numbers = (row.get("energy_mae"), row.get("force_mae"), row.get("force_std"))
        shown = ["" if number is None else f"{number:.4g}" for number in numbers]
        with self._lock:  # another thread draws the table
            self._table.add_row(str(row["round"]), str(row["labels"]), *shown)

    def labels(self, labelled: int, queued: int, quarantined: int, budget: int | None) -> None:
        """Show how many labels are done."""
        limit = "" if budget is None else f" of {budget}"
        self._queue = f"{labelled}{limit} labels, {queued} in the queue, {quarantined} set aside"

    def _shown(self) -> Table | Group:
        if not self.console.is_terminal:
            return self._table
        return Group(self._table, Text(self._status), Text(self._queue))
