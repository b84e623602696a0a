"""Any torch module behind the contract of a backbone, by one to three functions of its user.

    energies_of(module, graph)   energies of the atoms [N] or of the structures [S] in eV, to be
                                 differentiated by the graph's positions and cell; or, where forces
                                 are predicted directly, {"energy": [S], "forces": [N, 3]}
    graph_of(atoms, dtype)       the `AtomGraph` of one structure, where it is not all pairs within
                                 the cutoff; rows of edges are its edges in their order
    rows(graph)                  invariant features [rows, D] of further row types, by name; "node"
                                 adds to the elements of the atoms, "edge" stands in place of the
                                 radial basis

Nothing says on which rows a linear map acts; it is found out by running the module on examples
whose numbers of edges, atoms and structures differ.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from ase import Atoms
from torch import Tensor, nn

from blips import keys
from blips.backbones import e3nn_maps
from blips.backbones.base import AtomisticBackbone, equal_shares
from blips.bayes.linear import MapKind, register_kind
from blips.data.dataset import GraphOf
from blips.data.graph import AtomGraph, Graph
from blips.data.neighbours import NeighbourCache
from blips.errors import InputError, require

EnergiesOf = Callable[[Any, AtomGraph], Tensor | Mapping[str, Tensor]]
RowsOf = Callable[[AtomGraph], Mapping[str, Tensor]]


@cache
def register_schnetpack() -> None:
    """Register SchNetPack's `Dense`, which applies its activation itself: a(h W^T + b)."""
    base = require("schnetpack.nn.base", "pip install schnetpack")
    register_kind(MapKind(base.Dense, finish=_activate))


def _activate(layer: Any, z: Tensor) -> Tensor:
    return layer.activation(z)


# Packages with linear layers of their own -> what teaches them to the converter.
KNOWN_PACKAGES: dict[str, Callable[[], None]] = {
    "e3nn": e3nn_maps.register,
    "nequip": e3nn_maps.register_nequip,
    "schnetpack": register_schnetpack,
}


class Adapter(AtomisticBackbone):
    """A module of someone else's making, as a backbone for `blips.bayesianize`.

    The module is kept as `model`, and its parameters keep their names behind that prefix. It
    cannot be built from a name, so `blips.save` does not know it: keep its state dict.

    The functions are explained above; `cutoff` (A) is that of the neighbour list and of the
    description of edges. `example` are structures that the module knows, with different numbers of
    edges, atoms and structures, by default water and methane; `roles` (pattern of a map's name ->
    row type) stand in place of trying the module on them.
    """

    def __init__(
        self,
        module: nn.Module,
        energies_of: EnergiesOf,
        cutoff: float,
        *,
        graph_of: GraphOf | None = None,
        rows: RowsOf | None = None,
        example: Sequence[Atoms] | None = None,
        roles: Mapping[str, str] | None = None,
    ) -> None:
        if not callable(energies_of):
            raise InputError(
                f"energies_of is {energies_of!r}; expected a function (module, graph) -> energies "
                "in eV, of the atoms [N] or of the structures [S]"
            )
        super().__init__(cutoff)
        for package in {type(part).__module__.split(".")[0] for part in module.modules()}:
            KNOWN_PACKAGES.get(package, lambda: None)()
        self.model = module
        self._energies_of, self._graph_of, self._rows = energies_of, graph_of, rows
        self._example = example
        self.roles = dict(roles or {})  # pyright: ignore[reportAttributeAccessIssue]
        self.to(next(module.parameters()))
        graph = self.graph(self.examples())
        self._row_sizes = {name: value.shape[1] for name, value in self._further(graph).items()}
        result = energies_of(module, graph)
        self.conservative = not isinstance(result, Mapping)
        self._per_structure = _is_per_structure(result, graph)

    def graph_of(
        self, atoms: Atoms, dtype: torch.dtype, cache: NeighbourCache | None = None
    ) -> AtomGraph:
        """Build the graph of one structure, by the user's function if there is one."""
        if self._graph_of is None:
            return super().graph_of(atoms, dtype, cache)
        return self._graph_of(atoms, dtype)

    def examples(self) -> Sequence[Atoms]:
        """Return structures to find row types on."""
        return super().examples() if self._example is None else self._example

    def forward(self, graph: Graph) -> dict[str, Tensor]:
        """Compute energies of the atoms [N] eV; or energy [S], forces [N, 3] and other outputs."""
        graph = self._atom_graph(graph)
        result = self._energies_of(self.model, graph)
        if isinstance(result, Mapping):
            shares = self.reference(equal_shares(result[keys.ENERGY], graph), graph.numbers)
            return {**result, keys.ENERGY: graph.sum_over_structures(shares)}
        energies = equal_shares(result, graph) if self._per_structure else result
        return {keys.ENERGIES: self.reference(energies, graph.numbers)}

    @property
    def feature_sizes(self) -> dict[str, int]:
        """Those of edges and nodes, and of the user's rows."""
        return {**super().feature_sizes, **self._row_sizes}

    def row_counts(self, graph: Graph) -> dict[str, int]:
        """Count the rows of each type in this graph."""
        further = self._further(self._atom_graph(graph))
        return {name: len(rows) for name, rows in further.items()} | super().row_counts(graph)

    def row_features(self, graph: Graph) -> dict[str, Tensor]:
        """Return the features of edges and nodes, and those of the user."""
        return {**super().row_features(graph), **self._further(self._atom_graph(graph))}

    def _further(self, graph: AtomGraph) -> dict[str, Tensor]:
        features = {} if self._rows is None else dict(self._rows(graph))
        for name, value in features.items():
            if value.ndim != 2:
                raise InputError(
                    f"rows gave {name!r} features of shape {tuple(value.shape)}; "
                    "expected one line for each row, [rows, features]"
                )
        return features


def _is_per_structure(result: Tensor | Mapping[str, Tensor], graph: AtomGraph) -> bool:
    """Return whether energies are those of structures, not of atoms; refuse other shapes."""
    atoms, structures = graph.num_nodes, graph.num_structures
    if isinstance(result, Mapping):
        shapes = {name: tuple(value.shape) for name, value in result.items()}
        direct = {keys.ENERGY: (structures,), keys.FORCES: (atoms, 3)}
        stress = {keys.STRESS: (structures, 3, 3)}
        if not direct.items() <= shapes.items() <= {**direct, **stress}.items():
            raise InputError(
                f"energies_of gave shapes {shapes} for {atoms} atoms in {structures} structures; "
                f"expected {direct} and perhaps {stress}"
            )
        return True
    if tuple(result.shape) not in ((atoms,), (structures,)):
        raise InputError(
            f"energies_of gave shape {tuple(result.shape)}; expected one energy for each atom, "
            f"({atoms},), or for each structure, ({structures},)"
        )
    return len(result) != atoms
