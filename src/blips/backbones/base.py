"""The contract between a backbone and everything that makes it Bayesian.

A backbone is an `nn.Module` that turns a graph into outputs and says, in three declarations,
what its rows are: which linear maps act on which rows (`roles`), what the rows look like to an
invariant observer (`row_features`), and how large those descriptions are (`feature_sizes`).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from ase import Atoms
from ase.build import molecule
from torch import Tensor, nn

from blips import keys
from blips.data.graph import MAX_ATOMIC_NUMBER, AtomGraph, Graph
from blips.data.labels import Labels
from blips.data.neighbours import NeighbourCache
from blips.data.structures import batches_of
from blips.errors import InputError
from blips.progress import track

LARGEST_CUTOFF = 100.0  # A; searches for neighbours take for ever far beyond


class Backbone(nn.Module):
    """A message-passing model whose linear maps act on rows (edges, nodes, ...).

    Maps are named by glob patterns; the first that matches counts. `readout_maps` are those after
    the last exchange between atoms, which are conditioned by default; they are found by trial where
    none are declared. `pretrained` weights, as a model was released with, get a narrow posterior.
    """

    roles: ClassVar[Mapping[str, str]] = {}  # pattern -> the row type that a map acts on
    readout_maps: Mapping[str, str] = {}  # pattern -> row type
    deterministic: Mapping[str, str] = {}  # pattern -> why there is no posterior unless asked for
    conservative: bool = False  # forces are -dE/dr of the "energies" that `forward` returns
    pretrained: bool = False
    labels: Labels | None = None  # of the files that it was trained on, if not the standard ones
    hyperparameters: dict[str, Any]  # constructor arguments, for checkpoints

    @property
    def feature_sizes(self) -> dict[str, int]:
        """Width of each description in `row_features`; for integer labels their number."""
        raise TypeError(f"{type(self).__name__} must declare feature_sizes")

    def row_features(self, graph: Graph) -> dict[str, Tensor]:
        """Return the invariant description of every row, keyed as in `blips.keys`."""
        raise TypeError(f"{type(self).__name__} must declare row_features")

    def row_counts(self, graph: Graph) -> dict[str, int]:
        """Count the rows of each type in this graph."""
        return {role: len(atoms) for role, atoms in self.row_atoms(graph).items()}

    def row_atoms(self, graph: Graph) -> dict[str, Tensor]:
        """Return the atom that each row belongs to, [rows] by type; the receiver of an edge."""
        nodes = torch.arange(graph.num_nodes, device=graph.positions.device)
        return {keys.EDGE: graph.edge_index[0], keys.NODE: nodes}


class AtomisticBackbone(Backbone):
    """A potential: per-atom energies of an `AtomGraph`; forces and stress by differentiation."""

    conservative = True
    # Whether positions stay in double precision, and edge vectors alone, or what is made of them,
    # are rounded: rounded positions shake forces of 10 eV/A by 2e-5.
    double_positions: ClassVar[bool] = False
    cutoff: float

    def __init__(self, cutoff: float, **sizes: int) -> None:
        super().__init__()
        require_positive(cutoff=cutoff, **sizes)
        if cutoff > LARGEST_CUTOFF:
            raise InputError(f"cutoff is {cutoff} A; expected at most {LARGEST_CUTOFF:g}, mostly 5")
        self.cutoff = cutoff
        self.hyperparameters = {"cutoff": cutoff, **sizes}
        self.reference = ReferenceEnergies()
        self._row_basis = GaussianBasis(16, cutoff)  # describes edges to the inference network

    def graph_of(
        self, atoms: Atoms, dtype: torch.dtype, cache: NeighbourCache | None = None
    ) -> AtomGraph:
        """Build the graph of one structure; models with neighbours of their own override this."""
        dtype = torch.float64 if self.double_positions else dtype
        return AtomGraph.from_atoms(atoms, self.cutoff, dtype, cache)

    def graph(
        self, atoms: Atoms | Sequence[Atoms], caches: Sequence[NeighbourCache] | None = None
    ) -> AtomGraph:
        """Build the graph of structures; caches, one for each, keep neighbours between calls."""
        here = first_parameter(self)
        structures = [atoms] if isinstance(atoms, Atoms) else atoms
        graphs = [
            self.graph_of(one, here.dtype, cache)
            for one, cache in zip(structures, caches or [None] * len(structures), strict=True)
        ]
        return (graphs[0] if len(graphs) == 1 else AtomGraph.batch(graphs)).to(here.device)

    @property
    def trained_numbers(self) -> frozenset[int] | None:
        """Atomic numbers that the model was trained on; None where that is not known."""
        return frozenset(self.reference.known.nonzero().flatten().tolist()) or None

    def examples(self) -> Sequence[Atoms]:
        """Return structures with different numbers of edges and atoms, to try the model on."""
        return [molecule("H2O"), molecule("CH4")]

    @property
    def feature_sizes(self) -> dict[str, int]:
        """Radial basis on edges; atomic numbers on nodes."""
        return {keys.EDGE: len(self._row_basis.centers), keys.NODE_TYPE: MAX_ATOMIC_NUMBER + 1}

    def row_features(self, graph: Graph) -> dict[str, Tensor]:
        """Return elements, radial basis and envelope of distances (and, for the paper, vectors)."""
        graph = self._atom_graph(graph)
        vectors = graph.vectors().to(self._row_basis.centers)  # [E, 3]
        distance = vectors.norm(dim=-1)  # [E]
        return {
            keys.EDGE_VECTOR: vectors,
            keys.EDGE: self._row_basis(distance),  # [E, B]
            keys.EDGE_WEIGHT: cosine_cutoff(distance, self.cutoff),  # [E]
            keys.EDGE_INDEX: graph.edge_index,  # [2, E]
            keys.NODE_TYPE: graph.numbers,  # [N]
        }

    def _atom_graph(self, graph: Graph) -> AtomGraph:
        """Return the graph; raise an error if it is not one of atoms."""
        if not isinstance(graph, AtomGraph):
            raise InputError(
                f"{type(self).__name__} needs an AtomGraph, got {type(graph).__name__}; "
                "make one with AtomGraph.from_atoms"
            )
        return graph


def atomistic(backbone: Backbone) -> AtomisticBackbone:
    """Return the backbone; raise an error if it is no potential."""
    if not isinstance(backbone, AtomisticBackbone):
        raise InputError(
            f"{type(backbone).__name__} is no potential: it takes graphs or data sets, not ASE "
            "structures"
        )
    return backbone


def first_parameter(module: nn.Module) -> nn.Parameter:
    """Return the first parameter, whose dtype and device are the model's."""
    for parameter in module.parameters():
        return parameter
    raise InputError(f"{type(module).__name__} has no parameters, so no dtype and no device")


def graph_batches(
    backbone: Backbone,
    atoms: Atoms | Sequence[Atoms] | Graph,
    batch_size: int | None = None,
) -> Iterator[Graph]:
    """Yield graphs of batches of structures with the dtype and device of the backbone.

    They have `batch_size` structures or, by default, as many as have 512 atoms together. A graph is
    yielded as it is.
    """
    here = first_parameter(backbone)
    if isinstance(atoms, Graph):
        double = isinstance(backbone, AtomisticBackbone) and backbone.double_positions
        yield atoms.to(here.device, None if double else here.dtype)
        return
    backbone = atomistic(backbone)
    structures = [atoms] if isinstance(atoms, Atoms) else list(atoms)
    if not structures:
        raise InputError("nothing to predict: the list of structures is empty")
    if batch_size is not None and batch_size < 1:
        raise InputError(f"batch_size={batch_size}; expected 1 or more structures at once")
    if batch_size is None:
        batches = list(batches_of(structures))
    else:
        firsts = range(0, len(structures), batch_size)
        batches = [structures[first : first + batch_size] for first in firsts]
    shown = track(batches, "predicting", len(structures), len) if len(batches) > 1 else batches
    for batch in shown:
        yield backbone.graph(batch)


class ReferenceEnergies(nn.Module):
    """E_i = scale * e_i + shift[Z_i]: the network's e_i in eV around per-element energies.

    `shift` (eV, by atomic number) and `scale` (eV) are buffers: set them from data with `set`,
    they are saved with the weights and never trained. They and the result are in double
    precision whatever the model's: total energies of thousands of eV keep their meV.
    """

    shift: Tensor
    scale: Tensor
    known: Tensor  # [119] whether `set` was given the element

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(MAX_ATOMIC_NUMBER + 1).double())
        self.register_buffer("scale", torch.ones(()).double())
        self.register_buffer("known", torch.zeros(MAX_ATOMIC_NUMBER + 1).bool())

    def set(self, shift: Mapping[int, float], scale: float = 1.0) -> None:
        """Set energies per element (eV) and the scale of the network's output (eV)."""
        if not scale > 0:
            raise InputError(f"the energy scale must be positive, got {scale}")
        self.shift.zero_()
        self.known.zero_()
        for number, energy in shift.items():
            self.shift[number] = energy
            self.known[number] = True
        self.scale.fill_(scale)

    def forward(self, network_energies: Tensor, numbers: Tensor) -> Tensor:
        """Scale and shift energies per element, [N], [N] -> [N] eV, float64."""
        return self.scale * network_energies.double() + self.shift[numbers]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to the model's device, but stay in double precision."""
        shift, scale = self.shift, self.scale
        super()._apply(fn, recurse)
        self.shift, self.scale = shift.to(self.shift.device), scale.to(self.shift.device)
        return self


class GaussianBasis(nn.Module):
    """b_n(r) = exp(-(r - c_n)^2 / (2 w^2)), centres c_n evenly from 0 to rc, w their spacing."""

    centers: Tensor

    def __init__(self, num_basis: int, cutoff: float) -> None:
        super().__init__()
        self.register_buffer("centers", torch.linspace(0.0, cutoff, num_basis))
        self.width = cutoff / max(num_basis - 1, 1)

    def forward(self, distance: Tensor) -> Tensor:
        """Evaluate the basis, [E] A -> [E, B]."""
        return torch.exp(-0.5 * ((distance[:, None] - self.centers) / self.width) ** 2)


def cosine_cutoff(distance: Tensor, cutoff: float) -> Tensor:
    """Evaluate f(r) = (1 + cos(pi r / rc)) / 2, else 0 where r >= rc (f' too), [E] A -> [E]."""
    inside = (distance < cutoff).to(distance.dtype)
    return 0.5 * (1.0 + torch.cos(math.pi * distance / cutoff)) * inside


def scatter_sum(rows: Tensor, index: Tensor, size: int) -> Tensor:
    """Sum rows with the same index, [E, ...] -> [size, ...]."""
    return rows.new_zeros(size, *rows.shape[1:]).index_add(0, index, rows)


def equal_shares(energy: Tensor, graph: Graph) -> Tensor:
    """Share energies that are no sums over atoms equally among them, [S] -> [N], float64."""
    return (energy.double() / graph.node_counts()).index_select(0, graph.structure)


def require_positive(**values: float) -> None:
    """Refuse hyperparameters that are not positive, by name."""
    for name, value in values.items():
        if not value > 0:
            raise InputError(f"{name} must be positive, got {value}")
