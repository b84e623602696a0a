"""MACE: equivariant message passing with products of many neighbours.

Batatia et al., "MACE: Higher order equivariant message passing neural networks for fast and
accurate force fields" (2022), package `mace-torch`: MACE-MP, MACE-OMAT, MACE-OFF and what users
train. It needs e3nn 0.4.4, other packages a later one: give it an environment of its own.

| rows | maps |
|---|---|
| edge | the networks of the distance inside `interactions`: `conv_tp_weights`, `density_fn` |
| node | every `linear`: embedding, interactions, products, readouts |

The products of features (`symmetric_contractions`) and the tensor products with the element
(`skip_tp`) are not linear in one set of channels and stay deterministic; the maps before and after
them are Bayesian.

Importing mace makes `torch.load` unpickle everything, for the whole process. blips takes that
back; import mace yourself, and first, where its own loaders are to work beside blips.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from blips import keys
from blips.backbones.base import MAX_ATOMIC_NUMBER, first_parameter
from blips.backbones.e3nn_maps import E3nnBackbone, contained
from blips.backbones.foreign import read_checkpoint
from blips.bayes.convert import revert
from blips.data.graph import AtomGraph
from blips.errors import CheckpointError, InputError, require

CLASSES = ("interaction_cls", "interaction_cls_first", "readout_cls")
IRREPS = ("hidden_irreps", "MLP_irreps", "edge_irreps")
ARRAYS = ("atomic_energies", "atomic_inter_scale", "atomic_inter_shift")
REASONS = {
    "FullyConnectedTensorProduct": "a tensor product with the element, not one linear map",
    "Contraction": "products of features, not a linear map",
    "ParameterList": "weights of products of features, not a linear map",
}


class MACE(E3nnBackbone):
    """MACE of any architecture with scaled and shifted energies (`ScaleShiftMACE`).

    Args:
        settings: arguments of the package's class; classes and irreps by their names, arrays as
            lists.
        head: which level of theory to predict, for models of several.
    """

    pip_line = "pip install mace-torch==0.3.16"
    # A numbered layer of a network inside an interaction is a network of the distance.
    roles: ClassVar = {"model.interactions.*.*.*[0-9]": keys.EDGE, "model.*": keys.NODE}
    readout_maps: Mapping[str, str] = {"model.readouts.*": keys.NODE}
    _index: Tensor

    def __init__(self, settings: Mapping[str, Any], head: str | None = None) -> None:
        heads = settings["heads"]
        if head is None and len(heads) == 1:
            head = heads[0]
        if head not in heads:
            raise InputError(f"give head= one of {', '.join(heads)}; got {head!r}")
        with contained():
            model = _package("mace.modules").ScaleShiftMACE(**_arguments(settings))
        super().__init__(model, float(settings["r_max"]), settings["atomic_numbers"])
        self.head = heads.index(head)
        self.hyperparameters = {"settings": dict(settings), "head": head}
        self.deterministic = {
            f"model.{name}": REASONS[type(module).__name__]
            for name, module in model.named_modules()
            if type(module).__name__ in REASONS
        }
        index = torch.zeros(MAX_ATOMIC_NUMBER + 1, dtype=torch.int64)
        index[settings["atomic_numbers"]] = torch.arange(len(settings["atomic_numbers"]))
        self.register_buffer("_index", index, persistent=False)

    @classmethod
    def released(
        cls, *, weights: str | Path | None = None, trust: bool = False, head: str | None = None
    ) -> Self:
        """Load a file `*.model` that the package saved, in its precision.

        It needs `trust`: such a file is a pickled module, which can run code.
        """
        if weights is None:
            raise InputError('MACE has no weights in its package; give weights="....model"')
        tools = _package("mace.tools.scripts_utils")
        with contained():
            saved = read_checkpoint(weights, trust=trust)
        if type(saved).__name__ != "ScaleShiftMACE":
            raise CheckpointError(
                f"{weights} holds a {type(saved).__name__}; blips knows ScaleShiftMACE only"
            )
        backbone = cls(_settings(tools.extract_config_mace_model(saved)), head)
        backbone.to(next(saved.parameters()).dtype)
        _copy_state(saved, backbone.model, weights)
        return backbone

    def package_energies(self, graph: AtomGraph) -> Tensor:
        """Compute the package's own energies of the atoms, [N] eV."""
        return self.model(self._data(graph), compute_force=False)["node_energy"]

    def package_checkpoint(self) -> nn.Module:
        """Return the module that `MACECalculator` and the package's commands read."""
        model: Any = revert(copy.deepcopy(self.model))
        scale = self.reference.scale
        elements = model.atomic_energies_fn.atomic_energies  # [elements] or [heads, elements]
        for value in (elements, model.scale_shift.scale, model.scale_shift.shift):
            value.mul_(scale.to(value))
        shift = self.reference.shift[model.atomic_numbers].to(elements)
        (elements if elements.ndim == 1 else elements[self.head]).add_(shift)
        return model

    def _data(self, graph: AtomGraph) -> dict[str, Tensor]:
        """Make the package's input. Its edges go from the first to the second index.

        It looks at positions through r_j - r_i + shift alone, so that these go in as the shift.
        """
        species = self._index.index_select(0, graph.numbers)
        elements = nn.functional.one_hot(species, len(self.model.atomic_numbers))
        heads = species.new_full((graph.num_structures,), self.head)
        vectors = graph.vectors().to(first_parameter(self.model))  # [E, 3]
        return {
            "positions": vectors.new_zeros(graph.num_nodes, 3),
            "node_attrs": elements.to(vectors),
            "edge_index": graph.edge_index.flip(0),
            "shifts": -vectors,
            "cell": graph.cell.flatten(0, 1).to(vectors),
            "batch": graph.structure,
            "ptr": species.new_zeros(graph.num_structures + 1),  # only its length is used
            "head": heads,
        }


def _package(module: str) -> Any:
    """Import a module of the package without its side effects on the process."""
    with contained():
        return require(module, MACE.pip_line)


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a package's model, JSON-able."""
    if config.get("embedding_specs") is not None:
        raise CheckpointError("this MACE needs charges or spins as input, which blips has not")
    gates = {function: name for name, function in _package("mace.modules").gate_dict.items()}
    settings = {k: v for k, v in config.items() if k not in ("cueq_config", "embedding_specs")}
    settings |= {name: settings[name].__name__ for name in CLASSES}
    settings |= {name: settings[name] and str(settings[name]) for name in IRREPS}
    settings |= {name: np.asarray(settings[name]).tolist() for name in ARRAYS}
    settings |= {name: list(settings[name]) for name in ("radial_MLP", "heads")}
    settings["atomic_numbers"] = [int(number) for number in config["atomic_numbers"]]
    settings["num_polynomial_cutoff"] = int(config["num_polynomial_cutoff"])
    settings["gate"] = gates[config["gate"]]
    return settings


def _arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of the package's class, from JSON-able settings."""
    modules, irreps = _package("mace.modules"), _package("e3nn.o3").Irreps
    arguments = dict(settings)
    for name in CLASSES:
        arguments[name] = getattr(modules, settings[name])
    for name in IRREPS:
        arguments[name] = None if settings[name] is None else irreps(settings[name])
    for name in ARRAYS:
        arguments[name] = np.array(settings[name])
    arguments["gate"] = modules.gate_dict[settings["gate"]]
    return arguments


def _copy_state(saved: nn.Module, model: nn.Module, path: str | Path) -> None:
    """Copy the weights of a saved module into a new one; constants may differ by version."""
    try:
        missing, unexpected = model.load_state_dict(saved.state_dict(), strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"the weights in {path} do not fit their model: {error}") from None
    parameters = {name for one in (saved, model) for name, _ in one.named_parameters()}
    if lost := sorted(parameters.intersection([*missing, *unexpected])):
        raise CheckpointError(
            f"{path} was saved by a version of mace whose {lost[0]} is not known to the one here"
        )
