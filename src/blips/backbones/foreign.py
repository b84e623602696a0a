"""Potentials of other packages behind the contract of a backbone.

An adapter is one small class per package. It translates an `AtomGraph` into what the package's
own model takes, runs that model, and gives its atomic energies back; positions and cell stay
differentiable, so forces, stress, replicas and training are those of every other backbone. The
package's model is kept whole as `model`: its parameters keep their names behind that prefix, and
`export` writes them back in the package's own format.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ClassVar, Self

import torch
from ase.data import chemical_symbols
from torch import Tensor, nn

from blips import keys
from blips.backbones.base import AtomisticBackbone
from blips.data.graph import AtomGraph, Graph
from blips.errors import CheckpointError, InputError


class ForeignBackbone(AtomisticBackbone):
    """A released potential; subclasses say how its package is called.

    The constructor of a subclass takes what describes the architecture (`hyperparameters`, which
    JSON can hold) and makes the package's model with arbitrary weights, so that blips' checkpoints
    rebuild it without any file of the package. `released` makes one with the package's weights.

    `reference` holds corrections to the package's own energies per element, zero as released;
    fine-tuning to another level of theory refits them.
    """

    double_positions = True
    pip_line: ClassVar[str]
    model: Any  # the package's class, which type checkers do not see
    # Make the model with the weights that its authors released. Most take `weights`, a checkpoint
    # of the package in their place, and `trust`: let that file run code, as pickles do when read.
    released: ClassVar[Callable[..., Self]]
    package_energies: Callable[[AtomGraph], Tensor]  # the package's own, of the atoms, [N] eV
    package_checkpoint: Callable[[], Any]  # what the package saves, with `reference` in energies

    def __init__(self, model: nn.Module, cutoff: float, numbers: Iterable[int]) -> None:
        super().__init__(cutoff)
        self.model = model
        self.known_numbers = frozenset(numbers)  # atomic numbers

    def export(self, path: str | Path) -> Path:
        """Write the weights (of a Bayesian model: the means) as the package's own checkpoint."""
        torch.save(self.package_checkpoint(), path)
        return Path(path)

    @property
    def trained_numbers(self) -> frozenset[int]:
        """Atomic numbers that the released model knows, whatever it was trained on since."""
        return self.known_numbers

    def forward(self, graph: Graph) -> dict[str, Tensor]:
        """Compute the energies of the atoms, [N] eV: the package's plus `reference`, float64."""
        graph = self.checked(graph)
        return {keys.ENERGIES: self.reference(self.package_energies(graph), graph.numbers)}

    def checked(self, graph: Graph) -> AtomGraph:
        """Return the graph; raise an error that names elements the model does not know."""
        graph = self._atom_graph(graph)
        there = graph.remember("elements", lambda: frozenset(graph.numbers.unique().tolist()))
        if unknown := sorted(there - self.known_numbers):
            symbols = ", ".join(chemical_symbols[number] for number in unknown)
            raise InputError(
                f"{type(self).__name__} does not know {symbols}; it was made for "
                f"{len(self.known_numbers)} elements. Choose a model whose training data had them"
            )
        return graph

    def state_copy(self) -> dict[str, Tensor]:
        """Copy the state dict of the package's model, for `export` to change."""
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


def read_checkpoint(path: str | Path, *, trust: bool = False) -> Any:
    """Read what `torch.save` wrote: data only, or, with `trust`, any pickle, which can run code."""
    try:
        return torch.load(path, map_location="cpu", weights_only=not trust)
    except FileNotFoundError:
        raise CheckpointError(f"no checkpoint {path}; check the path") from None
    except (UnpicklingError, RuntimeError, EOFError, OSError) as error:
        remedy = "" if trust else "; if it is whole and you trust its author, give trust=True"
        raise CheckpointError(f"cannot read {path} as data ({error}){remedy}") from error
