"""Monte Carlo dropout: channels are zeroed at random, in training and in prediction.

Gal, Ghahramani, "Dropout as a Bayesian Approximation" (2016). After every linear map of the
message-passing network

    z <- z * m / (1 - p),    m ~ Bernoulli(1 - p) for every row and channel

with one mask for all components of a vector feature, so that every sample of an equivariant model
is equivariant. The masks of a sample are drawn once for an energy, which its forces differentiate.
Without masks it is the plain model.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from blips.backbones.base import Backbone
from blips.backbones.derivatives import Derivatives, plain_outputs
from blips.baselines import Baseline
from blips.bayes.linear import kind_of
from blips.bayes.noise import generators as sample_generators
from blips.bayes.noise import seeded_generator
from blips.data.graph import Graph
from blips.errors import ConversionError, InputError
from blips.inference.memory import MemoryGauge
from blips.inference.monte_carlo import monte_carlo
from blips.inference.sampling import Sample
from blips.prediction import Outputs, Prediction
from blips.train.objective import NoiseKey, Objective


@dataclass(frozen=True)
class Masks:
    """How the masks of K samples are drawn: those of sample k from generator k alone."""

    rate: float
    generators: Sequence[torch.Generator]

    def apply(self, z: Tensor) -> Tensor:
        """Zero channels of z at random, [K*R, *irrep, channels]."""
        count, keep = len(self.generators), 1.0 - self.rate
        mask = z.new_empty(count, len(z) // count, z.shape[-1])  # [K, R, channels]
        for block, generator in zip(mask, self.generators, strict=True):
            block.bernoulli_(keep, generator=generator)
        mask = mask.reshape(len(z), *(1,) * (z.ndim - 2), z.shape[-1])
        return z * (mask / keep)


_active: ContextVar[Masks | None] = ContextVar("blips_active_masks", default=None)


def _drop(_layer: nn.Module, _args: tuple[Any, ...], z: Tensor) -> Tensor:
    """Apply the active masks (forward hook of a linear map)."""
    masks = _active.get()
    return z if masks is None else masks.apply(z)


class DropoutObjective(Objective):
    """The loss of samples with dropout."""

    def sample(
        self, graph: Graph, count: int, noise_key: NoiseKey, derivatives: Derivatives
    ) -> Sample:
        """Compute outputs of `count` samples, or those without noise for 0."""
        assert isinstance(self.model, MCDropout)
        if count == 0:
            return super().sample(graph, count, noise_key, derivatives)
        device = graph.positions.device
        generators = [seeded_generator(*noise_key, k, device=device) for k in range(count)]
        return self.model.sample(graph, generators, **derivatives)


class MCDropout(Baseline):
    """A backbone with dropout after its message and update maps.

    Left alone are maps without a row type in the backbone's `roles`, maps with a single output
    (energies, steps of coordinates), and those that match `exclude`.

    Args:
        backbone: the plain model; it gets hooks, which do nothing outside of samples.
        rate: p, the probability that a channel is zeroed.
        exclude: name patterns of maps without dropout.
    """

    kind: ClassVar = "dropout"
    objective: ClassVar = DropoutObjective
    takes_samples: ClassVar = True

    def __init__(
        self, backbone: Backbone, rate: float = 0.1, exclude: Sequence[str] = ("readout.*",)
    ) -> None:
        if not 0.0 < rate < 1.0:
            raise InputError(f"the dropout rate must be between 0 and 1, got {rate}")
        super().__init__(backbone, {"rate": rate, "exclude": list(exclude)})
        self.rate = rate
        self.maps = _maps(backbone, exclude)
        for name in self.maps:
            backbone.get_submodule(name).register_forward_hook(_drop)
        self._gauge = MemoryGauge()

    def forward(self, graph: Graph, **derivatives: Unpack[Derivatives]) -> Outputs:
        """Compute the outputs of the plain model."""
        return plain_outputs(self.backbone, graph, **derivatives)

    def sample(
        self,
        graph: Graph,
        generators: Sequence[torch.Generator],
        **derivatives: Unpack[Derivatives],
    ) -> Sample:
        """Draw K = len(generators) samples, each with masks of its own, as one replicated batch."""
        token = _active.set(Masks(self.rate, generators))
        try:
            return Sample(self(graph.replicate(len(generators)), **derivatives), {})
        finally:
            _active.reset(token)

    def predict_graph(
        self,
        graph: Graph,
        *,
        seed: int = 0,
        samples: int = 32,
        forces: bool = True,
        stress: bool = False,
        memory_gb: float | None = None,
    ) -> Prediction:
        """Predict mean and std of K samples; sample k is a function of (seed, k).

        Samples run in chunks that fit `memory_gb`, by default 2 GB, but for a single sample as much
        as the machine has.
        """
        device = graph.positions.device

        def sampler(graph: Graph, numbers: range) -> Outputs:
            sources = sample_generators(seed, len(numbers), numbers.start, device)
            with torch.no_grad():
                return self.sample(graph, sources, forces=forces, stress=stress).outputs

        chunk = self._gauge.chunk(
            (forces, stress),
            graph,
            samples,
            memory_gb,
            lambda part: sampler(part, range(1)),
        )
        return monte_carlo(sampler, graph, samples, method=self.kind, chunk=chunk)


def _maps(backbone: Backbone, exclude: Sequence[str]) -> tuple[str, ...]:
    """List the names of the linear maps that get dropout."""
    found = []
    for name, layer in backbone.named_modules():
        if kind_of(layer) is None or not any(fnmatchcase(name, p) for p in backbone.roles):
            continue
        if _drop in layer._forward_hooks.values():
            raise ConversionError("the backbone has dropout already; start from a plain one")
        single = getattr(layer, "out_features", None) == 1
        if not single and not any(fnmatchcase(name, p) for p in exclude):
            found.append(name)
    if not found:
        raise ConversionError(
            f"{type(backbone).__name__} has no map for dropout: none has a row type in its roles "
            f"({', '.join(backbone.roles) or 'empty'}), or all are excluded"
        )
    return tuple(found)
