"""What a training step minimises: the data loss, of the plain model or of posterior samples.

With `training.noise`, data loss of samples + lambda * KL: the paper's objective.

Two more terms, off by default, keep a pretrained model from forgetting: `anchor_weight` times the
distance of the weights from where they began (`blips.train.loss`), and `replay_weight` times
the data loss of a batch from a second set.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from blips import keys
from blips.backbones.base import Backbone
from blips.backbones.derivatives import Derivatives, plain_outputs
from blips.bayes.noise import seeded_generator
from blips.config import TrainingConfig
from blips.data.dataset import Batch
from blips.data.graph import Graph
from blips.inference.sampling import Sample
from blips.potential import BayesianPotential
from blips.prediction import Calibrator
from blips.train.loss import DISTRIBUTION_LOSSES, Anchor, data_loss


class Wrapper(nn.Module):
    """A backbone and what a method puts around it; `cls(backbone, **settings)` makes it again.

    Settings are JSON-able; a calibration belongs to a quantity ("energy", "forces", ...).
    """

    kind: ClassVar[str]  # name in checkpoints, of its own for every class that can be saved
    kinds: ClassVar[dict[str, type["Wrapper"]]] = {}
    objective: ClassVar[Callable[..., "Objective"] | None] = None  # to train it as a whole

    def __init__(self, backbone: Backbone, settings: dict[str, Any]) -> None:
        super().__init__()
        self.backbone = backbone
        self.settings = settings
        self.calibration: dict[str, Calibrator] = {}

    @classmethod
    def rebuilt(cls, backbone: Backbone, settings: dict[str, Any]) -> "Wrapper":
        """Wrap a backbone that a file describes, for the weights in that file."""
        return cls(backbone, **settings)

    def __init_subclass__(cls) -> None:
        """Register the class for checkpoints."""
        super().__init_subclass__()
        if "kind" in cls.__dict__:
            Wrapper.kinds[cls.kind] = cls


Model = BayesianPotential | Backbone | Wrapper
NoiseKey = tuple[int | str, ...]
Penalties = dict[str, tuple[float, Tensor]]  # (weight, value) by name


class LossTerms(NamedTuple):
    """Total and its parts; parts are detached, for the log."""

    total: Tensor
    parts: dict[str, float]


class Objective(nn.Module):
    """The loss of a batch; a module, so that Fabric can wrap and distribute it.

    There is a KL for Bayesian potentials alone; `num_data` is for its "elbo" reduction.
    """

    def __init__(self, model: Model, config: TrainingConfig, num_data: int) -> None:
        super().__init__()
        self.model = model
        self.config = config
        self.num_data = num_data
        self.anchor: Anchor | None = None  # the start, where weights are to be kept near it

    def forward(
        self, batch: Batch, noise_key: NoiseKey, kl_scale: float, replay: Batch | None = None
    ) -> LossTerms:
        """Compute the loss of one training step, whose noise is a function of `noise_key`.

        `kl_scale`, 0 to 1, is the KL's warm-up; `replay` a batch of the second set.
        """
        config = self.config
        data_terms, coefficients = self.training_terms(batch, noise_key)
        penalties: Penalties = {}
        if isinstance(self.model, BayesianPotential) and config.noise:
            kl = self.kl(self.model, coefficients)
            penalties["kl"] = (config.kl_weight * kl_scale, kl)
        if self.anchor is not None:
            penalties["anchor"] = (config.anchor_weight, self.anchor.penalty())
        if replay is not None:
            terms, _ = self.training_terms(replay, (*noise_key, "replay"))
            penalties["replay"] = (config.replay_weight, torch.stack(list(terms.values())).sum())
        loss = total(data_terms, penalties)
        if isinstance(self.model, BayesianPotential) and coefficients:
            roles = self.model.conversion.roles
            for role in dict.fromkeys(roles.values()):
                group = [coefficients[name] for name, of in roles.items() if of == role]
                loss.parts[f"coef_{role}"] = float(torch.cat(group).detach().mean())
        return loss

    @torch.no_grad()  # forces switch gradients on where they need them
    def evaluate(self, batch: Batch, seed: int = 0) -> dict[str, float]:
        """Compute validation terms: MAP for point losses, K fixed samples for distribution losses.

        Beside the loss, the mean absolute errors in meV/atom and meV/A, whatever the loss.
        """
        config = self.config
        derivatives = self.derivatives(batch, create_graph=False)
        count = max(config.samples, 8) if config.loss in DISTRIBUTION_LOSSES else 0
        outputs = self.sample(batch.graph, count, ("valid", seed), derivatives).outputs
        counts = batch.graph.node_counts()
        terms = total(data_loss(outputs, batch.targets, counts, config)).parts
        for name, size in ((keys.ENERGY, counts), (keys.FORCES, 1.0)):
            if name in batch.targets and name in outputs:
                target = batch.targets[name]
                mean = outputs[name].reshape(-1, *target.shape).mean(dim=0)  # of all samples
                terms[f"mae_{name}"] = 1000.0 * float(((mean - target).abs() / size).mean())
        return terms

    def training_terms(
        self, batch: Batch, noise_key: NoiseKey
    ) -> tuple[dict[str, Tensor], Mapping[str, Tensor]]:
        """Compute the data loss of a batch by quantity, and the coefficients of its samples."""
        derivatives = self.derivatives(batch, create_graph=True)
        count = self.config.samples if self.config.loss in DISTRIBUTION_LOSSES else 1
        if isinstance(self.model, BayesianPotential) and not self.config.noise:
            count = 0
        sample = self.sample(batch.graph, count, noise_key, derivatives)
        counts = batch.graph.node_counts()
        return data_loss(sample.outputs, batch.targets, counts, self.config), sample.coefficients

    def sample(
        self, graph: Graph, count: int, noise_key: NoiseKey, derivatives: Derivatives
    ) -> Sample:
        """Compute outputs of `count` samples, or those without noise for 0 and plain backbones."""
        if not isinstance(self.model, BayesianPotential):
            backbone = self.model if isinstance(self.model, Backbone) else self.model.backbone
            return Sample(plain_outputs(backbone, graph, **derivatives), {})
        if count == 0:
            return Sample(self.model(graph, **derivatives), {})
        device = graph.positions.device
        generators = [seeded_generator(*noise_key, k, device=device) for k in range(count)]
        return self.model.sample(graph, generators, **derivatives)

    def kl(self, model: BayesianPotential, coefficients: Mapping[str, Tensor]) -> Tensor:
        """Compute the KL of these coefficients, reduced as the configuration says."""
        return model.kl(coefficients, reduction=self.config.kl_reduction, num_data=self.num_data)

    def derivatives(self, batch: Batch, *, create_graph: bool) -> Derivatives:
        """Say which derivatives the labels with a weight need."""
        weights = self.config.weights
        return Derivatives(
            forces=keys.FORCES in batch.targets and weights.forces > 0,
            stress=keys.STRESS in batch.targets and weights.stress > 0,
            create_graph=create_graph,
        )


def total(terms: Mapping[str, Tensor], penalties: Penalties | None = None) -> LossTerms:
    """Sum of the data terms and of the weighted penalties (weight, value)."""
    data = torch.stack(list(terms.values())).sum()
    parts = {name: float(term.detach()) for name, term in terms.items()}
    parts["loss"] = float(data.detach())
    loss = data
    for name, (weight, value) in (penalties or {}).items():
        parts[name] = float(value.detach())
        loss = loss + weight * value
    return LossTerms(loss, parts)
