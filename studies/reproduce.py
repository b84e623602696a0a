"""A study from its data to its tables."""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from rich.console import Console
from rich.markdown import Markdown

from blips.errors import InputError
from blips.files import write_atomically
from studies.runner import Outcome, run_all, select
from studies.spec import Layout, RunSpec
from studies.tables import Table

STUDIES = {
    "nbody": "studies.nbody.study",
    "ammonia": "studies.ammonia.study",
    "active": "studies.active.study",
    "ammonia-choices": "studies.ammonia.choices",
    "silica": "studies.silica.study",
    "matpes": "studies.matpes.study",
    "errorbars": "studies.errorbars.study",
    "accuracy": "studies.accuracy.study",
    "properties": "studies.properties.study",
}
NAMED = ("model", "data")  # options that give results a folder of their own


class Study(Protocol):
    """What the module of a study defines, besides `execute(run) -> Findings`.

    It may also define `draw(specs, layout)`, for figures of all results together.
    """

    PROFILES: Mapping[str, Any]

    def specs(self, profile: str, **options: str) -> list[RunSpec]:
        """List the runs, in order; options are the study's own."""
        ...

    def prepare(self, profile: str, console: Console) -> None:
        """Do what the runs need once before them, such as making the data."""
        ...

    def table(self, specs: Sequence[RunSpec], layout: Layout) -> Table:
        """Tabulate the results that there are."""
        ...


def reproduce(
    study: str,
    profile: str = "default",
    *,
    workers: int | None = None,
    only: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
    folder: str | Path = "results",
    runs: str | Path = "runs",
    console: Console | None = None,
) -> Outcome:
    """Run a study, or the rest of it, and write its tables.

    Args:
        study: one of `STUDIES`.
        profile: one of the study's: "quick" (seconds, for tests), "default" (hours on a few
            cores), "paper" (the paper's settings).
        workers: processes side by side; default: the number of cores.
        only: patterns of runs, see `runner.select`.
        options: of the study's `specs`; results of another model or data than the study's own
            are in the folder <profile>-<model>-<data>.
        folder: for results.
        runs: for what the runs need to resume.
        console: for the display.
    """
    console = console or Console()
    module = _study(study)
    if profile not in module.PROFILES:
        raise InputError(
            f"{study} has no profile {profile!r}; use one of {', '.join(module.PROFILES)}"
        )
    options = _checked(study, module, options or {})
    specs = module.specs(profile, **options)
    chosen = select(specs, only)
    others = [Path(options[name]).name.split(".")[0] for name in NAMED if name in options]
    layout = Layout.of(study, "-".join([profile, *others]), folder, runs)
    module.prepare(profile, console)

    def tables() -> str:
        if (draw := getattr(module, "draw", None)) is not None:
            draw(specs, layout)
        return write_tables(module.table(specs, layout), layout)

    outcome = run_all(
        chosen,
        layout,
        module=STUDIES[study],
        workers=workers,
        console=console,
        after_each=tables,
    )
    text = tables()
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    _tell(outcome, layout, console)
    return outcome


def write_tables(table: Table, layout: Layout) -> str:
    """Write table.md and table.tex beside the results; return the former."""
    text = table.markdown()
    write_atomically(layout.results / "table.md", text.encode())
    write_atomically(layout.results / "table.tex", table.latex().encode())
    return text


def _study(name: str) -> Study:
    if name not in STUDIES:
        raise InputError(f"there is no study {name!r}; use one of {', '.join(STUDIES)}")
    return cast(Study, importlib.import_module(STUDIES[name]))


def _checked(study: str, module: Study, options: Mapping[str, str]) -> Mapping[str, str]:
    known = [name for name in inspect.signature(module.specs).parameters if name != "profile"]
    if unknown := options.keys() - set(known):
        valid = f"it takes {', '.join(known)}" if known else "it takes none"
        raise InputError(f"{study} has no option {', '.join(sorted(unknown))}; {valid}")
    return options


def _tell(outcome: Outcome, layout: Layout, console: Console) -> None:
    console.print(
        f"{len(outcome.finished)} runs finished, {len(outcome.reused)} were finished before, "
        f"{len(outcome.failed)} failed; results and tables in {layout.results}",
        highlight=False,
        soft_wrap=True,
    )
    for name, why in outcome.failed.items():
        console.print(f"\n{name} failed: {why}", markup=False, highlight=False, soft_wrap=True)
