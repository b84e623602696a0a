"""Condition a potential on structures: collect rows, fit the scale, build the posterior."""

from collections.abc import Sequence
from typing import get_args

from ase import Atoms

from blips.backbones.base import atomistic
from blips.data.labels import Labels
from blips.data.structures import Structures, iter_given
from blips.errors import InputError
from blips.inference.linearise import LinearModel
from blips.inference.maps import ChosenMaps, chosen_roles
from blips.inference.posterior import Coefficients, ConditionedPosterior
from blips.inference.rows import collect
from blips.inference.sampling import StochasticModel
from blips.inference.scale import fit_scale, keys_of

DIMENSION = 2048  # more weights are sketched
ROWS = 48  # force rows of a structure


def condition(
    model: StochasticModel,
    structures: Structures,
    valid: Structures | None,
    *,
    maps: str | Sequence[str],
    dimension: int,
    rows: int,
    coefficients: Coefficients,
    labels: Labels | None,
    seed: int,
) -> ConditionedPosterior:
    """Return the model's posterior that has also seen these structures.

    The arguments are those of `BayesianPotential.condition`.
    """
    valid = None if valid is None else list(iter_given(valid))
    if coefficients not in get_args(Coefficients):
        known = " or ".join(get_args(Coefficients))
        raise InputError(f"unknown coefficients {coefficients!r}; use {known}")
    before = None if model.posterior is None else model.conditioned()
    backbone = atomistic(model.backbone)
    roles, last = chosen_roles(backbone, model.roles, maps)
    chosen = ChosenMaps.of(backbone, roles, dimension, seed, last=last)
    _check(before, chosen, coefficients, valid)
    if valid is not None:
        keys_of(valid, labels)
    linear = LinearModel(
        backbone, chosen, model.coefficients if coefficients == "network" else None
    )
    first = 0 if before is None else before.structures
    seen = collect(linear, iter_given(structures), rows=rows, seed=seed, first=first)
    if before is not None and before.evidence is not None:
        seen = seen.joined(before.evidence, before.structures, before.domain)
    scale = before.scale if before is not None else None
    if valid is not None or scale is None:
        scale = fit_scale(linear, seen.evidence, valid or [], seed=seed, labels=labels)
    return ConditionedPosterior(
        chosen, scale, coefficients, seen.structures, seen.domain, seen.evidence
    )


def _check(
    before: ConditionedPosterior | None,
    maps: ChosenMaps,
    coefficients: Coefficients,
    valid: Sequence[Atoms] | None,
) -> None:
    """Refuse what cannot be added to the posterior so far, before any structure is read."""
    if before is None:
        if valid is None:
            raise InputError(
                "condition needs valid=..., labelled structures for the scale of the error bars"
            )
        return
    if (before.maps, before.coefficients) != (maps, coefficients):
        raise InputError(
            "the potential is conditioned already, with other maps, dimension, coefficients "
            "or seed; set potential.posterior = None to begin anew"
        )
    if before.evidence is None:
        raise InputError(
            "the posterior was kept as draws alone, to which nothing can be added; set "
            "potential.posterior = None and condition on all structures"
        )
