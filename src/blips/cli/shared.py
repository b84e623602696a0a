"""The application that commands join, and the arguments that they share."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from blips.errors import ConfigError
from blips.files import jsonable

if TYPE_CHECKING:
    from ase import Atoms

    from blips.backbones.base import Backbone
    from blips.data.labels import Labels
    from blips.prediction import Model as Potential

app = typer.Typer(
    name="blips",
    epilog="Exit codes: 0 done, 1 the run failed, 2 a mistake in the command, the configuration or "
    "the data, 130 interrupted (Ctrl-C). --debug anywhere shows the traceback of an error.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        from blips import __version__

        typer.echo(f"blips {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        Option(
            "--version", help="Show the version and exit.", is_eager=True, callback=_show_version
        ),
    ] = False,
) -> None:
    """Error bars for any interatomic potential."""


def no_folder(output: Path) -> Path:
    """Refuse a folder as the file to write, before anything is computed."""
    if output.is_dir():
        raise ConfigError(f"{output} is a folder; give the name of a file to write in it")
    return output


Files = Annotated[list[str], Argument(help="config files and a.b=value, left to right")]
Model = Annotated[
    str, Argument(help="a model written by blips (.safetensors), or a released one's name")
]
Structures = Annotated[Path, Argument(help="structures, any file that ASE reads")]
Output = Annotated[Path, Option("--output", "-o", help="file to write", callback=no_folder)]
Samples = Annotated[int, Option(help="posterior samples")]
Seed = Annotated[int, Option(help="the same seed gives the same result")]
Device = Annotated[str, Option(help="to compute on: cpu, cuda, cuda:1, mps")]
Json = Annotated[bool, Option("--json", help="print the outcome as JSON, for machines")]
EnergyKey = Annotated[
    str | None, Option(help="name of the energy in the file", rich_help_panel="Labels")
]
ForcesKey = Annotated[str | None, Option(help="of the forces", rich_help_panel="Labels")]
Resume = Annotated[bool, Option("--resume", help="continue what was interrupted")]
Bootstrap = Annotated[int, Option(help="resamples for the intervals")]


def print_json(content: Any) -> None:
    """Print what can be made JSON, see `jsonable`."""
    typer.echo(json.dumps(jsonable(content), indent=1))


def load_model(model: str, device: str = "cpu") -> "Potential":
    """Load a Bayesian potential or a baseline; plain models, without error bars, are refused."""
    from blips.prediction import Model as Potential
    from blips.train.released import load

    found = load(model, device)
    if not isinstance(found, Potential):
        raise ConfigError(
            f"{model} holds a plain {type(found).__name__} without error bars; blips condition "
            f"{model} train.extxyz --valid valid.extxyz -o FILE gives it some"
        )
    return found


def labels_of(
    trained_with: "Labels | None", energy_key: str | None, forces_key: str | None
) -> "Labels | None":
    """Return the names of labels: those typed, else those that the model was trained with."""
    from dataclasses import replace

    from blips.data.labels import Labels

    given = {"energy_key": energy_key, "forces_key": forces_key}
    typed = {name: key for name, key in given.items() if key is not None}
    return replace(trained_with or Labels(), **typed) if typed else trained_with


def read_known(
    path: Path, backbone: "Backbone", labels: "Labels | None" = None, index: str | int = ":"
) -> list["Atoms"]:
    """Read and check structures of a file; refuse elements the model was not trained on."""
    from blips.data.structures import check_structures, read_structures

    elements = getattr(backbone, "trained_numbers", None)
    return check_structures(read_structures(path, index), path, elements=elements, labels=labels)


@contextmanager
def going_on(how: str) -> Iterator[None]:
    """After Ctrl-C, say how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"interrupted; {how}", err=True)
        raise typer.Exit(130) from None
