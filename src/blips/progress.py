"""Progress of loops that take long: a bar with the time left, on terminals and in notebooks.

    with progress_shown():                     # what commands do
        for batch in track(batches, "predicting", total=len(batches)): ...

Outside of such a block `track` only passes on what it is given. Bars appear after two seconds;
where nobody watches (a log file), a line says every half minute how far the work is.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

DELAY = 2.0  # s before a bar appears
BETWEEN_LINES = 30.0  # s
BETWEEN_UPDATES = 0.5  # s, in notebooks

Item = TypeVar("Item")


class Bars:
    """One live display for all loops of a command; rich allows no second one."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        self.console = Console(stderr=True)
        self.notebook = self.console.is_jupyter
        self.handle: Any = None  # of the line in a notebook
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.live = Progress(
            "{task.description}", *columns, "left", console=self.console, transient=True
        )
        self.begun = self.told = time.monotonic()

    def show(self, task: Any) -> None:
        """Draw the bar, or say how far the task is, if it is time for that."""
        now = time.monotonic()
        between = BETWEEN_UPDATES if self.notebook else BETWEEN_LINES
        if now - self.begun <= DELAY:
            return
        if self.console.is_terminal and not self.notebook:
            self.live.start()  # once more does nothing
        elif now - self.told > between:
            self.told = now
            text = f"{task.description}: {task.completed:.0f}"
            if task.total:
                left = task.elapsed * (task.total / task.completed - 1)
                time_left = f"{left / 60:.0f} min" if left > 90 else f"{left:.0f} s"
                text += f" of {task.total:.0f}, about {time_left} left"
            if self.notebook:
                self._in_notebook(text)
            else:
                self.console.print(text, highlight=False, soft_wrap=True)

    def _in_notebook(self, text: str) -> None:
        """Show a line in place of the last one; rich would need ipywidgets."""
        from IPython.display import display

        self.handle = self.handle or display({"text/plain": ""}, raw=True, display_id=True)
        self.handle.update({"text/plain": text}, raw=True)

    def stop(self) -> None:
        """Remove the bars; stopping bars that never started would print an empty line."""
        if self.live.live.is_started:
            self.live.stop()
        if self.handle is not None:
            self._in_notebook("")


_bars: ContextVar[Bars | None] = ContextVar("bars", default=None)


@contextmanager
def progress_shown() -> Iterator[None]:
    """Show the progress of loops that use `track` within the block."""
    if _bars.get() is not None:
        yield
        return
    bars = Bars()
    token = _bars.set(bars)
    try:
        yield
    finally:
        bars.stop()
        _bars.reset(token)


def retitle(title: str) -> None:
    """Replace the title of the innermost loop that is tracked, to say more than how far it is."""
    bars = _bars.get()
    if bars is not None and bars.live.tasks:
        bars.live.update(bars.live.task_ids[-1], description=title)


def track(
    items: Iterable[Item],
    title: str,
    total: int | None = None,
    count: Callable[[Item], int] = lambda item: 1,
) -> Iterator[Item]:
    """Pass on the items, and show how many are done; each counts `count`, all of them `total`."""
    bars = _bars.get()
    if bars is None:
        yield from items
        return
    task = bars.live.add_task(title, total=total)
    shown = bars.live.tasks[-1]
    try:
        for item in items:
            yield item
            bars.live.advance(task, count(item))
            bars.show(shown)
    finally:
        bars.live.remove_task(task)
