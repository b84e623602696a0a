"""CHGNet: message passing between atoms, bonds and angles, pretrained on the Materials Project.

Deng et al., "CHGNet as a pretrained universal neural network potential for charge-informed
atomistic modelling" (2023), package `chgnet`, weights inside it. Atoms exchange messages within
6 A; bonds shorter than 3 A exchange messages through the angles between them.

| rows | one for each | maps |
|---|---|---|
| node | atom | `mlp_out` of the atom convolutions, readout `mlp` |
| edge | edge of the graph | gated networks of the atom convolutions |
| bond | edge and its reverse | embedding and weights of bonds, `mlp_out` of the bond convolutions |
| angle | ordered pair of edges below 3 A | embedding, gated networks of bonds and angles |

The package gives an energy per atom of the crystal. Here every atom has its own: what the network
says of it, plus the energy of its element in the frozen `composition_model`. Magnetic moments are
left to the package.
"""

import io
import json
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from blips import keys
from blips.backbones.foreign import ForeignBackbone, read_checkpoint
from blips.backbones.rows import edge_pairs, element_features, undirected_bonds
from blips.data.graph import AtomGraph, Graph
from blips.errors import CheckpointError, InputError, require

BOND, ANGLE = "bond", "angle"
NUMBERS = range(1, 95)


class CHGNet(ForeignBackbone):
    """CHGNet of any architecture (arguments of the package's class) with energies of atoms."""

    pip_line = "pip install chgnet==0.4.2"
    roles: ClassVar = {
        "model.atom_conv_layers.*.twoBody_atom.*": keys.EDGE,
        "model.atom_conv_layers.*.mlp_out.*": keys.NODE,
        "model.mlp.*": keys.NODE,
        "model.bond_embedding": BOND,
        "model.bond_weights_*": BOND,
        "model.bond_conv_layers.*.mlp_out.*": BOND,
        "model.bond_conv_layers.*.twoBody_bond.*": ANGLE,
        "model.angle_embedding": ANGLE,
        "model.angle_layers.*": ANGLE,
    }
    readout_maps: Mapping[str, str] = {"model.mlp.*": keys.NODE}
    _elements: Tensor

    def __init__(self, architecture: Mapping[str, Any] | None = None) -> None:
        package = require("chgnet.model", self.pip_line)
        with redirect_stdout(io.StringIO()):  # the package prints its number of parameters
            model = package.CHGNet(**(architecture or {}))
        if not model.mlp_first or model.composition_model is None:
            raise InputError(
                "this CHGNet gives no energies of single atoms; its architecture needs "
                "mlp_first=True and a composition_model, as the released ones have"
            )
        super().__init__(model, float(model.graph_converter.atom_graph_cutoff), NUMBERS)
        self.bond_cutoff = float(model.graph_converter.bond_graph_cutoff)
        self.hyperparameters = {"architecture": json.loads(json.dumps(model.model_args))}
        self.deterministic = {
            "model.composition_model.*": "frozen energies of the elements",
            "model.site_wise": "magnetic moments, not used by the energy",
            f"model.angle_layers.{model.n_conv - 2}.*": "its output is not used",
        }
        self.register_buffer("_elements", element_features(), persistent=False)

    @classmethod
    def released(
        cls, *, version: str = "0.3.0", weights: str | Path | None = None, trust: bool = False
    ) -> Self:
        """Load version "0.3.0" (PBE), "r2scan" or "0.2.0", or a checkpoint of the package."""
        if weights is None:
            package = require("chgnet.model", cls.pip_line)
            with redirect_stdout(io.StringIO()):
                model = package.CHGNet.load(model_name=version, use_device="cpu", verbose=False)
            saved = model.as_dict()
        else:
            saved = read_checkpoint(weights, trust=trust)
            saved = saved.get("model") if isinstance(saved, dict) else None
            if not (isinstance(saved, dict) and {"model_args", "state_dict"} <= saved.keys()):
                raise CheckpointError(f"{weights} is no checkpoint of CHGNet")
        backbone = cls(saved["model_args"])
        backbone.model.load_state_dict(saved["state_dict"])
        return backbone

    def package_checkpoint(self) -> dict[str, Any]:
        """Return what `CHGNet.from_file` and `CHGNetCalculator.from_file` of the package read."""
        state, scale = self.state_copy(), self.reference.scale
        last = f"mlp.layers.{len(self.model.mlp.layers) - 1}"
        for name in (f"{last}.weight", f"{last}.bias", "composition_model.fc.weight"):
            state[name] *= scale.to(state[name])
        elements = state["composition_model.fc.weight"]  # [1, 94] eV
        elements += self.reference.shift[NUMBERS.start : NUMBERS.stop].to(elements)
        return {"model": {**self.model.as_dict(), "state_dict": state}}

    def package_energies(self, graph: AtomGraph) -> Tensor:
        """Compute the package's own energies of the atoms, [N] eV."""
        results = self.model._compute(self._batch(graph), return_site_energies=True)
        energies = torch.cat(results["site_energies"]).double()  # [N]
        of_elements = self.model.composition_model.fc.weight[0].double()  # [94]
        return energies + of_elements.index_select(0, graph.numbers - 1)

    @property
    def feature_sizes(self) -> dict[str, int]:
        """Those of edges and nodes, and of bonds and angles."""
        sizes = super().feature_sizes
        basis, elements = sizes[keys.EDGE], self._elements.shape[1]
        return {**sizes, BOND: basis + 2 * elements, ANGLE: 2 * basis + 4 + 3 * elements}

    def row_atoms(self, graph: Graph) -> dict[str, Tensor]:
        """Return each row's atom: the receiver of a bond's first edge, the apex of an angle."""
        graph = self._atom_graph(graph)
        receiver = graph.edge_index[0]
        of_bonds = receiver.index_select(0, undirected_bonds(graph)[1])
        of_angles = receiver.index_select(0, self._angles(graph)[0])
        return {**super().row_atoms(graph), BOND: of_bonds, ANGLE: of_angles}

    def row_features(self, graph: Graph) -> dict[str, Tensor]:
        """Add lengths and elements of bonds, and lengths, angle and elements of angles."""
        graph = self._atom_graph(graph)
        features = super().row_features(graph)
        basis, vectors = features[keys.EDGE], features[keys.EDGE_VECTOR]
        receiver, sender = self._elements[graph.numbers][graph.edge_index]  # [E, 4]
        _, bonds = undirected_bonds(graph)
        first, second = self._angles(graph)
        both, apart = receiver + sender, (receiver - sender).square()
        features[BOND] = torch.cat([x.index_select(0, bonds) for x in (basis, both, apart)], dim=1)
        unit = vectors / vectors.norm(dim=-1)[:, None]
        cosine = (unit.index_select(0, first) * unit.index_select(0, second)).sum(dim=1)  # [A]
        powers = torch.stack([cosine, cosine**2, cosine**3, cosine**4], dim=1)
        ends = [basis.index_select(0, first), basis.index_select(0, second), powers]
        ends += [x.index_select(0, y) for x, y in ((receiver, first), (sender, first))]
        features[ANGLE] = torch.cat([*ends, sender.index_select(0, second)], dim=1)
        return features

    def _batch(self, graph: AtomGraph) -> Any:
        """Make the package's own batch of graphs, differentiable by positions and cell.

        Bases are steep, sin(31 pi r / 6 A) / r for one, so they are in double precision.
        """
        bond_of_edge, bonds = undirected_bonds(graph)
        vectors = graph.vectors().double()  # [E, 3]
        length = vectors.norm(dim=-1)  # [E]
        unit = vectors / length[:, None]  # [E, 3]
        first, second = edge_pairs(graph, length, self.bond_cutoff)  # [A]
        bond_length = length.index_select(0, bonds)  # [B]
        apex = graph.edge_index[0].index_select(0, first)
        bonds_of_angles = [bond_of_edge.index_select(0, edge) for edge in (first, second)]
        expansion = self.model.bond_basis_expansion
        dtype = self._elements.dtype
        return require("chgnet.model.model", self.pip_line).BatchedGraph(
            atomic_numbers=graph.numbers,
            bond_bases_ag=expansion.rbf_expansion_ag(bond_length).to(dtype),
            bond_bases_bg=expansion.rbf_expansion_bg(bond_length).to(dtype),
            angle_bases=self.model.angle_basis_expansion(
                unit.index_select(0, first), unit.index_select(0, second)
            ).to(dtype),
            batched_atom_graph=graph.edge_index.T,
            batched_bond_graph=torch.stack([apex, *bonds_of_angles]).T,
            atom_owners=graph.structure,
            directed2undirected=bond_of_edge,
            atom_positions=[],
            strains=[],
            volumes=[],
        )

    def _angles(self, graph: AtomGraph) -> Tensor:
        """Return the two edges of each angle, [2, A]."""
        return edge_pairs(graph, graph.vectors().norm(dim=-1), self.bond_cutoff)
