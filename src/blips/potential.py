"""A Bayesian potential: a backbone whose maps have posteriors, and its inference network."""

import copy
import sys
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, get_args

from ase import Atoms
from torch import Tensor

from blips.backbones.base import Backbone, atomistic, graph_batches
from blips.bayes.convert import revert
from blips.bayes.kl import kl_divergence
from blips.bayes.noise import FrozenDraw
from blips.data.graph import Graph
from blips.data.labels import Labels
from blips.data.structures import Structures, iter_given
from blips.defaults import SAMPLES
from blips.errors import InputError, refuse_below, refuse_unknown
from blips.inference.alignment import element_counts
from blips.inference.linearise import LinearModel
from blips.inference.maps import READOUT, ChosenMaps, chosen_roles
from blips.inference.monte_carlo import Samples
from blips.inference.onepass import OnePass, one_pass
from blips.inference.posterior import Coefficients, ConditionedPosterior
from blips.inference.predict import predict
from blips.inference.rows import collect
from blips.inference.sampling import Member, Request, StochasticModel
from blips.inference.scale import fit_scale, keys_of
from blips.prediction import Prediction

DIMENSION = 2048  # more weights are sketched


class BayesianPotential(StochasticModel):
    """Backbone + inference network; make one with `blips.bayesianize`.

    Calling it gives the MAP outputs of the backbone. `sample` draws weights from the posterior,
    `draw` freezes draws into potentials of their own, `predict` gives means and error bars.
    """

    def condition(
        self,
        structures: Structures,
        *,
        valid: Structures | None = None,
        maps: str | Sequence[str] = READOUT,
        dimension: int = DIMENSION,
        rows: int = 48,
        coefficients: Coefficients = "constant",
        labels: Labels | None = None,
        seed: int = 0,
    ) -> ConditionedPosterior:
        """Condition the noise of weights on structures, in closed form; the means stay.

        Error bars are then small where the structures leave nothing open, and grow away from
        them. Called again with the same maps, it adds to what was seen before.

        Args:
            structures: geometries that the potential was trained on, or is trusted on; labels are
                not looked at. A file, or any iterable: they are read in batches.
            valid: labelled structures for the scale of the error bars, neither trained nor tested
                on. None keeps the scale of the last call.
            maps: "readout" (after the last exchange between atoms), "all" Bayesian maps, or
                patterns of names.
            dimension: more weights than this are sketched; memory grows with its square.
            rows: force rows of a structure; larger structures have so many random sums.
            coefficients: "constant", or "network": noise in proportion to the (trained) inference
                network's coefficients.
            labels: names and units of the labels of `valid`; those that the model was trained with
                if not given.
            seed: of the sketch and of random sums.
        """
        valid = None if valid is None else list(iter_given(valid))
        refuse_unknown("coefficients", coefficients, get_args(Coefficients))
        before = None if self.posterior is None else self.conditioned()
        labels = labels or self.backbone.labels
        backbone = atomistic(self.backbone)
        roles, last = chosen_roles(backbone, self.roles, maps)
        chosen = ChosenMaps.of(backbone, roles, dimension, seed, last=last)
        if before is None and valid is None:
            raise InputError(
                "condition needs valid=..., labelled structures for the scale of the error bars"
            )
        if before is not None and (
            (before.maps, before.coefficients) != (chosen, coefficients) or before.evidence is None
        ):
            raise InputError(
                "the potential is conditioned already, with other maps, dimension, coefficients "
                "or seed, or its posterior was kept as draws alone, to which nothing can be added; "
                "set potential.posterior = None to begin anew, with all structures"
            )
        if valid is not None:
            keys_of(valid, labels)
        network = self.coefficients if coefficients == "network" else None
        linear = LinearModel(backbone, chosen, network)
        evidence, count, domain = collect(
            linear, iter_given(structures), rows=rows, seed=seed, before=before
        )
        if before is None or valid is not None:
            scale = fit_scale(linear, evidence, valid or [], seed=seed, labels=labels)
        else:
            scale = before.scale
        self.posterior = ConditionedPosterior(chosen, scale, coefficients, count, domain, evidence)
        self.calibration = {}  # of other error bars
        return self.posterior

    def draw(self, count: int, seed: int = 0, *, method: str = "auto") -> list[Member]:
        """Draw `count` smooth, conservative potentials from the posterior; a committee.

        `method` is "conditioned" (linear in the noise of a conditioned posterior), "frozen"
        (weights of the paper's posterior), or "auto": the former where there is one.
        """
        refuse_unknown("method", method, ("auto", "conditioned", "frozen"))
        refuse_below(1, count=count)
        if method == "conditioned" or (method == "auto" and self.posterior is not None):
            return [Member(self, v) for v in self.conditioned().draws(count, seed)]
        return [Member(self, FrozenDraw(seed, number)) for number in range(count)]

    def member(self, number: int, seed: int = 0) -> Member:
        """Draw member `number` of the committee that `draw` gives."""
        return self.draw(number + 1, seed)[-1]

    def predict(
        self,
        atoms: Atoms | Sequence[Atoms] | Graph,
        *,
        samples: Samples = SAMPLES,
        method: str = "auto",
        seed: int = 0,
        forces: bool = True,
        stress: bool = False,
        batch_size: int | None = None,
        memory_gb: float | None = None,
        calibrated: bool = True,
        tolerance: float = 0.1,
    ) -> Prediction:
        """Predict means and standard deviations in eV, eV/A and eV/A^3.

        Args:
            atoms: one structure, many, or a graph.
            samples: K, the number of posterior samples, or "auto": as many as `tolerance` needs.
            method: "auto" (conditioned where it can), "conditioned" (the posterior that has seen
                the data), "mc" (the paper's, fresh weights for each row), "frozen" (a committee of
                draws of it), "onepass" (std of energies, by one pass) or "map" (no std).
            seed: the same seed gives the same prediction.
            forces: also predict forces.
            stress: also predict the stress.
            batch_size: structures at once; by default as many as have 512 atoms together.
            memory_gb: bound for the passes: samples, and if need be structures, run in parts that
                fit it, and a structure too large for it is refused. By default 2 GB, but for a
                single structure as much as the machine has.
            calibrated: apply the potential's calibration, where it has one.
            tolerance: of samples="auto": relative standard error of a typical std; 512 samples
                at most.
        """
        request = Request(method, samples, tolerance, seed, forces, stress, memory_gb)
        prediction = predict(self, graph_batches(self.backbone, atoms, batch_size), request)
        if self.alignment is not None:
            counts = element_counts([atoms] if isinstance(atoms, Atoms) else atoms)
            prediction = self.alignment.widened(prediction, counts)
        return prediction.recalibrated(self.calibration) if calibrated else prediction

    def one_pass(
        self, atoms: Atoms | Sequence[Atoms] | Graph, *, forces: bool = True, stress: bool = False
    ) -> OnePass:
        """Compute the energies' first-order variance by the paper's posterior, and its origin."""
        graph = next(graph_batches(self.backbone, atoms, sys.maxsize))
        return one_pass(self, graph, forces=forces, stress=stress)

    def kl(self, coefficients: Mapping[str, Tensor], **options: Any) -> Tensor:
        """Compute the KL of these coefficients to the prior; options as for `kl_divergence`."""
        return kl_divergence(
            coefficients, self.roles, self.rho, num_weights=self.num_weights, **options
        )

    def report(self) -> str:
        """Report which maps are Bayesian, as what, and which are not and why."""
        return str(self.conversion)

    def _repr_html_(self) -> str:
        """Show a short table in a notebook."""
        total = sum(p.numel() for p in self.backbone.parameters())
        random = sum(self.num_weights.values())
        rows = {
            "backbone": f"{type(self.backbone).__name__}, {total:,} weights",
            "Bayesian maps": f"{len(self.num_weights)}, {random:,} weights",
            "error bars": str(self.posterior or "not conditioned: method 'mc'"),
            "calibrated for": ", ".join(self.calibration) or "nothing",
        }
        cells = (f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in rows.items())
        return f"<table>{''.join(cells)}</table>"

    def to_base(self) -> Backbone:
        """Return a plain copy of the backbone whose weights are the posterior means."""
        base = copy.deepcopy(self.backbone)
        revert(base)
        return base
