"""The application that commands join, and the arguments that they share."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blips.errors import ConfigError

if TYPE_CHECKING:
    from ase import Atoms

    from blips.prediction import Model as Potential

app = typer.Typer(
    name="blips",
    help="Error bars for any interatomic potential.",
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
        typer.Option(
            "--version", help="Show the version and exit.", is_eager=True, callback=_show_version
        ),
    ] = False,
) -> None:
    """Error bars for any interatomic potential."""


Files = Annotated[list[str], typer.Argument(help="config files and a.b=value, left to right")]
Model = Annotated[
    Path, typer.Argument(help="a model written by blips (.safetensors), or a released one's name")
]
Structures = Annotated[Path, typer.Argument(help="structures, any file that ASE reads")]
Samples = Annotated[int, typer.Option(help="posterior samples")]
Seed = Annotated[int, typer.Option(help="the same seed gives the same result")]
Json = Annotated[bool, typer.Option("--json", help="print the outcome as JSON, for machines")]


@contextmanager
def messages_aside(aside: bool) -> Iterator[None]:
    """Within the block, what is meant for people goes to stderr, if `aside`."""
    import sys
    from contextlib import nullcontext, redirect_stdout

    with redirect_stdout(sys.stderr) if aside else nullcontext():
        yield


def print_json(content: Any) -> None:
    """Print JSON; numbers that are not finite, which JSON has no words for, become null."""
    import json

    typer.echo(json.dumps(_finite(content), indent=1))


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {str(key): _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    if isinstance(content, float) and not abs(content) < float("inf"):
        return None
    return content


@contextmanager
def ctrl_c_asks() -> Iterator[Callable[[], bool]]:
    """Within the block the first Ctrl-C only makes the yielded function True; a second one acts."""
    pressed = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def load_model(path: Path) -> "Potential":
    """Load a Bayesian potential or a baseline; plain models, without error bars, are refused."""
    from blips.prediction import Model as Potential
    from blips.train.released import load

    model = load(str(path))
    if not isinstance(model, Potential):
        raise ConfigError(
            f"{path} holds a plain {type(model).__name__} without posterior, which has no error "
            "bars; train with model.bayes.enabled=true"
        )
    return model


def read_known(path: Path, potential: "Potential") -> list["Atoms"]:
    """Checked structures of a file; elements that the potential was not trained on are refused."""
    from blips.data.structures import check_structures, read_structures

    return check_structures(read_structures(path), path, elements=known_elements(potential))


def known_elements(potential: "Potential") -> list[int] | None:
    """Atomic numbers that a potential was trained on; None where it does not say."""
    known = getattr(potential.backbone, "trained_numbers", None)
    return sorted(known) if known else None
