"""Shared parts of the baselines: `fit` and `predict`."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from ase import Atoms

from blips.backbones.base import Backbone, graph_batches
from blips.data.batch import TrainingData
from blips.data.graph import Graph
from blips.errors import InputError
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
        takes_samples: whether the number of samples is chosen in `predict`.
    """

    backbone: Backbone
    calibration: dict[str, Calibrator]
    takes_samples: ClassVar[bool] = False
    predict_graph: Callable[..., Prediction]  # (graph, *, seed, forces, stress, **options)

    def fit(
        self,
        train: Data | None = None,
        *,
        resume: bool = True,
        display: bool = False,
        **options: Any,
    ) -> FitResult:
        """Train; the options are those of `blips.fit`. A finished run is only read again."""
        trained = self if isinstance(self, Stochastic | Likelihood) else self.backbone
        result = fit(trained, train, resume=resume, display=display, **options)
        self.condition(result.train_data, result.valid_data)
        return result

    def condition(self, train: TrainingData, valid: TrainingData) -> None:
        """Learn error bars from data after the backbone is trained; most methods need not."""

    def predict(
        self,
        atoms: Structures,
        *,
        method: str = "auto",
        samples: Any = None,
        seed: int = 0,
        forces: bool = True,
        stress: bool = False,
        batch_size: int | None = None,
        calibrated: bool = True,
        **options: Any,
    ) -> Prediction:
        """Predict means and standard deviations in eV, eV/A and eV/A^3.

        The arguments are those of `BayesianPotential.predict`, and `options` those of the method
        (see its `predict_graph`); `method` is "auto", or "map" for means without error bars.
        `samples` and `seed` are for methods that sample; others have no use for them.
        """
        if method not in ("auto", "map"):
            raise InputError(
                f"{type(self).__name__} has no method {method!r}; use auto, or map for means alone"
            )
        if samples is not None and self.takes_samples:
            options["samples"] = samples
        parts: list[Prediction] = []
        for graph in graph_batches(self.backbone, atoms, batch_size):
            if method == "map":
                parts.append(self.predict_mean(graph, forces=forces, stress=stress))
            else:
                parts.append(
                    self.predict_graph(graph, seed=seed, forces=forces, stress=stress, **options)
                )
        prediction = Prediction.join(parts)
        return prediction.recalibrated(self.calibration) if calibrated else prediction

    def predict_mean(self, graph: Graph, *, forces: bool, stress: bool) -> Prediction:
        """Predict the means alone, at the cost of the backbone."""
        return _plain(self.backbone, graph, forces=forces, stress=stress, method="map")


def predict_plain(
    backbone: Backbone,
    atoms: Structures,
    *,
    forces: bool = True,
    stress: bool = False,
    batch_size: int | None = None,
) -> Prediction:
    """Predict with a backbone, without error bars."""
    graphs = graph_batches(backbone, atoms, batch_size)
    return Prediction.join([_plain(backbone, g, forces=forces, stress=stress) for g in graphs])


def _plain(
    backbone: Backbone, graph: Graph, *, forces: bool, stress: bool, method: str = "plain"
) -> Prediction:
    with torch.no_grad():
        outputs = plain_outputs(backbone, graph, forces=forces, stress=stress)
    return point_prediction(outputs, graph, method=method)
