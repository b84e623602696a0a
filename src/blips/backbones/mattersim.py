"""MatterSim: M3GNet with three-body interactions, pretrained across elements and conditions.

Yang et al., "MatterSim: a deep learning atomistic model across elements, temperatures and
pressures" (2024), package `mattersim`. Atoms exchange messages within 5 A along edges that see the
other edges of their atom within 4 A. All maps act on edges (the triplets are summed over before
they reach one) or on atoms.

The network's energy is scaled and shifted for each element by the package's own `normalizer`.

Importing the package replaces the handlers of `loguru`, changes the warning filters and, through
torch-geometric, adds that package's data classes to what `torch.load` reads without being told
to trust a file. The first two are undone here; the last is harmless, and other users of
torch-geometric rely on it.
"""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self
from unittest.mock import patch

import torch
from torch import Tensor

from blips import keys
from blips.backbones.base import first_parameter
from blips.backbones.foreign import ForeignBackbone, read_checkpoint
from blips.backbones.rows import edge_pairs
from blips.data.graph import AtomGraph
from blips.defaults import cache_folder
from blips.errors import CheckpointError, require

MODEL_NAME = "m3gnet"  # of this architecture in the package's checkpoints
COSINE_MARGIN = 1e-7  # as in the package: the angle of a straight line has no derivative


class MatterSim(ForeignBackbone):
    """M3GNet as MatterSim has it; `architecture` are arguments of the package's `M3Gnet`."""

    pip_line = (
        "pip install --no-deps mattersim==1.2.3 && pip install ase torch-geometric torchmetrics "
        "torch-ema torch-runstats e3nn loguru scikit-learn requests pymatgen deprecated"
    )
    roles: ClassVar = {
        "model.edge_encoder.*": keys.EDGE,
        "model.graph_conv.*.three_body.atom_mlp.*": keys.NODE,
        "model.graph_conv.*": keys.EDGE,
        "model.final.*": keys.NODE,
        "model.atom_embedding.*": keys.NODE,
    }
    readout_maps: Mapping[str, str] = {"model.final.*": keys.NODE}

    def __init__(self, architecture: Mapping[str, Any] | None = None) -> None:
        model = _package().M3Gnet(device="cpu", **(architecture or {}))
        arguments = dict(model.model_args)
        super().__init__(model, float(arguments["cutoff"]), range(1, arguments["max_z"] + 1))
        self.hyperparameters = {"architecture": arguments}

    @classmethod
    def released(cls, *, weights: str | Path | None = None, trust: bool = False) -> Self:
        """Load MatterSim-v1.0.0-1M, or another checkpoint of the package.

        Without a file, from blips' cache, or else from where the package keeps its downloads.
        """
        path = _released_weights() if weights is None else weights
        saved = read_checkpoint(path, trust=trust)
        if not isinstance(saved, dict) or saved.get("model_name") != MODEL_NAME:
            raise CheckpointError(f"{path} is no checkpoint of MatterSim's {MODEL_NAME}")
        backbone = cls(saved["model_args"])
        fixed = {"sbf.coef": backbone.model.sbf.coef}  # older checkpoints come without
        backbone.model.load_state_dict({**fixed, **saved["model"]})
        return backbone

    def package_checkpoint(self) -> dict[str, Any]:
        """Return what `from_checkpoint` of the package's potential and calculator reads."""
        state = self.state_copy()
        scale, shift = (state[f"normalizer.{name}"] for name in ("scale", "shift"))  # [95] eV
        for values in (scale, shift):
            values *= self.reference.scale.to(values)
        shift += self.reference.shift[: len(shift)].to(shift)
        arguments = self.model.model_args
        return {"model_name": MODEL_NAME, "model": state, "model_args": arguments}

    def package_energies(self, graph: AtomGraph) -> Tensor:
        """Compute the package's own energies of the atoms, [N] eV."""
        model = self.model
        vectors = graph.vectors().double()  # [E, 3]
        length = vectors.norm(dim=-1)  # [E]
        pairs = edge_pairs(graph, length, model.model_args["threebody_cutoff"])  # [2, P]
        one_hot = torch.nn.functional.one_hot(graph.numbers, model.max_z + 1)  # [N, 95]
        elements = one_hot.to(first_parameter(model))

        first, second = pairs
        second_length = length.index_select(0, second)
        dot = (vectors.index_select(0, first) * vectors.index_select(0, second)).sum(dim=1)  # [P]
        cosine = dot / (length.index_select(0, first) * second_length)
        cosine = cosine.clamp(COSINE_MARGIN - 1.0, 1.0 - COSINE_MARGIN)
        angular = model.sbf(second_length, torch.acos(cosine)).to(elements)  # [P, n l]
        radial = model.rbf(length).to(elements)  # [E, n]

        nodes = model.atom_embedding(elements)  # [N, F]
        edges = model.edge_encoder(radial)  # [E, F]
        unused = pairs.new_empty(0)  # numbers of which the blocks are given the totals
        totals = {"total_num_atoms": graph.num_nodes, "total_num_bonds": graph.num_edges}
        options = {**totals, "three_body_edge_map": first}
        for block in model.graph_conv:
            shared = (radial, graph.edge_index, angular, pairs.T, length[:, None].to(elements))
            nodes, edges = block(nodes, edges, *shared, unused, unused, unused, **options)
        return model.normalizer(model.final(nodes).view(-1).double(), graph.numbers)


def _package() -> ModuleType:
    """Import the package without its changes to the logging of others."""
    logger = require("loguru", MatterSim.pip_line).logger
    with patch.multiple(logger, remove=lambda *_: None, add=lambda *_, **__: 0):
        return require("mattersim.forcefield.m3gnet.m3gnet", MatterSim.pip_line)


def _released_weights() -> Path:
    """Return the released checkpoint, in blips' cache or in the package's own."""
    folders = (cache_folder() / "checkpoints", Path.home() / ".local/mattersim/pretrained_models")
    for path in (folder / "mattersim-v1.0.0-1M.pth" for folder in folders):
        if path.is_file():
            return path
    raise CheckpointError(
        "the weights of mattersim-1m are not on this machine; the package's own calculator "
        "downloads them when it is used once, as does recipes/fetch_weights.py of blips' sources; "
        "or give weights=file"
    )
