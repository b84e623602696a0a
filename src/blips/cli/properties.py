"""Commands for properties of materials: property."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from blips.cli import shared
from blips.errors import ConfigError
from blips.progress import progress_shown, track

if TYPE_CHECKING:
    from ase import Atoms

    from blips.backbones.base import Backbone
    from blips.properties.result import Properties

KINDS = "relax, formation, equation_of_state, elastic, phonons, barrier or dynamics"
OWN = {  # options of single kinds; all others are for every kind
    "formation": ("reference",),
    "barrier": ("end", "images", "scan"),
    "dynamics": ("temperature", "timestep"),
}

of_formation, of_barrier, of_dynamics = (
    partial(Option, rich_help_panel=f"Options of {kind}") for kind in OWN
)


@shared.app.command("property")
def property_(
    given: typer.Context,
    kind: Annotated[str, Argument(help=KINDS)],
    model: shared.Model,
    structures: shared.Structures,
    output: Annotated[Path, Option("--output", "-o", help="folder for JSON and figures")] = Path(
        "runs/property"
    ),
    method: Annotated[
        str, Option(help="linear (first order, quick) or members (each by itself)")
    ] = "linear",
    members: Annotated[int, Option(help="members of the posterior")] = 16,
    fmax: Annotated[float | None, Option(help="largest force left, eV/A")] = None,
    steps: Annotated[
        int | None, Option(help="of a relaxation or band at most; of dynamics")
    ] = None,
    workers: Annotated[int, Option(min=1, help="structures side by side, by Dask")] = 1,
    seed: shared.Seed = 0,
    json: shared.Json = False,
    reference: Annotated[
        list[str] | None,
        of_formation(help="file with single elements, or an energy in eV/atom such as O=-4.95"),
    ] = None,
    end: Annotated[
        Path | None,
        of_barrier(help="file with the structures' other ends; without it they are a path"),
    ] = None,
    images: Annotated[int | None, of_barrier(help="of the band, ends included")] = None,
    scan: Annotated[
        bool, of_barrier("--scan", help="take the path as it is, relax nothing")
    ] = False,
    temperature: Annotated[float | None, of_dynamics(help="K")] = None,
    timestep: Annotated[float | None, of_dynamics(help="fs")] = None,
) -> None:
    """Compute a property of every structure of a file, with its error bar.

    Writes JSON and a figure for each structure; those that are finished are not computed again.
    A structure that fails is named, the others go on.

    Example: blips property elastic chgnet quartz.cif -o runs/quartz

    blips property formation chgnet oxides.extxyz --reference metals.extxyz --reference O=-4.95

    blips property barrier chgnet start.cif --end final.cif --images 7

    blips property dynamics chgnet melt.cif --temperature 1200 --steps 20000 --method members
    """
    from blips.active.config import ExecutorConfig
    from blips.active.executor import make_executor
    from blips.properties import Properties
    from blips.properties.pool import run_pool

    sources = {name: given.get_parameter_source(name) for name in given.params}
    typed = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    for owner, names in OWN.items():
        if owner != kind and (others := typed.intersection(names)):
            raise ConfigError(f"--{min(others)} is an option of {owner}, not of {kind}")
    backbone = shared.load_model(model).backbone
    frames = shared.read_known(structures, backbone)
    names = ["method", "members", "seed", "fmax", "steps", "images", "temperature", "timestep"]
    options = {name: given.params[name] for name in names if given.params[name] is not None}
    jobs: Sequence[Any] = frames
    if kind == "formation":
        options["references"] = _references(reference or [], backbone)
    if kind == "barrier":
        ends = None if end is None else shared.read_known(end, backbone)
        if ends is not None and len(ends) != len(frames):
            raise ConfigError(f"{len(frames)} structures and {len(ends)} ends; expected as many")
        jobs = [frames] if ends is None else [list(pair) for pair in zip(frames, ends, strict=True)]
        options["band"] = not scan
    outcomes: dict[int, Any] = {}
    config = ExecutorConfig(kind="local", workers=workers)
    with make_executor(config) if workers > 1 else nullcontext() as executor, progress_shown():
        finished = run_pool(kind, model, jobs, output, executor, **options)
        for number, found in track(finished, kind, len(jobs)):
            outcomes[number] = {"error": str(found)}
            if isinstance(found, Properties):
                outcomes[number] = _kept(found, output / f"{kind}-{number:04d}.json")
            if not json:
                typer.echo(f"structure {number}, {frames[number].symbols}\n{found}")
    if json:
        shared.print_json([outcomes[number] for number in sorted(outcomes)])
    if all("error" in outcome for outcome in outcomes.values()):
        raise typer.Exit(1)


def _references(given: Sequence[str], backbone: "Backbone") -> dict[str, "Atoms | float"]:
    """Read energies, and the structures of files, each of one element."""
    found: dict[str, Atoms | float] = {}
    for text in given:
        symbol, equals, energy = text.partition("=")
        if equals:
            try:
                found[symbol] = float(energy)
            except ValueError:
                raise ConfigError(
                    f"--reference {text}: expected an energy, as in O=-4.95"
                ) from None
            continue
        for atoms in shared.read_known(Path(text), backbone):
            elements = sorted(set(atoms.symbols))
            if len(elements) > 1 or elements[0] in found:
                raise ConfigError(
                    f"{text}: {atoms.symbols}; expected one structure of each element alone"
                )
            found[elements[0]] = atoms
    return found


def _kept(found: "Properties", file: Path) -> dict[str, Any]:
    """Plot a result that is new; return its quantities without the members' values."""
    figure = file.with_suffix(".png")
    if not figure.exists() or figure.stat().st_mtime < file.stat().st_mtime:
        found.plot().savefig(figure, dpi=150)
    content = found.to_dict()
    for one in content["quantities"].values():
        del one["members"]
    return {"quantities": content["quantities"], "failures": content["failures"]}
