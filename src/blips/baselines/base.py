"""Shared parts of the baselines: `fit`, `predict`, and what is learned and saved with a model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from ase import Atoms
from torch import Tensor

from blips import keys
from blips.backbones.base import Backbone, first_parameter, graph_batches
from blips.baselines.last_layer import readout_of
from blips.data.batch import Batch, TrainingData
from blips.data.graph import Graph
from blips.errors import InputError
from blips.prediction import Calibrator, Prediction, point_prediction
from blips.train.fit import Data, FitResult, fit
from blips.train.objective import plain_outputs
from blips.train.wrapper import Likelihood, Stochastic, Wrapper

Structures = Atoms | Sequence[Atoms] | Graph
QUANTITIES: tuple[str, ...] = (keys.ENERGY, keys.FORCES)


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


class Learned(Wrapper, Baseline):
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


def data_batches(backbone: Backbone, data: TrainingData, batch_size: int = 32) -> Iterator[Batch]:
    """Yield the structures of a data set in order, with the dtype and device of the backbone."""
    here = first_parameter(backbone)
    for first in range(0, len(data), batch_size):
        indices = range(first, min(first + batch_size, len(data)))
        yield data.batch(indices).to(here.device, here.dtype)
