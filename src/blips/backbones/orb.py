"""ORB v3: attention-gated message passing without built-in symmetry, direct or conservative.

Rhodes et al., "Orb-v3: atomistic simulation at scale" (2025), package `orb-models`. An atom sees
its `max_num_neighbors` nearest neighbours within 6 A, so edges need not come in pairs; they are
those of the package's own search, ties included, and crystals get the package's own numbers. ORB
learns rotations from data: turned structures give slightly different results, in samples too.

The energy comes from the mean of the atoms' features, so that atoms have no energies of their
own: `Orb` gives each an equal share of its structure's. `DirectOrb` predicts forces and stress
beside the energy; they are the package's, with its scales and without net force.

As in the paper, only the node and edge networks of the message-passing stacks become Bayesian;
the report says why the other maps do not, and `maps` of `bayesianize` selects them all the same.
"""

from collections.abc import Mapping
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from ase import Atoms
from torch import Tensor
from torch.nn.functional import one_hot

from blips import keys
from blips.backbones.base import equal_shares, first_parameter
from blips.backbones.foreign import ForeignBackbone, read_checkpoint
from blips.data.graph import AtomGraph, Graph, near_origin
from blips.data.neighbours import NeighbourCache
from blips.errors import CheckpointError, InputError, require

RADIUS = 6.0  # A, also of the envelope inside the package
NUMBERS = range(1, 118)
OUTSIDE = "outside the message-passing stacks"
OF_STRUCTURES = f"{OUTSIDE}, and its rows are structures, which have no coefficients"


class Orb(ForeignBackbone):
    """ORB v3 whose forces and stress are derivatives of its energy.

    An atom sees at most `max_num_neighbors` neighbours. The other arguments are those of the
    package: width of node and edge features; widths and hidden layers of the networks of encoder
    and stacks, and of the heads; number of stacks; "silu", "gelu" or "ssp".
    """

    pip_line = "pip install orb-models==0.5.5"
    architecture: ClassVar[str] = "orb_v3_conservative_architecture"
    used_heads: ClassVar[tuple[str, ...]] = ("energy",)
    roles: ClassVar = {
        "model.model.gnn_stacks.*._edge_mlp.*": keys.EDGE,
        "model.model.gnn_stacks.*._node_mlp.*": keys.NODE,
        "model.model.gnn_stacks.*_attn": keys.EDGE,
        "model.model._encoder._edge_fn.*": keys.EDGE,
        "model.model._encoder._node_fn.*": keys.NODE,
    }
    readout_maps: Mapping[str, str] = {"model.heads.energy.mlp.*": "structure"}
    deterministic: Mapping[str, str] = {
        "model.model.gnn_stacks.*_attn": "an attention gate, not a message or update network",
        "model.model._encoder.*": OUTSIDE,
        "model.model._decoder.*": "its output is not used",
        "model.heads.energy.reference.*": "frozen energies of the elements",
        "model.heads.energy.*": OF_STRUCTURES,
        "model.heads.stress.*": OF_STRUCTURES,
        "model.heads.confidence.*": "its output is not used",
        "model.heads.*": OUTSIDE,
    }

    def __init__(
        self,
        max_num_neighbors: int = 20,
        latent_dim: int = 256,
        base_mlp_hidden_dim: int = 1024,
        base_mlp_depth: int = 2,
        head_mlp_hidden_dim: int = 256,
        head_mlp_depth: int = 1,
        num_message_passing_steps: int = 5,
        activation: str = "silu",
    ) -> None:
        given = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        widths = {k: v for k, v in given.items() if k != "max_num_neighbors"}
        pretrained = require("orb_models.forcefield.pretrained", self.pip_line)
        system = pretrained.SystemConfig(radius=RADIUS, max_num_neighbors=max_num_neighbors)
        model = getattr(pretrained, self.architecture)(device="cpu", system_config=system, **widths)
        super().__init__(model, RADIUS, NUMBERS)
        self.hyperparameters = given
        self.max_num_neighbors = max_num_neighbors

    @classmethod
    def released(
        cls, *, variant: str, weights: str | Path | None = None, trust: bool = False
    ) -> Self:
        """Load "direct-20-omat", say; without a file, the package downloads the weights."""
        backbone = cls({"20": 20, "inf": 120}[variant.split("-")[1]])  # neighbours of an atom
        path = weights or _download(f"orb-v3-{variant}")
        state = read_checkpoint(path, trust=trust)
        heads = tuple(f"heads.{name}." for name in cls.used_heads)
        needed = [key for key in backbone.model.state_dict() if key.startswith(heads)]
        if missing := [key for key in needed if key not in state]:
            raise CheckpointError(  # the package would leave such a head random
                f"{path} has no {missing[0]} ({len(missing)} tensors are missing); it belongs to "
                "another kind of ORB model: direct ones predict forces and stress"
            )
        try:
            backbone.model.load_state_dict(state)
        except RuntimeError as error:
            raise CheckpointError(f"the weights in {path} do not fit this model: {error}") from None
        return backbone

    def graph_of(
        self, atoms: Atoms, dtype: torch.dtype, cache: NeighbourCache | None = None
    ) -> AtomGraph:
        """Build the graph of the package's own search (never cached); its senders receive here."""
        if atoms.pbc.any() and not atoms.pbc.all():
            raise InputError(
                f"ORB knows structures with three periodic directions or none, not pbc = "
                f"{atoms.pbc.tolist()}; set pbc=True and leave vacuum along the others"
            )
        graph = super().graph_of(atoms, dtype)  # also checks the structure
        search = require("orb_models.forcefield.featurization_utilities", self.pip_line)
        positions = torch.from_numpy(near_origin(atoms)[0])  # those of the graph
        cell = torch.from_numpy(atoms.cell.array.copy())
        wrapped = search.map_to_pbc_cell(positions, cell) if atoms.pbc.all() else positions
        edge_index, _, shift = search.compute_pbc_radius_graph(
            positions=wrapped,
            cell=cell,
            pbc=graph.pbc[0],
            radius=self.cutoff,
            max_number_neighbors=self.max_num_neighbors,
            device="cpu",
            float_dtype=dtype,
        )
        if atoms.pbc.all():
            moved = torch.linalg.solve(cell.T, (positions - wrapped).T).T  # [N, 3]
            moved = moved.round()  # whole lattice vectors
            shift = shift + moved[edge_index[0]] - moved[edge_index[1]]
        return replace(graph, edge_index=edge_index, edge_shift=shift.to(graph.positions))

    def package_energies(self, graph: AtomGraph) -> Tensor:
        """Return equal shares of the energy, [N] eV."""
        return self._run(graph)[0]

    def package_checkpoint(self) -> dict[str, Tensor]:
        """Return a state dict, as the `weights_path` of the package's `pretrained` functions."""
        if self.reference.scale != 1:
            raise CheckpointError(
                f"ORB's checkpoint has no place for the energy scale {float(self.reference.scale)}"
            )
        state = self.state_copy()
        elements = state["heads.energy.reference.linear.weight"]  # [118] eV
        elements += self.reference.shift[: elements.shape[-1]].to(elements)
        return state

    def _run(self, graph: AtomGraph) -> tuple[Tensor, Any, Tensor, dict[str, Tensor]]:
        """Return shares of the energy [N], the package's batch, node features, pair repulsion."""
        batch = self._batch(graph)
        nodes = self.model.model(batch)["node_features"]  # [N, F]
        repulsion = self.model.pair_repulsion_fn(batch)
        head = self.model.heads["energy"]
        energy = head.denormalize(head(nodes, batch).double(), batch) + repulsion["energy"]  # [S]
        return equal_shares(energy, graph), batch, nodes, repulsion

    def _batch(self, graph: AtomGraph) -> Any:
        """Make the package's own graph, with edge vectors differentiable by positions and cell."""
        of_edges = graph.structure.index_select(0, graph.edge_index[0])
        n_node = graph.node_counts()
        vectors = graph.vectors().to(first_parameter(self.model))  # [E, 3]
        base = require("orb_models.forcefield.base", self.pip_line)
        return base.AtomGraphs(
            senders=graph.edge_index[0],
            receivers=graph.edge_index[1],
            n_node=n_node,
            n_edge=torch.bincount(of_edges, minlength=graph.num_structures),
            node_features={
                "positions": graph.positions.to(vectors),
                "atomic_numbers": graph.numbers,
                "atomic_numbers_embedding": one_hot(graph.numbers, len(NUMBERS) + 1),
            },
            edge_features={"vectors": vectors},
            system_features={"cell": graph.cell.to(vectors)},
            **dict.fromkeys(("node_targets", "edge_targets", "system_targets")),  # None
            **dict.fromkeys(("system_id", "fix_atoms", "tags")),
            radius=self.cutoff,
            max_num_neighbors=torch.full_like(n_node, self.max_num_neighbors),
        )


class DirectOrb(Orb):
    """ORB v3 that predicts forces and stress beside the energy; arguments as for `Orb`."""

    conservative = False
    architecture = "orb_v3_direct_architecture"
    used_heads = ("energy", "forces", "stress")
    roles: ClassVar = {**Orb.roles, "model.heads.forces.mlp.*": keys.NODE}
    readout_maps: Mapping[str, str] = {
        "model.heads.energy.mlp.*": "structure",
        "model.heads.forces.mlp.*": keys.NODE,
        "model.heads.stress.mlp.*": "structure",
    }

    def forward(self, graph: Graph) -> dict[str, Tensor]:
        """Predict energy [S] eV, forces [N, 3] eV/A and, for periodic cells, stress [S, 3, 3]."""
        graph = self.checked(graph)
        shares, batch, nodes, repulsion = self._run(graph)
        heads = self.model.heads
        outputs = {
            keys.ENERGY: graph.sum_over_structures(self.reference(shares, graph.numbers)),
            keys.FORCES: heads["forces"].predict(nodes, batch) + repulsion["forces"],
        }
        if graph.remember("orb-volumes", lambda: bool((torch.linalg.det(graph.cell) != 0).all())):
            utils = require("orb_models.forcefield.forcefield_utils", self.pip_line)
            stress = heads["stress"].predict(nodes, batch) + repulsion["stress"]  # [S, 6]
            outputs[keys.STRESS] = utils.torch_voigt_6_to_full_3x3_stress(stress)
        return outputs


def _download(name: str) -> Path:
    """Return the package's own copy of its released weights; download it if missing."""
    pretrained = require("orb_models.forcefield.pretrained", Orb.pip_line)
    address = signature(pretrained.ORB_PRETRAINED_MODELS[name]).parameters["weights_path"].default
    try:
        return pretrained.cached_path(address)
    except OSError as error:
        raise CheckpointError(
            f"cannot download the weights of {name} ({error}); fetch {address} "
            f'elsewhere and give load("{name}", weights=file)'
        ) from error
