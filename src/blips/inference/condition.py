"""Condition a potential on structures: collect rows, fit the scale, build the posterior."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from ase import Atoms

from blips.backbones.base import AtomisticBackbone, Backbone
from blips.data.labels import Labels
from blips.errors import InputError
from blips.inference.linearise import CoefficientFunction
from blips.inference.maps import READOUT, ChosenMaps, choose_maps, chosen_roles
from blips.inference.posterior import Coefficients, ConditionedPosterior
from blips.inference.rows import collect
from blips.inference.scale import fit_scale, keys_of

DIMENSION = 2048  # more weights are sketched
ROWS = 48  # force rows of a structure


@dataclass(frozen=True)
class Conditioning:
    """How to condition; the options of `BayesianPotential.condition`."""

    maps: str | Sequence[str] = READOUT
    dimension: int = DIMENSION
    rows: int = ROWS
    coefficients: Coefficients = "constant"
    labels: Labels | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse unknown coefficients."""
        known = get_args(Coefficients)
        if self.coefficients not in known:
            raise InputError(
                f"unknown coefficients {self.coefficients!r}; use {' or '.join(known)}"
            )


def condition(
    backbone: Backbone,
    roles: Mapping[str, str],
    network: CoefficientFunction,
    before: ConditionedPosterior | None,
    structures: Iterable[Atoms],
    valid: Sequence[Atoms] | None,
    options: Conditioning,
) -> ConditionedPosterior:
    """Return the posterior that has also seen these structures.

    Args:
        backbone: the model, at its trained weights.
        roles: row type of each of its Bayesian maps.
        network: the inference network on a graph, for coefficients="network".
        before: the posterior so far.
        structures: geometries, read in batches.
        valid: labelled structures for the scale; None keeps that of `before`.
        options: which maps, how many rows, ...
    """
    structures = [structures] if isinstance(structures, Atoms) else structures
    valid = [valid] if isinstance(valid, Atoms) else valid
    if not isinstance(backbone, AtomisticBackbone):
        raise InputError(f"{type(backbone).__name__} is no potential, it cannot be conditioned")
    chosen_names, last = chosen_roles(backbone, roles, options.maps)
    maps = choose_maps(backbone, chosen_names, options.dimension, options.seed, last=last)
    _check(before, maps, valid, options)
    coefficients_of = network if options.coefficients == "network" else None
    seen = collect(
        backbone,
        maps,
        structures,
        rows=options.rows,
        seed=options.seed,
        first=0 if before is None else before.structures,
        coefficients_of=coefficients_of,
    )
    if before is not None and before.evidence is not None:
        seen = seen.joined(before.evidence, before.structures, before.domain)
    scale = before.scale if before is not None else None
    if valid is not None or scale is None:
        scale = fit_scale(
            backbone,
            maps,
            seen.evidence,
            list(valid or ()),
            seed=options.seed,
            labels=options.labels,
            coefficients_of=coefficients_of,
        )
    return ConditionedPosterior(
        maps, scale, options.coefficients, seen.structures, seen.domain, seen.evidence
    )


def _check(
    before: ConditionedPosterior | None,
    maps: ChosenMaps,
    valid: Sequence[Atoms] | None,
    options: Conditioning,
) -> None:
    """Refuse what cannot be added to the posterior so far, before any structure is read."""
    if before is not None and (before.maps, before.coefficients) != (maps, options.coefficients):
        raise InputError(
            "the potential is conditioned already, with other maps, dimension, coefficients "
            "or seed; set potential.posterior = None to begin anew"
        )
    if valid is None and before is None:
        raise InputError(
            "condition needs valid=..., labelled structures for the scale of the error bars"
        )
    if valid is not None:
        keys_of(valid, options.labels)
    if before is not None and before.evidence is None:
        raise InputError(
            "the posterior was kept as draws alone, to which nothing can be added; set "
            "potential.posterior = None and condition on all structures"
        )
