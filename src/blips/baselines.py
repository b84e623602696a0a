"""Another way to error bars with the verbs of a Bayesian potential: a deep ensemble.

Lakshminarayanan, Pritzel, Blundell, "Simple and Scalable Predictive Uncertainty Estimation using
Deep Ensembles" (2017), with point losses. Members differ in their initial weights and in the order
of their batches, both functions of seed + k:

    mean = 1/M sum_m y_m,    epistemic std = sqrt( 1/(M-1) sum_m (y_m - mean)^2 )

What else is a `Baseline` is in `studies/baselines` of the repository: LLPR, shallow ensembles,
mixtures of embeddings, dropout, mean-variance and evidential models.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from ase import Atoms
from torch import nn

from blips.backbones import build
from blips.backbones.base import Backbone, graph_batches
from blips.backbones.derivatives import plain_outputs
from blips.config import Sources, load_config
from blips.data.dataset import StructureData, TrainingData
from blips.data.graph import Graph
from blips.errors import InputError
from blips.inference.monte_carlo import monte_carlo
from blips.prediction import Calibrator, Model, Outputs, Prediction, point_prediction
from blips.train.fit import Data, FitResult, fit
from blips.train.objective import Wrapper

Structures = Atoms | Sequence[Atoms] | Graph
MakeBackbone = Callable[[int], Backbone]  # seed -> untrained backbone


class Baseline(Wrapper):
    """A way to error bars other than BLIP, with the same verbs and the same `Prediction`."""

    takes_samples: ClassVar[bool] = False  # whether their number is chosen in `predict`
    predict_graph: Callable[..., Prediction]  # (graph, *, seed, forces, stress, **options)

    def fit(self, train: Data | None = None, **options: Any) -> FitResult:
        """Train; the options are those of `blips.fit`. A finished run is only read again."""
        trained = self if self.objective else self.backbone
        result = fit(trained, train, **{"resume": True, "display": False, **options})
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
        of_graph = self.predict_mean
        if method != "map":
            of_graph = partial(self.predict_graph, seed=seed, **options)
        graphs = graph_batches(self.backbone, atoms, batch_size)
        prediction = Prediction.join([of_graph(g, forces=forces, stress=stress) for g in graphs])
        return prediction.recalibrated(self.calibration) if calibrated else prediction

    def predict_mean(self, graph: Graph, *, forces: bool, stress: bool) -> Prediction:
        """Predict the means alone, at the cost of the backbone."""
        found = predict_plain(self.backbone, graph, forces=forces, stress=stress)
        return replace(found, method="map")


class DeepEnsemble(Baseline):
    """M independently trained backbones.

    Args:
        make_backbone: function of a seed, or the name of a backbone as for `build`. It is called
            with torch's generator seeded by that number, so that it may ignore it. None for members
            that are trained already (`of`).
        members: M, at least 2.
        hyperparameters: of the named backbone.
    """

    kind: ClassVar = "ensemble"

    def __init__(
        self,
        make_backbone: MakeBackbone | str | None,
        members: int = 5,
        hyperparameters: Mapping[str, Any] | None = None,
    ) -> None:
        if members < 2:
            raise InputError(f"members={members}: a standard deviation needs at least 2 members")
        nn.Module.__init__(self)
        self.make_backbone = make_backbone
        self._hyperparameters = dict(hyperparameters or {})
        self.num_members = members
        self.models = nn.ModuleList()
        self.calibration: dict[str, Calibrator] = {}

    @classmethod
    def of(cls, models: Sequence[Backbone]) -> Self:
        """Make an ensemble of models that are trained already."""
        models = list(models)
        ensemble = cls(None, len(models))
        ensemble.models = nn.ModuleList(models)
        return ensemble

    @classmethod
    def rebuilt(cls, backbone: Backbone, settings: dict[str, Any]) -> Self:
        """Make an ensemble of copies of a backbone, for the weights of a file."""
        return cls.of([backbone, *(copy.deepcopy(backbone) for _ in range(1, settings["members"]))])

    @property
    def backbone(self) -> Backbone:  # type: ignore[override]
        """The first member."""
        return self._members()[0]

    @property
    def settings(self) -> dict[str, Any]:  # type: ignore[override]
        """What a file needs beside the weights; members of different shapes cannot be saved."""
        members = self._members()
        if any(m.hyperparameters != members[0].hyperparameters for m in members):
            raise InputError(
                "the members differ in their hyperparameters; save each of them by itself"
            )
        return {"members": len(members)}

    def _members(self) -> list[Backbone]:
        if not self.models:
            raise InputError("the ensemble has no members yet; call fit first")
        return [model for model in self.models if isinstance(model, Backbone)]

    def fit(
        self,
        train: Data | None = None,
        *,
        valid: Data | float | None = None,
        config: Sources = (),
        folder: str | Path | None = None,
        **options: Any,
    ) -> FitResult:
        """Train member k with seed + k in `folder`/member_k; all on the same data.

        The options are those of `blips.fit`. Returns the result of the first in `folder`.
        """
        settings = load_config(config)
        root = Path(folder or settings.folder)
        models = [self._new(settings.seed + member) for member in range(self.num_members)]
        results: list[FitResult] = []
        for member, model in enumerate(models):
            result = fit(
                model,
                train,
                valid=valid,
                config=[settings, {"seed": settings.seed + member}],
                folder=root / f"member_{member}",
                **{"resume": True, "display": False, **options},
            )
            results.append(result)
            first, second = result.train_data, result.valid_data
            given = first is train or settings.data.stream
            if isinstance(first, StructureData) and isinstance(second, StructureData) and not given:
                train, valid = list(first), list(second)  # the same split for all
        self.models = nn.ModuleList(models)
        return replace(results[0], folder=root)

    def predict_graph(
        self, graph: Graph, *, seed: int = 0, forces: bool = True, stress: bool = False
    ) -> Prediction:
        """Predict mean and (M-1)-normalised std over the members."""
        members = self._members()

        def member(graph: Graph, numbers: range) -> Outputs:
            with torch.no_grad():
                return plain_outputs(members[numbers.start], graph, forces=forces, stress=stress)

        return monte_carlo(member, graph, len(members), method=self.kind, chunk=1)

    def predict_mean(self, graph: Graph, *, forces: bool, stress: bool) -> Prediction:
        """Predict the mean of the members; it costs what the error bars cost."""
        whole = self.predict_graph(graph, forces=forces, stress=stress)
        without = {name: None for name in vars(whole) if name.endswith("_std")}
        return replace(whole, method="map", **without)

    def _new(self, seed: int) -> Backbone:
        if self.make_backbone is None:
            raise InputError("an ensemble of trained models is not trained again; make a new one")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if isinstance(self.make_backbone, str):
                return build(self.make_backbone, **self._hyperparameters)
            return self.make_backbone(seed)


def predict_plain(
    backbone: Backbone,
    atoms: Structures,
    *,
    forces: bool = True,
    stress: bool = False,
    batch_size: int | None = None,
) -> Prediction:
    """Predict with a backbone, without error bars."""
    parts: list[Prediction] = []
    for graph in graph_batches(backbone, atoms, batch_size):
        with torch.no_grad():
            outputs = plain_outputs(backbone, graph, forces=forces, stress=stress)
        parts.append(point_prediction(outputs, graph, method="plain"))
    return Prediction.join(parts)


def predict_with(
    model: Any, atoms: Structures, *, stress: bool = False, **options: Any
) -> Prediction:
    """Predict with any model; a plain backbone has no error bars, and takes no options of them."""
    if isinstance(model, Model):
        return model.predict(atoms, stress=stress, **options)
    return predict_plain(model, atoms, stress=stress)
