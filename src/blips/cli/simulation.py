"""Commands that simulate: md."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blips.cli.app import (
    Json,
    Model,
    Samples,
    Seed,
    app,
    ctrl_c_asks,
    known_elements,
    load_model,
    print_json,
)
from blips.defaults import SAMPLES
from blips.errors import ConfigError

if TYPE_CHECKING:
    from ase import Atoms

    from blips.prediction import Model as Potential
    from blips.sim.dynamics import Outcome
    from blips.sim.guard import Guard
    from blips.sim.run import MDSettings

GUARD, RUN = "Guard", "Dynamics"


def _guard_option(name: str, text: str) -> typer.models.OptionInfo:
    return typer.Option(name, help=text, rich_help_panel=GUARD)


@app.command()
def md(
    model: Model,
    structure: Annotated[Path, typer.Argument(help="where to start, any file that ASE reads")],
    frame: Annotated[int, typer.Option(help="of that file; -1 is the last")] = -1,
    folder: Annotated[Path, typer.Option(help="for the trajectory and outcome")] = Path("runs/md"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="an earlier run there")] = False,
    temperature: Annotated[float, typer.Option(help="K", rich_help_panel=RUN)] = 300.0,
    to: Annotated[
        float | None, typer.Option(help="K at the end: a linear ramp", rich_help_panel=RUN)
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="time steps", rich_help_panel=RUN)] = 1000,
    timestep: Annotated[float, typer.Option(help="fs", rich_help_panel=RUN)] = 0.5,
    ensemble: Annotated[
        str, typer.Option(help="langevin or nve", rich_help_panel=RUN)
    ] = "langevin",
    friction: Annotated[float, typer.Option(help="1/ps, Langevin", rich_help_panel=RUN)] = 10.0,
    method: Annotated[
        str,
        typer.Option(
            help="what moves the atoms: map (posterior means), frozen (one draw), auto or mc",
            rich_help_panel=RUN,
        ),
    ] = "map",
    member: Annotated[int, typer.Option(help="which draw, for frozen", rich_help_panel=RUN)] = 0,
    max_force_std: Annotated[
        float | None, _guard_option("--max-force-std", "largest atomic force std, eV/A")
    ] = None,
    max_energy_std: Annotated[
        float | None, _guard_option("--max-energy-std", "energy std per atom, eV")
    ] = None,
    max_error: Annotated[
        float | None,
        _guard_option("--max-error", "force error, eV/A, not to exceed more often than --rate"),
    ] = None,
    rate: Annotated[float, _guard_option("--rate", "how often; needs a calibrated model")] = 0.05,
    closest: Annotated[
        float, _guard_option("--closest", "shortest distance over the sum of covalent radii")
    ] = 0.4,
    farthest: Annotated[
        float | None, _guard_option("--farthest", "distance to the nearest neighbour, A")
    ] = None,
    every: Annotated[int, _guard_option("--every", "steps between looks and saved frames")] = 10,
    action: Annotated[
        str, _guard_option("--action", "at a finding: stop, log, or ask a reference")
    ] = "stop",
    reference: Annotated[
        str | None, _guard_option("--reference", "gfn2-xtb, pyscf, emt, ... or module:Name")
    ] = None,
    reference_limit: Annotated[
        float, _guard_option("--reference-limit", "ask: true force error to go on with, eV/A")
    ] = 0.5,
    samples: Samples = SAMPLES,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Molecular dynamics that stops where the potential no longer knows what it does.

    Velocities are those of the structure, or drawn where it has none, so the trajectory of a run
    can be continued. A run that the guard stopped is a success; see outcome.json.

    Example: blips md model.safetensors start.extxyz --temperature 300 --to 2000 --max-force-std 1
    """
    from blips.data.structures import check_structures, read_structures
    from blips.sim.guard import Guard, std_for
    from blips.sim.reference import make_calculator
    from blips.sim.run import MDSettings, outcome_dict

    settings = MDSettings(
        temperature=temperature,
        to=to,
        steps=steps,
        timestep=timestep,
        ensemble=ensemble,
        friction=friction,
        method=method,
        member=member,
        samples=samples,
        every=every,
        action=action,
        reference_limit=reference_limit,
        seed=seed,
    )
    if max_error is not None and max_force_std is not None:
        raise ConfigError("--max-error and --max-force-std are two limits on one std; give one")
    asked = None if reference is None else make_calculator(reference, trust=True)
    potential = load_model(model)
    frames = read_structures(structure, frame)
    atoms = check_structures(frames, structure, elements=known_elements(potential))[0]
    if max_error is not None:
        _check_calibrated(potential, model)
        max_force_std = std_for(max_error, rate)
    guard = Guard(max_force_std, max_energy_std, closest, farthest)
    outcome = _run(potential, atoms, settings, guard, folder, asked, overwrite)
    if json:
        print_json(outcome_dict(outcome, settings, guard, folder))
    else:
        _tell(outcome, folder)
    if outcome.interrupted:
        raise typer.Exit(130)


def _run(
    potential: "Potential",
    atoms: "Atoms",
    settings: "MDSettings",
    guard: "Guard",
    folder: Path,
    reference: object,
    overwrite: bool,
) -> "Outcome":
    """Run with a bar on the terminal; Ctrl-C ends it after the current step."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    from blips.sim.run import run_md

    console = Console(stderr=True)
    if guard.force_std is None and guard.energy_std_per_atom is None:
        console.print(
            "no limit on the std, only the geometry is guarded; give --max-force-std, "
            "--max-energy-std or --max-error",
            highlight=False,
            soft_wrap=True,
        )
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeLeft())
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as bar,
        ctrl_c_asks() as pressed,
    ):
        task = bar.add_task("", total=settings.steps)

        def show(step: int, atoms: "Atoms") -> None:
            text = f"{atoms.get_temperature():.0f} K"
            if "forces_uncertainty" in atoms.arrays:
                std = (atoms.arrays["forces_uncertainty"] ** 2).sum(axis=1).max() ** 0.5
                text += f"  std {std:.3g} eV/A"
            bar.update(task, completed=step, description=text)

        return run_md(
            potential,
            atoms,
            settings,
            guard,
            folder,
            reference=reference,
            overwrite=overwrite,
            should_end=pressed,
            progress=show,
        )


def _tell(outcome: "Outcome", folder: Path) -> None:
    if outcome.stopped:
        typer.echo(f"stopped after {outcome.steps} steps: {outcome.reason}")
    elif outcome.interrupted:
        typer.echo(
            f"interrupted after {outcome.steps} steps; go on from {folder / 'trajectory.extxyz'} "
            "in another folder"
        )
    else:
        typer.echo(f"{outcome.steps} steps done, {len(outcome.events)} findings")
    typer.echo(f"trajectory, uncertain frames and outcome.json in {folder}")


def _check_calibrated(potential: "Potential", model: Path) -> None:
    if "forces" not in potential.calibration and getattr(potential, "posterior", None) is None:
        raise ConfigError(
            f"--max-error needs calibrated error bars, and {model} has none for forces; "
            f"run blips calibrate {model} held-out.extxyz -o calibrated.safetensors first"
        )
