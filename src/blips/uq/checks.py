"""Check the arrays that metrics, calibrators and figures take; each check raises InputError."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from blips.errors import InputError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

REFUSED = {  # by what is expected: which values are refused, and what is said of them
    "finite": (
        lambda array: ~np.isfinite(array),
        "NaN or infinite; expected finite numbers. Find the structures they come from and fix or "
        "remove them.",
    ),
    "positive": (
        lambda array: array <= 0.0,
        "zero or negative; expected standard deviations above zero. Pass std=None for a "
        "deterministic model, or floor them at your numerical resolution, np.maximum(std, 1e-6).",
    ),
    # Where nothing divides by it: a model may be exactly certain, for instance an equivariant one
    # about the out-of-plane force of a planar molecule.
    "non-negative": (
        lambda array: array < 0.0,
        "negative; expected standard deviations or absolute errors, zero or more. Check that they "
        "are neither logarithms nor signed errors.",
    ),
}


def checked_array(name: str, values: ArrayLike, expected: str = "finite") -> FloatArray:
    """Return ``values`` as a non-empty, finite float64 array; see REFUSED for what is expected."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name} cannot be read as an array of real numbers ({error}); expected a numpy array "
            "or nested lists of equal length. Convert tensors with .detach().cpu().numpy()."
        ) from error
    if array.size == 0:
        raise InputError(f"{name} is empty; expected at least one value. Check the data selection.")
    for is_bad, problem in (REFUSED["finite"], REFUSED[expected]):
        if count := np.count_nonzero(is_bad(array)):
            raise InputError(f"{name} has {count} of {array.size} values that are {problem}")
    return array


def checked_together(**given: tuple[ArrayLike, str]) -> tuple[FloatArray, ...]:
    """Check (values, expected) by name, and that all have one shape (nothing is broadcast)."""
    arrays = {name: checked_array(name, *one) for name, one in given.items()}
    if len({array.shape for array in arrays.values()}) > 1:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise InputError(
            f"shapes differ: {shapes}; expected one common shape, because nothing is broadcast. "
            "Reshape or repeat the arrays explicitly."
        )
    return tuple(arrays.values())


def checked_prediction(
    mean: ArrayLike, std: ArrayLike, target: ArrayLike
) -> tuple[FloatArray, ...]:
    """Validate a Gaussian prediction: (mean, std, target)."""
    return checked_together(mean=(mean, "finite"), std=(std, "positive"), target=(target, "finite"))


def standardised_error(mean: ArrayLike, std: ArrayLike, target: ArrayLike) -> FloatArray:
    """Validate a Gaussian prediction and return (target - mean) / std."""
    mean, std, target = checked_prediction(mean, std, target)
    return (target - mean) / std


def checked_ranking(score: ArrayLike, error: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Validate one non-negative score (a std) and one non-negative error per item, both [n]."""
    score, error = checked_together(score=(score, "non-negative"), error=(error, "non-negative"))
    if score.ndim != 1:
        raise InputError(
            f"ranking metrics got arrays of shape {score.shape}; expected one value per item, [n]. "
            "Reduce vectors first, e.g. with force_items."
        )
    return score, error
