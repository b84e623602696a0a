"""Progress of many runs on the terminal: one bar for all, one line for each that is running."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

LINE_WIDTH = 90


class RunsDisplay:
    """A live view; where there is no terminal, a line when a run starts and one when it ends.

    Args:
        total: number of runs.
        reused: how many of them were finished before.
        console: where to draw.
    """

    def __init__(self, total: int, reused: int, console: Console) -> None:
        self.console = console
        self.total, self.done = total, reused
        self._started: dict[str, float] = {}
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.fields[line]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._all = self._progress.add_task("runs", total=total, completed=reused, line="")
        if reused:
            self._print(f"{reused} of {total} runs are finished already")

    def __enter__(self) -> Self:
        """Start drawing."""
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop drawing, whatever happened."""
        self._progress.stop()
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._print("interrupted; the same command continues where this one stopped")

    def started(self, name: str) -> None:
        """Show a new line for a run."""
        self._started[name] = time.monotonic()
        self._tasks[name] = self._progress.add_task(name, total=None, line="")
        if not self.console.is_terminal:
            self._print(f"{name}: started")

    def show(self, lines: dict[str, str]) -> None:
        """Update what the running ones last said."""
        for name, line in lines.items():
            self._progress.update(self._tasks[name], line=escape(line[:LINE_WIDTH]))

    def ended(self, name: str, failure: str | None) -> None:
        """Remove the line of a run and say how it went."""
        self.done += 1
        self._progress.remove_task(self._tasks.pop(name))
        self._progress.update(self._all, completed=self.done)
        minutes = (time.monotonic() - self._started.pop(name)) / 60
        verdict = "finished" if failure is None else "FAILED"
        self._print(f"{name}: {verdict} after {minutes:.1f} min ({self.done}/{self.total})")

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
