"""What a campaign shows while it runs: rounds, budget, errors, queue."""

from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text


class CampaignDisplay:
    """A live table on terminals, one line for each stage elsewhere; nothing on quiet consoles."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self.title = title
        self.console = console or Console()
        self._rows: dict[int, dict[str, Any]] = {}
        self._status = self._queue = ""
        self._live = Live(console=self.console, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self._live.stop()
        else:
            self.console.print(self._table())

    def stage(self, round: int, stage: str, detail: str = "") -> None:
        """Show that a stage began or advanced."""
        self._status = f"round {round}: {stage} {detail}".rstrip()
        if self.console.is_terminal:
            self._show()
        elif not detail:
            self.console.print(self._status, highlight=False)

    def finished(self, row: dict[str, Any]) -> None:
        """Show the errors of a round's model: on the test set, or on the labels it asked for."""
        self._rows[row["round"]] = row
        self._show()

    def labels(self, labelled: int, queued: int, quarantined: int, budget: int | None) -> None:
        """Show how many labels are done."""
        limit = "" if budget is None else f" of {budget}"
        self._queue = f"{labelled}{limit} labels, {queued} in the queue, {quarantined} set aside"
        self._show()

    def _show(self) -> None:
        if self.console.is_terminal:
            self._live.update(Group(self._table(), Text(self._status), Text(self._queue)))

    def _table(self) -> Table:
        table = Table(title=self.title)
        for name in ("round", "labels", "energy MAE eV/atom", "force MAE eV/A", "force std eV/A"):
            table.add_column(name, justify="right")
        for row in self._rows.values():
            numbers = (row.get("energy_mae"), row.get("force_mae"), row.get("force_std"))
            shown = ["" if number is None else f"{number:.4g}" for number in numbers]
            table.add_row(str(row["round"]), str(row["labels"]), *shown)
        return table
