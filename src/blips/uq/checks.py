"""Check the arrays that metrics, calibrators and figures take; each check raises InputError.

``mean`` and ``std`` describe a Gaussian prediction N(mean, std^2) of ``target``; arrays share one
shape and nothing is broadcast. Letters in shape comments: N atoms, S structures, n any number.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from blips.errors import InputError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def finite_array(name: str, values: npt.ArrayLike) -> FloatArray:
    """Return ``values`` as a non-empty, finite float64 array."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name} cannot be read as an array of real numbers ({error}); expected a numpy array "
            "or nested lists of equal length. Convert tensors with .detach().cpu().numpy()."
        ) from error
    if array.size == 0:
        raise InputError(f"{name} is empty; expected at least one value. Check the data selection.")
    problem = "NaN or infinite; expected finite numbers. Find the structures they come from and "
    return _without(name, array, ~np.isfinite(array), problem + "fix or remove them.")


def positive_array(name: str, values: npt.ArrayLike) -> FloatArray:
    """Return ``values`` as a finite, strictly positive array."""
    array = finite_array(name, values)
    problem = (
        "zero or negative; expected standard deviations above zero. Pass std=None for a "
        "deterministic model, or floor them at your numerical resolution, np.maximum(std, 1e-6)."
    )
    return _without(name, array, array <= 0.0, problem)


def non_negative_array(name: str, values: npt.ArrayLike) -> FloatArray:
    """Return ``values`` as a finite array without negative entries.

    For what does not divide by std: a model may be exactly certain, for instance an equivariant
    one about the out-of-plane force of a planar molecule.
    """
    array = finite_array(name, values)
    problem = (
        "negative; expected standard deviations or absolute errors, zero or more. Check that they "
        "are neither logarithms nor signed errors."
    )
    return _without(name, array, array < 0.0, problem)


def _without(name: str, array: FloatArray, bad: npt.NDArray[np.bool_], problem: str) -> FloatArray:
    if bad.any():
        count = np.count_nonzero(bad)
        raise InputError(f"{name} has {count} of {bad.size} values that are {problem}")
    return array


def same_shape(**arrays: FloatArray) -> None:
    """Raise InputError unless all arrays have one shape (nothing is broadcast)."""
    if len({array.shape for array in arrays.values()}) > 1:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise InputError(
            f"shapes differ: {shapes}; expected one common shape, because nothing is broadcast. "
            "Reshape or repeat the arrays explicitly."
        )


def checked_prediction(
    mean: npt.ArrayLike, std: npt.ArrayLike, target: npt.ArrayLike
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Validate a Gaussian prediction: (mean, std, target)."""
    mean, target = finite_array("mean", mean), finite_array("target", target)
    std = positive_array("std", std)
    same_shape(mean=mean, std=std, target=target)
    return mean, std, target


def standardised_error(
    mean: npt.ArrayLike, std: npt.ArrayLike, target: npt.ArrayLike
) -> FloatArray:
    """Validate a Gaussian prediction and return (target - mean) / std."""
    mean, std, target = checked_prediction(mean, std, target)
    return (target - mean) / std


def checked_ranking(score: npt.ArrayLike, error: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Validate one non-negative score (a std) and one non-negative error per item, both [n]."""
    score, error = non_negative_array("score", score), non_negative_array("error", error)
    same_shape(score=score, error=error)
    if score.ndim != 1:
        raise InputError(
            f"ranking metrics got arrays of shape {score.shape}; expected one value per item, [n]. "
            "Reduce vectors first, e.g. with force_items."
        )
    return score, error
