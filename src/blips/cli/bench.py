"""Commands that measure: bench, fast-uncertainty."""

from pathlib import Path
from typing import Annotated

import typer

from blips.cli.app import app


@app.command("fast-uncertainty")
def fast_uncertainty(
    folder: Annotated[Path, typer.Option(help="for results; existing ones are kept")] = Path(
        "results/fast-uncertainty"
    ),
    samples: Annotated[int, typer.Option(help="of the reference")] = 1000,
    molecules: Annotated[int, typer.Option(help="NH3 in each set")] = 8,
    crystals: Annotated[int, typer.Option(help="of quartz, and of silica, in each set")] = 2,
    only: Annotated[
        list[str] | None, typer.Option(help="beginnings of names of models; repeatable")
    ] = None,
    seed: Annotated[
        list[int] | None, typer.Option(help="of weights and training; repeatable; default: 0")
    ] = None,
    runs: Annotated[
        Path, typer.Option(help="for training of our own models, and for samples, which are kept")
    ] = Path("runs/fast"),
) -> None:
    """Compare error bars without sampling with those of a thousand samples.

    Example: blips fast-uncertainty --only chgnet --samples 20 --molecules 3 --crystals 0
    """
    import torch

    from blips.experiments.fast import study
    from blips.experiments.fast_data import Counts

    torch.set_num_threads(1)
    counts = Counts(molecules, crystals)
    study(
        folder,
        samples=samples,
        counts=counts,
        only=only or (),
        seeds=seed or (0,),
        runs=runs,
        report=typer.echo,
    )
    typer.echo(f"table in {folder / 'table.md'}")


@app.command()
def bench(
    folder: Annotated[Path, typer.Option(help="for bench.json, bench.md, bench.png")] = Path(
        "results/benchmarks"
    ),
    part: Annotated[
        list[str] | None,
        typer.Option(help="cost, memory, flops or peers; repeatable; default: all"),
    ] = None,
    size: Annotated[
        list[int] | None, typer.Option(help="atoms: 4, 36, 144 or 720; repeatable; default: all")
    ] = None,
    samples: Annotated[
        list[int] | None, typer.Option(help="repeatable; default: 8, 32, 100")
    ] = None,
    repeats: Annotated[int, typer.Option(help="of every time, at most")] = 40,
    model: Annotated[list[str] | None, typer.Option(help="whose operations are counted")] = None,
) -> None:
    """Measure what error bars cost: time, memory, operations, beside baselines and peers.

    Example: blips bench --part cost --size 4 --samples 2 --repeats 2
    """
    from blips.errors import ConfigError
    from blips.experiments.bench import SAMPLES, SIZES
    from blips.experiments.bench_report import PARTS
    from blips.experiments.bench_report import bench as run

    parts, sizes = part or PARTS, size or SIZES
    if unknown := {*parts} - {*PARTS}:
        raise ConfigError(f"unknown part {', '.join(unknown)}; use {', '.join(PARTS)}")
    if odd := {*sizes} - {*SIZES}:
        raise ConfigError(f"no structure of {odd} atoms; use {', '.join(map(str, SIZES))}")
    chosen = samples or SAMPLES
    run(
        folder,
        parts=parts,
        sizes=sizes,
        samples=chosen,
        repeats=repeats,
        models=model or (),
        report=typer.echo,
    )
    typer.echo(f"tables in {folder / 'bench.md'}")
