"""Commands for properties of materials: property."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blips.cli.app import Json, Model, Seed, Structures, app, load_model, print_json, read_known

if TYPE_CHECKING:
    from blips.properties.result import Properties


@app.command("property")
def property_(
    kind: Annotated[str, typer.Argument(help="relax, equation_of_state, elastic or phonons")],
    model: Model,
    structures: Structures,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="folder for JSON and figures")
    ] = Path("runs/property"),
    method: Annotated[
        str, typer.Option(help="linear (first order, quick) or members (each by itself)")
    ] = "linear",
    members: Annotated[int, typer.Option(help="members of the posterior")] = 16,
    workers: Annotated[int, typer.Option(min=1, help="structures side by side")] = 1,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Compute a property of every structure of a file, with its error bar.

    Writes JSON and a figure for each structure; those that are finished are not computed again.
    A structure that fails is named, the others go on.

    Example: blips property elastic chgnet quartz.cif -o runs/quartz
    """
    from contextlib import ExitStack

    from rich.console import Console
    from rich.progress import Progress

    from blips.properties import Properties
    from blips.properties.pool import run_pool

    frames = read_known(structures, load_model(model).backbone)
    console = Console(stderr=True)
    outcomes: dict[int, Any] = {}
    with ExitStack() as stack:
        executor = None if workers == 1 else stack.enter_context(_processes(workers))
        bar = stack.enter_context(Progress(console=console, disable=not console.is_terminal))
        task = bar.add_task(kind, total=len(frames))
        options = {"method": method, "members": members, "seed": seed}
        for number, found in run_pool(kind, model, frames, output, executor, **options):
            outcomes[number] = {"error": str(found)}
            if isinstance(found, Properties):
                outcomes[number] = _kept(found, output / f"{kind}-{number:04d}.png")
            bar.update(task, advance=1)
            if not json:
                typer.echo(f"structure {number}, {frames[number].symbols}\n{found}")
    if json:
        print_json([outcomes[number] for number in sorted(outcomes)])
    if all("error" in outcome for outcome in outcomes.values()):
        raise typer.Exit(1)


def _kept(found: "Properties", figure: Path) -> dict[str, Any]:
    """Plot the result; return its quantities without the members' values."""
    if not figure.exists():
        found.plot().savefig(figure, dpi=150)
    content = found.to_dict()
    for one in content["quantities"].values():
        del one["members"]
    return {"quantities": content["quantities"], "failures": content["failures"]}


def _processes(count: int) -> Any:
    """Start processes with one thread each; spawned, as torch requires."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    from torch import set_num_threads

    return ProcessPoolExecutor(
        count,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=set_num_threads,
        initargs=(1,),
    )
