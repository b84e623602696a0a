"""Commands that show: demo, report."""

from pathlib import Path
from typing import Annotated

import typer

from blips.cli.app import EnergyKey, ForcesKey, Output, Samples, Seed, app, labels_of
from blips.defaults import SAMPLES


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="where everything goes")] = Path("runs/demo"),
    epochs: Annotated[int | None, typer.Option(help="fewer for a quick look")] = None,
    seed: Seed = 0,
) -> None:
    """Train and condition a potential for ammonia, test its error bars near and far, report.

    Example: blips demo --epochs 1 --folder runs/look
    """
    from blips.demo import run_demo

    run_demo(folder, epochs=epochs, seed=seed)


@app.command()
def report(
    target: Annotated[
        Path,
        typer.Argument(
            help="a run, a model, a released one's name, a campaign, or what predict wrote"
        ),
    ],
    output: Output = Path("report.html"),
    structures: Annotated[
        list[Path] | None,
        typer.Option(help="structures to predict, instead of the target's own; repeatable"),
    ] = None,
    samples: Samples = SAMPLES,
    seed: Seed = 0,
    bootstrap: Annotated[int, typer.Option(help="resamples for the intervals")] = 1000,
    shown: Annotated[int, typer.Option(help="structures of each set in the 3D view")] = 12,
    baseline: Annotated[
        Path | None, typer.Option(help="of a campaign: folder of a random one to compare with")
    ] = None,
    energy_key: EnergyKey = None,
    forces_key: ForcesKey = None,
) -> None:
    """Write one HTML file that opens offline: metrics, plots, structures in 3D.

    Example: blips report runs/demo -o report.html
    """
    from blips.progress import progress_shown
    from blips.report import write_report

    with progress_shown():
        path = write_report(
            target,
            output,
            structures=structures or (),
            samples=samples,
            seed=seed,
            bootstrap=bootstrap,
            shown=shown,
            baseline=baseline,
            labels=labels_of(None, energy_key, forces_key),
        )
    typer.echo(f"report in {path}, {path.stat().st_size / 1e6:.1f} MB")
