"""Error bars that are learned from the features of a trained potential, and saved with it."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from blips import keys
from blips.backbones.base import Backbone, first_parameter
from blips.backbones.derivatives import plain_outputs
from blips.baselines import Baseline
from blips.data.dataset import Batch, TrainingData
from blips.data.graph import Graph
from blips.errors import InputError
from blips.prediction import Prediction, point_prediction
from studies.baselines.last_layer import readout_of

QUANTITIES: tuple[str, ...] = (keys.ENERGY, keys.FORCES)


class Learned(Baseline):
    """A trained potential whose error bars are learned from its features afterwards.

    The variance of a label is a function of its features and two numbers, which validation data
    decide for energies and forces each. What is learned are buffers, so that it is saved, loaded
    and moved with the model.

    Attributes:
        learned: names of the buffers; None before `condition`.
        scale_rows: the two numbers of energies and forces, [2, 2]; NaN where there were no labels.
    """

    learned: ClassVar[tuple[str, ...]]
    scale_rows: Tensor | None

    def __init__(self, backbone: Backbone, settings: dict[str, Any]) -> None:
        readout_of(backbone)
        super().__init__(backbone, settings)
        for name in (*self.learned, "scale_rows"):
            self.register_buffer(name, None)

    def learn(self, train: TrainingData) -> None:
        """Learn what the features of training data are like."""
        raise NotImplementedError

    def features(self, graph: Graph) -> dict[str, Tensor]:
        """Compute what a variance depends on, energy [S, P] and forces [N, 3, P]."""
        raise NotImplementedError

    def best_scale(self, features: Tensor, error: Tensor) -> tuple[float, float]:
        """Choose the two numbers of least Gaussian NLL for features [R, P] and errors [R]."""
        raise NotImplementedError

    def stds(self, graph: Graph, *, forces: bool) -> dict[str, Tensor]:
        """Compute the error bars of a prediction, by the names of its arrays."""
        raise NotImplementedError

    def condition(self, train: TrainingData, valid: TrainingData) -> None:
        """Learn from training data, and choose the scales on validation data."""
        self.learn(train)
        found: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in QUANTITIES}
        for batch in data_batches(self.backbone, valid):
            outputs = plain_outputs(self.backbone, batch.graph)
            features = self.features(batch.graph)
            for name in found.keys() & batch.targets.keys():
                error = (batch.targets[name] - outputs[name]).double()
                found[name].append((features[name].flatten(end_dim=-2), error.flatten()))
        self.scales = {
            name: self.best_scale(*map(torch.cat, zip(*parts, strict=True)))
            for name, parts in found.items()
            if parts
        }

    def predict_graph(
        self, graph: Graph, *, seed: int = 0, forces: bool = True, stress: bool = False
    ) -> Prediction:
        """Predict the means of the backbone with the error bars that were learned."""
        with torch.no_grad():
            arrays = dict(plain_outputs(self.backbone, graph, forces=forces, stress=stress))
        return point_prediction(arrays | self.stds(graph, forces=forces), graph, method=self.kind)

    @property
    def scales(self) -> dict[str, tuple[float, float]]:
        """The two numbers by quantity; an error before `condition`."""
        if self.scale_rows is None:
            raise InputError("the error bars are not known yet; call fit or condition first")
        pairs = zip(QUANTITIES, self.scale_rows.tolist(), strict=True)
        return {name: (a, b) for name, (a, b) in pairs if a == a}

    @scales.setter
    def scales(self, pairs: Mapping[str, tuple[float, float]]) -> None:
        rows = [pairs.get(name, (float("nan"), float("nan"))) for name in QUANTITIES]
        self.scale_rows = torch.tensor(rows, dtype=torch.float64)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any, **options: Any
    ) -> None:
        for name in (*self.learned, "scale_rows"):
            saved = state_dict.get(f"{prefix}{name}")
            setattr(self, name, None if saved is None else torch.empty_like(saved))
        super()._load_from_state_dict(state_dict, prefix, *arguments, **options)


def data_batches(backbone: Backbone, data: TrainingData, batch_size: int = 32) -> Iterator[Batch]:
    """Yield the structures of a data set in order, with the dtype and device of the backbone."""
    here = first_parameter(backbone)
    for first in range(0, len(data), batch_size):
        indices = range(first, min(first + batch_size, len(data)))
        yield data.batch(indices).to(here.device, here.dtype)
