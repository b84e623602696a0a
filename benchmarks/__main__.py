"""What do error bars cost: time, memory, operations, beside baselines and other packages?

python -m benchmarks --part cost --size 4 --samples 2 --repeats 2
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cost import SAMPLES
from benchmarks.report import PARTS, bench
from benchmarks.structures import SIZES


def run(
    folder: Annotated[Path, typer.Option(help="for bench.json, bench.md, bench.png")] = Path(
        "results/benchmarks"
    ),
    part: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(PARTS)}; repeatable; default: all")
    ] = None,
    size: Annotated[
        list[int] | None,
        typer.Option(help=f"atoms: {', '.join(map(str, SIZES))}; repeatable; default: all"),
    ] = None,
    samples: Annotated[
        list[int] | None, typer.Option(help="repeatable; default: 8, 32, 100")
    ] = None,
    repeats: Annotated[int, typer.Option(help="of every time, at most")] = 40,
    model: Annotated[list[str] | None, typer.Option(help="whose operations are counted")] = None,
) -> None:
    """Measure what error bars cost: time, memory, operations, beside baselines and peers."""
    parts, sizes = part or PARTS, size or SIZES
    if unknown := {*parts} - {*PARTS}:
        raise typer.BadParameter(f"unknown part {', '.join(unknown)}; use {', '.join(PARTS)}")
    if odd := {*sizes} - {*SIZES}:
        raise typer.BadParameter(f"no structure of {odd} atoms; use {', '.join(map(str, SIZES))}")
    bench(
        folder,
        parts=parts,
        sizes=sizes,
        samples=samples or SAMPLES,
        repeats=repeats,
        models=model or (),
        report=typer.echo,
    )
    typer.echo(f"tables in {folder / 'bench.md'}")


if __name__ == "__main__":
    typer.run(run)
