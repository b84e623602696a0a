"""SevenNet: equivariant message passing of the NequIP kind, pretrained on the Materials Project.

Park et al., "Scalable parallel algorithm for graph neural network interatomic potentials in
molecular dynamics simulations" (2024), package `sevenn`, weights inside it. Features are irreps
up to l = 2 or 3; a message is the tensor product of a neighbour's features with the spherical
harmonics of the edge, weighted by a network of the distance.

| rows | maps |
|---|---|
| edge | `i_convolution.weight_nn`, the network of the distance |
| node | every `linear`: embedding, self-interactions, self-connections, readout |

The released models were made without parity: a mirror image has slightly different energies.
A model of several fidelities (MF-0) is asked for one of them, its `modal`.
"""

import io
import json
from collections.abc import Mapping
from contextlib import redirect_stdout
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, Self

from ase.data import chemical_symbols
from torch import Tensor

from blips import keys
from blips.backbones.e3nn_maps import E3nnBackbone
from blips.data.graph import AtomGraph
from blips.errors import CheckpointError, InputError, require

# What the package's builder reads, but for the elements, which are a list of atomic numbers here.
SETTINGS = (
    *("cutoff", "channel", "irreps_manual", "lmax", "lmax_edge", "lmax_node", "is_parity"),
    *("num_convolution_layer", "interaction_type", "self_connection_type", "_normalize_sph"),
    *("radial_basis", "cutoff_function", "weight_nn_hidden_neurons", "use_bias_in_linear"),
    *("act_radial", "act_scalar", "act_gate", "conv_denominator", "train_denominator"),
    *("readout_as_fcn", "readout_fcn_hidden_neurons", "readout_fcn_activation"),
    *("shift", "scale", "train_shift_scale", "use_modality", "_modal_map"),
    *("use_modal_node_embedding", "use_modal_self_inter_intro", "use_modal_self_inter_outro"),
    *("use_modal_output_block", "use_modal_wise_shift", "use_modal_wise_scale"),
)
NOT_NEEDED = ("reduce_total_enegy", "force_output")  # blips sums and differentiates itself


class SevenNet(E3nnBackbone):
    """SevenNet of any architecture.

    Args:
        settings: of the package's configuration, those of its model; missing ones have the
            package's defaults.
        numbers: atomic numbers of the elements, in the order of the model's.
        modal: which fidelity to predict, for models of several.
    """

    pip_line = "pip install sevenn==0.13.0"
    roles: ClassVar = {"model.*_convolution.weight_nn.*": keys.EDGE, "model.*": keys.NODE}
    deterministic: Mapping[str, str] = {
        "model.edge_embedding.basis_function": "frequencies of the radial basis, not a linear map",
        "model.*_convolution": "a constant, the mean number of neighbours",
        "model.rescale_atomic_energy": "frozen energies of the elements and their scale",
        "model.*.fc_tensor_product": "a tensor product with the element, not a linear map",
    }

    def __init__(
        self, settings: Mapping[str, Any], numbers: list[int], modal: str | None = None
    ) -> None:
        settings = json.loads(json.dumps(dict(settings)))
        modals: dict[str | None, int | None]  # names of fidelities -> their indices
        modals = settings.get("_modal_map") or {None: None}
        if modal not in modals:
            known = ", ".join(map(str, modals))
            raise InputError(
                f"this SevenNet was trained on the fidelities (modal=) {known}; got {modal!r}"
            )
        model = _package("model_build").build_E3_equivariant_model(_config(settings, numbers))
        super().__init__(model, settings["cutoff"], numbers)
        self.modal = modals[modal]
        last = settings["num_convolution_layer"] - 1
        self.readout_maps = {  # the readout itself is linear: with the map of the last messages
            f"model.{last}_self_interaction_2.*": keys.NODE,
            "model.reduce_*": keys.NODE,
        }
        self.hyperparameters = {"settings": settings, "numbers": list(numbers), "modal": modal}

    @classmethod
    def released(
        cls,
        *,
        checkpoint: str = "7net-0",
        modal: str | None = None,
        weights: str | Path | None = None,
        trust: bool = False,
    ) -> Self:
        """Load a released model by the package's name of it, or one that was trained from it.

        Inside the package are "7net-0", "7net-l3i5" and "7net-mf-0". Other files need `trust`:
        checkpoints of SevenNet are pickles, which can run code.
        """
        home = Path(_package("util").__file__).resolve().parent
        path = Path(weights or _package("util").pretrained_name_to_path(checkpoint)).resolve()
        if not path.is_file():
            raise CheckpointError(f"no checkpoint {path}; check the path")
        if not (trust or path.is_relative_to(home)):
            raise CheckpointError(
                f"{path} is a pickle, which can run code when it is read; "
                "give trust=True if you trust its author"
            )
        saved = _package("checkpoint").SevenNetCheckpoint(path)
        config = saved.config
        settings = {name: config[name] for name in SETTINGS if name in config}
        elements = config["_type_map"]  # atomic number -> index
        backbone = cls(settings, sorted(elements, key=lambda z: elements[z]), modal)
        backbone.model.load_state_dict(_state(saved, config, backbone.model))
        return backbone

    def package_energies(self, graph: AtomGraph) -> Tensor:
        """Compute the package's own energies of the atoms, [N] eV."""
        data = self._data(graph)
        for name, module in self.model.named_children():
            if name not in NOT_NEEDED:
                data = module(data)
            if name == "onehot_idx_to_onehot":  # always in single precision
                data |= {key: data[key].to(data["edge_vec"]) for key in ("x", "node_attr")}
        return data["atomic_energy"].squeeze(1)

    def package_checkpoint(self) -> dict[str, Any]:
        """Return a checkpoint that `SevenNetCalculator` and the package's commands read."""
        settings, numbers = self.hyperparameters["settings"], self.hyperparameters["numbers"]
        state = {n: v.float() if v.is_floating_point() else v for n, v in self.state_copy().items()}
        own = self.model.rescale_atomic_energy
        shift, scale = (  # of each element (and fidelity), eV
            self.reference.scale * value.detach().double().expand(*value.shape[:-1], len(numbers))
            for value in (own.shift, own.scale)
        )
        (shift if shift.ndim == 1 else shift[self.modal]).add_(self.reference.shift[numbers])
        state["rescale_atomic_energy.shift"] = shift.float()
        state["rescale_atomic_energy.scale"] = scale.float()
        statistics = {"shift": shift.tolist(), "scale": scale.tolist()}
        version = _package().__version__  # the package converts what older versions wrote
        config = {**_config(settings, numbers), **statistics, "version": version}
        return {"config": config, "model_state_dict": state, "epoch": 0}

    def _data(self, graph: AtomGraph) -> dict[str, Tensor]:
        """Make the package's input; it and blips agree on the direction and order of edges."""
        indices = self.model._atomic_numbers_to_onehot(graph.numbers)
        data = {
            "x": indices,
            "batch": graph.structure,
            "edge_index": graph.edge_index,
            "edge_vec": graph.vectors().to(next(self.parameters())),
        }
        if self.modal is not None:
            data["modal_type"] = indices.new_full((graph.num_structures,), self.modal)
        return data


def _package(module: str | None = None) -> Any:
    """Import the package, or a module of it."""
    return require("sevenn" if module is None else f"sevenn.{module}", SevenNet.pip_line)


def _state(saved: Any, config: Mapping[str, Any], model: Any) -> Mapping[str, Tensor]:
    """Return a checkpoint's weights as the present package version names and orders them."""
    cue = config.get("cuequivariance_config", {}).get("use", False)
    if cue or config.get("use_flash_tp", False) or config.get("use_oeq", False):
        with redirect_stdout(io.StringIO()):  # made for an accelerator, whose layout is another
            return saved.build_model().state_dict()
    older = _package("scripts.backward_compatibility")
    return older.patch_state_dict_if_old(saved.model_state_dict, config, model)


def _config(settings: Mapping[str, Any], numbers: list[int]) -> dict[str, Any]:
    """Return the part of the package's configuration that describes its model."""
    return {
        **deepcopy(_package("_const").DEFAULT_E3_EQUIVARIANT_MODEL_CONFIG),
        **{"shift": 0.0, "scale": 1.0, "conv_denominator": 1.0},
        **deepcopy(dict(settings)),
        "chemical_species": [chemical_symbols[number] for number in numbers],
        "_chemical_species_by_atomic_number": list(numbers),
        "_number_of_species": len(numbers),
        "_number_of_modalities": len(settings.get("_modal_map") or {}),
        "_type_map": {number: index for index, number in enumerate(numbers)},
    }
