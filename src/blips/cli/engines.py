"""Commands that run a potential inside other programs: lammps."""

from pathlib import Path
from typing import Annotated

import typer

from blips.cli.app import Json, Samples, Seed, app, load_model, print_json
from blips.cli.simulation import (
    Distinct,
    Error,
    Every,
    High,
    Low,
    SaveEvery,
    make_guard,
)
from blips.defaults import SAMPLES


@app.command()
def lammps(
    script: Annotated[Path, typer.Argument(help="input script of LAMMPS, see below")],
    model: Annotated[str, typer.Option(help="a model written by blips, or a released one's name")],
    elements: Annotated[str, typer.Option(help="of the atom types, in order: Si,O")],
    method: Annotated[
        str, typer.Option(help="what moves the atoms: map (means), frozen (one draw) or auto")
    ] = "map",
    member: Annotated[int, typer.Option(help="which draw, for frozen")] = 0,
    log: Annotated[Path, typer.Option(help="log file of LAMMPS")] = Path("log.lammps"),
    frames: Annotated[Path, typer.Option(help="frames for labelling are appended to it")] = Path(
        "uncertain.extxyz"
    ),
    low: Low = None,
    high: High = None,
    error: Error = None,
    every: Every = 10,
    save_every: SaveEvery = 10,
    distinct: Distinct = 0.1,
    samples: Samples = SAMPLES,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Run a LAMMPS script with the potential's forces, and its std as LAMMPS variables.

    The script says 'fix blips all external pf/callback 1 1' where the atoms are made. From there
    on it has v_max_force_std, v_energy_std and d_force_std, for fix halt, thermo and dumps.

    Example: blips lammps in.lammps --model model.safetensors --elements Si,O --low 0.2 --high 0.6
    """
    from blips.sim.calculator import Calculator
    from blips.sim.frames import FrameSaver
    from blips.sim.lammps import run_script, start

    potential = load_model(model)
    guard = make_guard(potential, low, high, error)
    saver = FrameSaver(frames, every=save_every, distinct=distinct)
    calculator = Calculator(potential, method, member=member, samples=samples, seed=seed)
    symbols = [symbol.strip() for symbol in elements.split(",")]
    lmp = start(["-log", str(log), "-screen", "none"])
    coupling = run_script(lmp, script, calculator, symbols, guard=guard, every=every, saver=saver)
    step, saved = int(lmp.extract_global("ntimestep")), len(saver.frames)
    lmp.close()
    if json:
        content = {"step": step, "stopped": bool(coupling.stopped), "reason": coupling.stopped}
        print_json({**content, "saved": saved, "log": str(log), "frames": str(frames)})
    else:
        stopped = f"stopped at step {step}: {coupling.stopped}" if coupling.stopped else ""
        typer.echo(stopped or f"the script is done, at step {step}")
        typer.echo(f"{saved} frames saved for labelling in {frames}; LAMMPS's log is {log}")
