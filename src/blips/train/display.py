"""Progress of a training run on the terminal: a bar, the loss terms, the time left."""

from collections.abc import Mapping
from contextlib import nullcontext

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class TrainingDisplay:
    """A bar over all epochs within `live`; without a terminal, lines every tenth of the run."""

    def __init__(self, epochs: int) -> None:
        self.console = Console()
        self.epochs = epochs
        self._best, self._errors = float("inf"), ""
        self._progress = Progress(
            "[bold]training",
            BarColumn(),
            MofNCompleteColumn(),
            "{task.fields[terms]}",
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
        )
        # without a terminal rich would print an empty line at the end
        self.live = self._progress if self.console.is_terminal else nullcontext()
        self._task = self._progress.add_task("training", total=epochs, terms="")

    def step(self, parts: dict[str, float]) -> None:
        """Show the terms of a training step."""
        self._progress.update(self._task, terms=self._terms(parts))

    def epoch(self, row: dict[str, float]) -> None:
        """Advance by one epoch."""
        if row["valid_loss"] < self._best:
            self._best, self._errors = row["valid_loss"], errors_of(row)
        self._progress.update(self._task, completed=row["epoch"])
        epoch, tenth = int(row["epoch"]), max(1, self.epochs // 10)
        if not self.console.is_terminal and (epoch % tenth == 0 or epoch == self.epochs):
            train = {k.removeprefix("train_"): v for k, v in row.items() if k.startswith("train_")}
            self.console.print(
                f"training: epoch {epoch}/{self.epochs}  {self._terms(train)}",
                highlight=False,
                soft_wrap=True,
            )

    def _terms(self, parts: dict[str, float]) -> str:
        names = {"coef_edge": "α", "coef_node": "β"}  # noqa: RUF001 - the method's own symbols
        shown = [f"{names.get(name, name)} {value:.3g}" for name, value in parts.items()]
        if self._best < float("inf"):
            shown.append(f"best valid {self._best:.3g} {self._errors}".rstrip())
        return "  ".join(shown)


def errors_of(row: Mapping[str, float]) -> str:
    """Describe the mean absolute errors on the validation structures in an epoch's row."""
    units = {"valid_mae_energy": "meV/atom", "valid_mae_forces": "meV/Å"}
    found = [f"{row[name]:.3g} {unit}" for name, unit in units.items() if name in row]
    return f"(MAE {', '.join(found)})" if found else ""
