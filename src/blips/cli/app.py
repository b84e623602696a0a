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
    from blips.potential import BayesianPotential

app = typer.Typer(
    name="blips",
    help="Error bars for any interatomic potential.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Files = Annotated[list[str], typer.Argument(help="config files and a.b=value, left to right")]
Model = Annotated[Path, typer.Argument(help="a model written by blips (.safetensors)")]
Structures = Annotated[Path, typer.Argument(help="structures, any file that ASE reads")]
Samples = Annotated[int, typer.Option(help="posterior samples")]
Seed = Annotated[int, typer.Option(help="the same seed gives the same result")]
Json = Annotated[bool, typer.Option("--json", help="print the outcome as JSON, for machines")]


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


def load_bayesian(path: Path) -> "BayesianPotential":
    """The potential in a file; a model without posterior is refused."""
    from blips.potential import BayesianPotential
    from blips.train.checkpoint import load

    model = load(path)
    if not isinstance(model, BayesianPotential):
        raise ConfigError(
            f"{path} holds a plain {type(model).__name__} without posterior, which has no error "
            "bars; train with model.bayes.enabled=true"
        )
    return model
