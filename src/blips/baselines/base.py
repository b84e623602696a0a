"""What all baselines share: the verbs `fit` and `predict`, and a backbone in the middle."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from ase import Atoms

from blips.backbones.base import Backbone, first_parameter, graph_batches
from blips.config import Source
from blips.data.batch import Batch, TrainingData
from blips.data.graph import Graph
from blips.prediction import Calibrator, Prediction, point_prediction
from blips.train.fit import Data, FitResult, fit
from blips.train.objective import plain_outputs
from blips.train.wrapper import Likelihood, Stochastic

Structures = Atoms | Sequence[Atoms] | Graph


class Baseline:
    """A way to error bars other than BLIP, with the same verbs and the same `Prediction`.

    Attributes:
        backbone: the model (one of the models) that predicts.
        calibration: quantity ("energy", "forces", ...) -> object with `apply(std)`.
    """

    backbone: Backbone
    calibration: dict[str, Calibrator]
    predict_graph: Callable[..., Prediction]  # (graph, *, seed, **options), one batch

    def fit(
        self,
        train: Data | None = None,
        *,
        valid: Data | float | None = None,
        config: Source | Sequence[Source] = (),
        folder: str | Path | None = None,
        resume: bool = True,
        display: bool = False,
    ) -> FitResult:
        """Train; the arguments are those of `blips.fit`. A finished run is only read again."""
        trained = self if isinstance(self, Stochastic | Likelihood) else self.backbone
        result = fit(
            trained,
            train,
            valid=valid,
            config=config,
            folder=folder,
            resume=resume,
            display=display,
        )
        self.condition(result.train_data, result.valid_data)
        return result

    def condition(self, train: TrainingData, valid: TrainingData) -> None:
        """What a method has to learn from its data after the backbone is trained: nothing here."""

    def predict(
        self,
        atoms: Structures,
        *,
        seed: int = 0,
        batch_size: int = 32,
        calibrated: bool = True,
        **options: Any,
    ) -> Prediction:
        """Means and standard deviations in eV and eV/A.

        Args:
            atoms: one structure, many, or a graph.
            seed: of methods that sample; the same seed gives the same prediction.
            batch_size: structures at once.
            calibrated: apply the calibration, where there is one.
            options: of the method, see its `predict_graph`.
        """
        graphs = graph_batches(self.backbone, atoms, batch_size)
        parts = [self.predict_graph(graph, seed=seed, **options) for graph in graphs]
        prediction = Prediction.join(parts)
        return prediction.recalibrated(self.calibration) if calibrated else prediction


def predict_plain(
    backbone: Backbone,
    atoms: Structures,
    *,
    forces: bool = True,
    stress: bool = False,
    batch_size: int = 32,
) -> Prediction:
    """What a backbone predicts, without error bars."""
    parts = []
    for graph in graph_batches(backbone, atoms, batch_size):
        with torch.no_grad():
            outputs = plain_outputs(backbone, graph, forces=forces, stress=stress)
        parts.append(point_prediction(outputs, graph, method="plain"))
    return Prediction.join(parts)


def data_batches(backbone: Backbone, data: TrainingData, batch_size: int = 32) -> Iterator[Batch]:
    """The structures of a data set in order, with the dtype and device of the backbone."""
    here = first_parameter(backbone)
    for first in range(0, len(data), batch_size):
        indices = range(first, min(first + batch_size, len(data)))
        yield data.batch(indices).to(here.device, here.dtype)
