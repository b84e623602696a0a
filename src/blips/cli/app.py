"""The application that commands join, and the arguments that they share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
