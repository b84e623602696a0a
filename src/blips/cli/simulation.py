"""Commands that simulate: md and lammps."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from blips.cli import shared
from blips.defaults import SAMPLES
from blips.errors import ConfigError
from blips.progress import progress_shown, retitle

if TYPE_CHECKING:
    from ase import Atoms

    from blips.prediction import Model as Potential
    from blips.sim.guard import Guard

of_guard = partial(Option, rich_help_panel="Guard")
of_dynamics = partial(Option, rich_help_panel="Dynamics")

Method = Annotated[
    str, of_dynamics(help="what moves the atoms: map (means), frozen (one draw), auto or mc")
]
Member = Annotated[int, of_dynamics(help="which draw, for frozen")]
Low = Annotated[
    str | None, of_guard(help="save frames above this force std, eV/A (or 1%: --error)")
]
High = Annotated[str | None, of_guard(help="stop above this force std, eV/A (or 10%: --error)")]
Error = Annotated[
    float | None, of_guard(help="--low and --high are shares of force errors above this, eV/A")
]
Every = Annotated[int, of_guard(help="steps between two looks of the guard")]
SaveEvery = Annotated[int, of_guard(help="least steps between two saved frames")]
Distinct = Annotated[float, of_guard(help="A, by which distances of saved frames differ at least")]


@shared.app.command()
def md(
    given: typer.Context,
    model: shared.Model,
    structure: Annotated[Path, Argument(help="where to start, any file that ASE reads")],
    frame: Annotated[int, Option(help="of that file; -1 is the last")] = -1,
    folder: Annotated[Path, Option(help="for the trajectory and outcome")] = Path("runs/md"),
    overwrite: Annotated[bool, Option("--overwrite", help="an earlier run there")] = False,
    temperature: Annotated[float, of_dynamics(help="K")] = 300.0,
    to: Annotated[float | None, of_dynamics(help="K at the end: a linear ramp")] = None,
    steps: Annotated[int, of_dynamics(min=0, help="time steps")] = 1000,
    timestep: Annotated[float, of_dynamics(help="fs")] = 0.5,
    ensemble: Annotated[str, of_dynamics(help="langevin (NVT), npt or nve")] = "langevin",
    friction: Annotated[float, of_dynamics(help="1/ps, Langevin")] = 10.0,
    pressure: Annotated[float, of_dynamics(help="GPa, of npt")] = 0.0,
    method: Method = "map",
    member: Member = 0,
    low: Low = None,
    high: High = None,
    error: Error = None,
    max_energy_std: Annotated[
        float | None, of_guard(help="stop above this energy std per atom, eV")
    ] = None,
    closest: Annotated[
        float, of_guard(help="shortest distance over the sum of covalent radii")
    ] = 0.4,
    farthest: Annotated[float | None, of_guard(help="distance to the nearest neighbour, A")] = None,
    every: Every = 10,
    save_every: SaveEvery = 10,
    distinct: Distinct = 0.1,
    reference: Annotated[
        str | None, of_guard(help="ask it above --high: gfn2-xtb, pyscf, emt, ... or module:Name")
    ] = None,
    reference_limit: Annotated[float, of_guard(help="true force error to go on with, eV/A")] = 0.5,
    samples: shared.Samples = SAMPLES,
    seed: shared.Seed = 0,
    device: shared.Device = "cpu",
    json: shared.Json = False,
) -> None:
    """Run molecular dynamics that stops where the potential becomes too uncertain.

    Up to --low it goes on, above it saves frames for labelling, above --high it stops.

    Velocities are those of the structure, or drawn where it has none, so the trajectory of a run
    can be continued. A run that the guard stopped is a success; see outcome.json.

    Example: blips md model.safetensors start.extxyz --temperature 300 --to 2000 --low 0.3 --high 1
    """
    from blips.config import load_as
    from blips.sim.dynamics import MDSettings, run_md
    from blips.sim.reference import make_calculator

    settings = load_as(MDSettings, {name: given.params[name] for name in MDSettings.model_fields})
    asked = None if reference is None else make_calculator(reference, trust=True)
    potential = shared.load_model(model, device)
    atoms = shared.read_known(structure, potential.backbone, index=frame)[0]
    geometry = {"closest": closest, "farthest": farthest}
    guard = make_guard(potential, low, high, error, energy_std_per_atom=max_energy_std, **geometry)
    if not guard.needs_std:
        text = "no limit on the std, only the geometry is guarded; give --low and --high"
        typer.echo(text, err=True)
    with progress_shown(), _ctrl_c() as pressed:
        options = {"reference": asked, "overwrite": overwrite, "should_end": pressed}
        outcome = run_md(potential, atoms, settings, guard, folder, progress=_show, **options)
    said = f"{outcome.steps} steps done, {len(outcome.frames)} frames saved for labelling"
    if outcome.stopped:
        said = f"stopped after {outcome.steps} steps: {outcome.reason}"
    if outcome.interrupted:
        go_on = f"go on from {folder / 'trajectory.extxyz'} in another folder"
        said = f"interrupted after {outcome.steps} steps; {go_on}"
    if json:
        typer.echo((folder / "outcome.json").read_text(), nl=False)
    else:
        typer.echo(f"{said}\ntrajectory, uncertain frames and outcome.json in {folder}")
    if outcome.interrupted:
        raise typer.Exit(130)


@contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """Yield whether Ctrl-C was pressed, which ends a run after its step; a second one at once."""
    pressed = False

    def handle(*_: object) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _show(atoms: "Atoms") -> None:
    """Show temperature and std beside the progress of the run."""
    text = f"{atoms.get_temperature():.0f} K"
    if "forces_uncertainty" in atoms.arrays:
        std = (atoms.arrays["forces_uncertainty"] ** 2).sum(axis=1).max() ** 0.5
        text += f"  std {std:.3g} eV/A"
    retitle(text)


def make_guard(
    potential: "Potential", low: str | None, high: str | None, error: float | None, **others: Any
) -> "Guard":
    """Make a guard of thresholds in eV/A or, with an error, of rates such as 5%."""
    from blips.sim.guard import Guard

    texts = {name: text for name, text in (("low", low), ("high", high)) if text is not None}
    by_rate, given = error is not None, {text.endswith("%") for text in texts.values()}
    if given - {by_rate} or (by_rate and not given):
        raise ConfigError(
            "--low and --high are either both in eV/A, such as --low 0.1 --high 0.5, or both "
            "shares of force errors above --error, such as --low 1% --high 10% --error 0.5"
        )
    limits: dict[str, float] = {}
    for name, text in texts.items():
        try:
            limits[name] = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            raise ConfigError(f"--{name} is {text!r}; expected a number in eV/A, or 5%") from None
    if error is None:
        return Guard(**limits, **others)
    if "forces" not in potential.calibration and getattr(potential, "posterior", None) is None:
        raise ConfigError(
            "--error needs calibrated error bars, and this model has none for forces; "
            "run blips calibrate model.safetensors held-out.extxyz -o calibrated.safetensors first"
        )
    return Guard.by_error_rate(error, **limits, **others)


@shared.app.command()
def lammps(
    script: Annotated[Path, Argument(help="input script of LAMMPS, see below")],
    model: Annotated[str, Option(help="a model written by blips, or a released one's name")],
    elements: Annotated[str, Option(help="of the atom types, in order: Si,O")],
    method: Method = "map",
    member: Member = 0,
    frames: Annotated[Path, Option(help="frames for labelling are appended to it")] = Path(
        "uncertain.extxyz"
    ),
    low: Low = None,
    high: High = None,
    error: Error = None,
    every: Every = 10,
    save_every: SaveEvery = 10,
    distinct: Distinct = 0.1,
    samples: shared.Samples = SAMPLES,
    seed: shared.Seed = 0,
    json: shared.Json = False,
) -> None:
    """Run a LAMMPS script with the potential's forces, and its std as LAMMPS variables.

    The script says 'fix blips all external pf/callback 1 1' where the atoms are made. From there
    on it has v_max_force_std, v_energy_std and d_force_std, for fix halt, thermo and dumps.

    Example: blips lammps in.lammps --model model.safetensors --elements Si,O --low 0.2 --high 0.6
    """
    from blips.sim.calculator import Calculator
    from blips.sim.frames import FrameSaver
    from blips.sim.lammps import run_script, start

    potential = shared.load_model(model)
    guard = make_guard(potential, low, high, error)
    saver = FrameSaver(frames, every=save_every, distinct=distinct)
    calculator = Calculator(potential, method, member=member, samples=samples, seed=seed)
    symbols = [symbol.strip() for symbol in elements.split(",")]
    lmp = start(["-screen", "none"])
    coupling = run_script(lmp, script, calculator, symbols, guard=guard, every=every, saver=saver)
    step, saved = int(lmp.extract_global("ntimestep")), len(saver.frames)
    lmp.close()
    reason = coupling.stopped
    if json:
        content = {"step": step, "stopped": bool(reason), "reason": reason, "saved": saved}
        shared.print_json({**content, "frames": str(frames)})
    else:
        typer.echo(f"stopped at step {step}: {reason}" if reason else f"done, at step {step}")
        typer.echo(f"{saved} frames saved for labelling in {frames}")
