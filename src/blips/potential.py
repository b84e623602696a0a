"""A Bayesian potential: a backbone whose maps have posteriors, and its inference network."""

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Unpack, get_args

import torch
from ase import Atoms
from torch import Tensor, nn

from blips import keys
from blips.backbones.base import AtomisticBackbone, Backbone, graph_batches
from blips.backbones.derivatives import Derivatives, asked_for, energy_and_derivatives
from blips.bayes import noise as noise_context
from blips.bayes.convert import ConversionReport, revert
from blips.bayes.encoder import InferenceNetwork
from blips.bayes.kl import Reduction, kl_divergence, prior_coefficient
from blips.bayes.noise import FrozenDraw, FrozenNoise, Noise, SampledNoise
from blips.data.graph import AtomGraph, Graph
from blips.data.labels import Labels
from blips.defaults import SAMPLES
from blips.errors import InputError
from blips.inference.condition import collect, fit_scale, keys_of
from blips.inference.conditioned import member_outputs, predict_conditioned
from blips.inference.linearise import choose_maps
from blips.inference.posterior import Coefficients as CoefficientChoice
from blips.inference.posterior import ConditionedPosterior
from blips.inference.readout import READOUT, chosen_roles
from blips.members import FrozenMember, LinearDraw
from blips.memory import keep_freed_memory
from blips.methods import Request, Samples, join, predict_within
from blips.onepass import OnePass, one_pass
from blips.predict import Calibrator, Outputs, Prediction
from blips.sampling import MemoryBound, MemoryGauge
from blips.spread import ForceSpread, distil_spread

Coefficients = Mapping[str, Tensor]
DIMENSION = 2048  # of the conditioned posterior: more weights are sketched
ROWS = 48  # force rows of a conditioning structure
CoefficientFunction = Callable[[Graph], dict[str, Tensor]]
MakeNoise = Callable[[Coefficients], Noise]


@dataclass(frozen=True)
class Sample:
    """Outputs of posterior samples, and the coefficients that they were drawn with.

    Attributes:
        outputs: energy [K * S], forces [K * N, 3], ..., replica-major.
        coefficients: [K * rows] by map name; empty for MAP.
    """

    outputs: Outputs
    coefficients: Coefficients


class BayesianPotential(nn.Module):
    """Backbone + inference network; make one with `blips.bayesianize`.

    Calling it gives the MAP outputs of the backbone. `sample` draws weights from the posterior,
    `draw` freezes draws into potentials of their own, `predict` gives means and error bars.

    Attributes:
        backbone: the converted model; its state dict is that of the plain one.
        encoder: the inference network.
        rho: prior variance of a weight in units of its mean squared, p / (1 - p).
        estimator: how rows are sampled: "auto", "local" or "flipout".
        settings: what `bayesianize` was called with, for checkpoints.
        calibration: quantity ("energy", "forces", ...) -> object with `apply(std)`.
        force_spread: what `distil_forces` found, for deviations of forces in one pass.
        posterior: the conditioned posterior, see `condition`; None before.
    """

    def __init__(
        self,
        backbone: Backbone,
        encoder: InferenceNetwork,
        conversion: ConversionReport,
        settings: dict[str, Any],
    ) -> None:
        super().__init__()
        keep_freed_memory()
        self.backbone = backbone
        self.encoder = encoder
        self.conversion = conversion
        self.settings = settings
        self.rho = prior_coefficient(settings["prior_dropout"])
        self.estimator: str = settings["estimator"]
        self.calibration: dict[str, Calibrator] = {}
        self.force_spread: ForceSpread | None = None
        self.posterior: ConditionedPosterior | None = None
        weights = sum(self._num_weights.values())
        weight_bytes = weights * next(encoder.parameters()).element_size()
        self._gauge = MemoryGauge(weight_bytes)

    def forward(
        self, graph: Graph, *, forces: bool = True, stress: bool = False, create_graph: bool = False
    ) -> Outputs:
        """MAP outputs: the posterior means as weights, cost and numbers of the plain model."""
        derivatives = Derivatives(forces=forces, stress=stress, create_graph=create_graph)
        return self._evaluate(graph, None, derivatives).outputs

    def sample(
        self,
        graph: Graph,
        generators: Sequence[torch.Generator],
        *,
        estimator: str | None = None,
        **derivatives: Unpack[Derivatives],
    ) -> Sample:
        """K = len(generators) posterior samples, each row with weights of its own.

        Args:
            graph: the structures; they are replicated K times.
            generators: one per sample, see `blips.bayes.noise.generators`.
            estimator: in place of the potential's own.
            derivatives: forces, stress, create_graph, as for `forward`.
        """
        name = estimator or self.estimator
        return self._evaluate(
            graph.replicate(len(generators)),
            lambda coefficients: SampledNoise(coefficients, generators, name),
            derivatives,
        )

    def frozen(
        self, graph: Graph, draws: Sequence[FrozenDraw], **derivatives: Unpack[Derivatives]
    ) -> Sample:
        """K = len(draws) members, each with one draw for all rows and all calls."""
        return self._evaluate(
            graph.replicate(len(draws)),
            lambda coefficients: FrozenNoise(coefficients, draws),
            derivatives,
        )

    def condition(
        self,
        structures: Iterable[Atoms],
        *,
        valid: Sequence[Atoms] | None = None,
        maps: str | Sequence[str] = READOUT,
        dimension: int = DIMENSION,
        rows: int = ROWS,
        coefficients: CoefficientChoice = "constant",
        labels: Labels | None = None,
        seed: int = 0,
    ) -> ConditionedPosterior:
        """Condition the noise of weights on structures, in closed form; the means stay.

        Error bars are then small where the structures leave nothing open, and grow away from
        them. Called again with the same maps, it adds to what was seen before.

        Args:
            structures: geometries that the potential was trained on, or is trusted on; labels are
                not looked at. Any iterable: they are read in batches.
            valid: labelled structures for the scale of the error bars, neither trained nor tested
                on. None keeps the scale of the last call.
            maps: "readout" (after the last exchange between atoms), "all" Bayesian maps, or
                patterns of names.
            dimension: more weights than this are sketched; memory grows with its square.
            rows: force rows of a structure; larger structures have so many random sums.
            coefficients: "constant", or "network": noise in proportion to the (trained) inference
                network's coefficients.
            labels: names and units of the labels of `valid`.
            seed: of the sketch and of random sums.

        Returns:
            What is kept as `posterior`.
        """
        backbone, before = self.backbone, self.posterior
        structures = [structures] if isinstance(structures, Atoms) else structures
        valid = [valid] if isinstance(valid, Atoms) else valid
        known = get_args(CoefficientChoice)
        if coefficients not in known:
            raise InputError(f"unknown coefficients {coefficients!r}; use {' or '.join(known)}")
        if not isinstance(backbone, AtomisticBackbone):
            raise InputError(f"{type(backbone).__name__} is no potential, it cannot be conditioned")
        roles, last = chosen_roles(backbone, self.conversion.roles, maps)
        chosen = choose_maps(backbone, roles, dimension, seed, last=last)
        if before is not None and (before.maps, before.coefficients) != (chosen, coefficients):
            raise InputError(
                "the potential is conditioned already, with other maps, dimension, coefficients "
                "or seed; set potential.posterior = None to begin anew"
            )
        if valid is None and before is None:
            raise InputError(
                "condition needs valid=..., labelled structures for the scale of the error bars"
            )
        if valid is not None:
            keys_of(valid, labels)  # an error now, not after all structures were read
        if before is not None and before.evidence is None:
            raise InputError(
                "the posterior was kept as draws alone, to which nothing can be added; set "
                "potential.posterior = None and condition on all structures"
            )
        of_network = self.coefficients if coefficients == "network" else None
        seen = collect(
            backbone,
            chosen,
            structures,
            rows=rows,
            seed=seed,
            first=0 if before is None else before.structures,
            coefficients_of=of_network,
        )
        if before is not None and before.evidence is not None:
            seen = seen.joined(before.evidence, before.structures, before.numbers)
        scale = before.scale if before is not None else None
        if valid is not None or scale is None:
            scale = fit_scale(
                backbone,
                chosen,
                seen.evidence,
                list(valid or ()),
                seed=seed,
                labels=labels,
                coefficients_of=of_network,
            )
        self.posterior = ConditionedPosterior(
            chosen, scale, coefficients, seen.structures, seen.numbers, seen.evidence
        )
        self.calibration, self.force_spread = {}, None  # of other error bars
        return self.posterior

    def draw(self, count: int, seed: int = 0, *, method: str = "auto") -> list[FrozenMember]:
        """`count` smooth, conservative potentials drawn from the posterior; a committee.

        Args:
            count: number of members.
            seed: the same seed gives the same members.
            method: "conditioned" (linear in the noise of a conditioned posterior), "frozen"
                (weights of the paper's posterior), or "auto": the former where there is one.
        """
        return [self.member(number, seed, method=method) for number in range(count)]

    def member(self, number: int, seed: int = 0, *, method: str = "auto") -> FrozenMember:
        """Member `number` of the committee that `draw` gives."""
        if method not in ("auto", "conditioned", "frozen"):
            raise InputError(f"unknown method {method!r}; use auto, conditioned or frozen")
        if method == "conditioned" or (method == "auto" and self.posterior is not None):
            return FrozenMember(self, LinearDraw(self.conditioned().draws(number + 1, seed)[-1]))
        return FrozenMember(self, FrozenDraw(seed, number))

    def conditioned(self) -> ConditionedPosterior:
        """The conditioned posterior; an error where there is none."""
        if self.posterior is None:
            raise InputError(
                "the potential is not conditioned on data; call potential.condition(structures, "
                "valid=labelled structures), or blips condition"
            )
        return self.posterior

    def linear_member(self, graph: Graph, v: Tensor, **derivatives: Unpack[Derivatives]) -> Outputs:
        """Outputs of the conditioned member with noise v [d]."""
        if derivatives.get("create_graph"):
            raise InputError("members of a conditioned posterior cannot be trained")
        return member_outputs(
            self.backbone,
            self.conditioned(),
            graph,
            v,
            forces=derivatives.get("forces", True),
            stress=derivatives.get("stress", False),
            coefficients=self._row_coefficients(),
        )

    def predict_conditioned(self, graph: Graph, **options: Any) -> Prediction:
        """Prediction of one batch by the conditioned posterior (`blips.inference.conditioned`)."""
        return predict_conditioned(
            self.backbone,
            self.conditioned(),
            graph,
            coefficients=self._row_coefficients(),
            **options,
        )

    def _row_coefficients(self) -> CoefficientFunction | None:
        network = self.posterior is not None and self.posterior.coefficients == "network"
        return self.coefficients if network else None

    def predict(
        self,
        atoms: Atoms | Sequence[Atoms] | Graph,
        *,
        samples: Samples = SAMPLES,
        method: str = "auto",
        seed: int = 0,
        forces: bool = True,
        stress: bool = False,
        covariance: bool = False,
        batch_size: int = 32,
        memory_gb: float | None = None,
        calibrated: bool = True,
        tolerance: float = 0.1,
        max_samples: int = 512,
    ) -> Prediction:
        """Means and standard deviations in eV, eV/A and eV/A^3.

        Args:
            atoms: one structure, many, or a graph.
            samples: K, the number of posterior samples, or "auto": as many as `tolerance` needs.
            method: "auto" (the conditioned posterior where there is one, else what
                `blips.methods.choose` says; the prediction names it), "conditioned" (the plain
                model's means, deviations of the posterior that has seen the data, see
                `condition`), "mc" (the paper's posterior, fresh weights for each row), "frozen" (a
                committee of frozen draws),
                "onepass" (posterior means, and deviations without sampling: the energy's at first
                order, the forces' where `distil_forces` was called) or "map"
                (posterior means, no error bars, the base model's cost).
            seed: the same seed gives the same prediction.
            forces: also predict forces.
            stress: also predict the stress.
            covariance: also the 3x3 covariance of each atom's force.
            batch_size: structures at once.
            memory_gb: bound for the passes: samples, and if need be structures, run in parts that
                fit it, and a structure too large for it is refused. By default 2 GB, but for a
                single structure as much as the machine has.
            calibrated: apply the potential's calibration, where it has one.
            tolerance: of samples="auto": relative standard error of a typical sigma.
            max_samples: of samples="auto": stop here in any case.
        """
        request = Request(
            method=method,
            samples=samples,
            tolerance=tolerance,
            max_samples=max_samples,
            seed=seed,
            forces=forces,
            stress=stress,
            covariance=covariance,
            memory_gb=memory_gb,
        )
        prediction = join(
            [
                part
                for graph in graph_batches(self.backbone, atoms, batch_size)
                for part in predict_within(self, graph, request)
            ]
        )
        return prediction.recalibrated(self.calibration) if calibrated else prediction

    def one_pass(
        self, atoms: Atoms | Sequence[Atoms] | Graph, **derivatives: Unpack[Derivatives]
    ) -> OnePass:
        """First-order variance of the energies, and where it comes from (`blips.onepass`)."""
        graph = next(graph_batches(self.backbone, atoms, sys.maxsize))
        roles = self.conversion.roles
        return one_pass(self.backbone, self.coefficients, graph, roles, **derivatives)

    def distil_forces(
        self,
        structures: Sequence[Atoms],
        *,
        samples: int = 64,
        displacements: Sequence[float] | None = None,
        refine: bool = False,
        seed: int = 0,
    ) -> ForceSpread:
        """Learn from own samples what one pass needs for deviations of forces; keep it.

        The samples are those of the paper's posterior (`method="mc"`). Deviations of a conditioned
        posterior span orders of magnitude and are not learned well this way (on NH3 ranks agree by
        0.5 near the data and 0.65 far from it); eight draws of it are cheap and rank by 0.98.

        Args:
            structures: such as the potential will be used for, without labels; 10 are enough.
            samples: posterior samples of each.
            displacements: each structure is also seen with coordinates displaced by N(0, s^2), for
                each of these s in A: as far as deviations will be asked for. 0.1 and 0.3 if not
                given, with `refine` eleven from 0.05 to 0.3, twice for models without symmetry.
            refine: train a small network on top (a minute or two), and keep it if it ranks sigma of
                structures left out better; give it 16 structures or more.
            seed: of samples and displacements.

        Returns:
            What is kept as `force_spread`; its `quality` is that on structures left out.
        """
        self.force_spread = distil_spread(self, structures, samples, displacements, refine, seed)
        return self.force_spread

    def coefficients(self, graph: Graph) -> dict[str, Tensor]:
        """Alpha and beta of every Bayesian map on this input, [rows] by map name."""
        return self.encoder(self.backbone.row_features(graph))

    def kl(
        self,
        coefficients: Coefficients,
        *,
        reduction: Reduction = "mean",
        num_data: int | None = None,
    ) -> Tensor:
        """KL of these coefficients to the prior (nats), one number."""
        return kl_divergence(
            coefficients,
            self.conversion.roles,
            self.rho,
            reduction=reduction,
            num_weights=self._num_weights,
            num_data=num_data,
        )

    def report(self) -> str:
        """Which maps are Bayesian, as what, and which are not and why."""
        return str(self.conversion)

    def to_base(self) -> Backbone:
        """A plain copy of the backbone whose weights are the posterior means."""
        base = copy.deepcopy(self.backbone)
        revert(base)
        return base

    @cached_property
    def _num_weights(self) -> dict[str, int]:
        """Random weights of each Bayesian map."""
        layers = {name: self.backbone.get_submodule(name) for name in self.conversion.roles}
        return {
            name: sum(p.numel() for key, p in own.named_parameters(recurse=False) if key != "bias")
            for name, own in layers.items()
        }

    def outputs_of(
        self,
        graph: Graph,
        numbers: range | None,
        seed: int,
        derivatives: Derivatives,
        frozen: bool = False,
    ) -> Outputs:
        """Outputs of the samples with these numbers (None for MAP), without autograd's graph."""
        conservative = self.backbone.conservative and any(derivatives.values())
        with torch.enable_grad() if conservative else torch.no_grad():
            if numbers is None:
                return self(graph, **derivatives)
            if frozen:
                draws = [FrozenDraw(seed, member) for member in numbers]
                return self.frozen(graph, draws, **derivatives).outputs
            device = graph.positions.device
            generators = noise_context.generators(seed, len(numbers), numbers.start, device)
            return self.sample(graph, generators, **derivatives).outputs

    def samples_at_once(self, graph: Graph, samples: int, bound: MemoryBound, seed: int) -> int:
        """How many of `samples` samples run at once; an error where not even one fits the bound."""
        device = graph.positions.device
        return self._gauge.chunk(
            graph,
            samples,
            bound,
            lambda part: self.sample(part, noise_context.generators(seed, 1, 0, device)),
        )

    def _evaluate(
        self,
        graph: Graph,
        make_noise: MakeNoise | None,
        derivatives: Derivatives,
    ) -> Sample:
        """Outputs under the noise that `make_noise` builds from this graph's coefficients.

        The coefficients are functions of the positions, so they are evaluated inside the energy
        that forces differentiate.
        """
        coefficients: dict[str, Tensor] = {}

        def outputs_of(graph: Graph) -> Outputs:
            if make_noise is not None:
                coefficients.update(self.coefficients(graph))
            with noise_context.use(make_noise and make_noise(coefficients)):
                return self.backbone(graph)

        if not self.backbone.conservative:
            return Sample(asked_for(outputs_of(graph), graph, derivatives), coefficients)
        if not isinstance(graph, AtomGraph):
            raise InputError(f"a potential needs an AtomGraph, got {type(graph).__name__}")
        outputs = energy_and_derivatives(
            lambda graph: outputs_of(graph)[keys.ENERGIES], graph, **derivatives
        )
        return Sample(outputs, coefficients)
