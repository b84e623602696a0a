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
HEAVIEST = 118  # atomic number


def finite_array(name: str, values: npt.ArrayLike) -> FloatArray:
    """Return ``values`` as a non-empty, finite float64 array or raise InputError."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name} cannot be read as an array of real numbers ({error}); expected a numpy array "
            "or nested lists of equal length. Convert tensors with .detach().cpu().numpy()."
        ) from error
    if array.size == 0:
        raise InputError(f"{name} is empty; expected at least one value. Check the data selection.")
    n_bad = int(np.count_nonzero(~np.isfinite(array)))
    if n_bad:
        raise InputError(
            f"{name} has {n_bad} of {array.size} values that are NaN or infinite; expected finite "
            "numbers. Find the structures they come from and fix or remove them."
        )
    return array


def positive_array(name: str, values: npt.ArrayLike) -> FloatArray:
    """Return ``values`` as a finite, strictly positive array or raise InputError."""
    array = finite_array(name, values)
    n_bad = int(np.count_nonzero(array <= 0.0))
    if n_bad:
        raise InputError(
            f"{name} has {n_bad} of {array.size} values that are zero or negative; expected "
            "standard deviations above zero. Pass std=None for a deterministic model, or floor "
            "them at your numerical resolution, e.g. np.maximum(std, 1e-6)."
        )
    return array


def non_negative_array(name: str, values: npt.ArrayLike) -> FloatArray:
    """Return ``values`` as a finite array without negative entries or raise InputError.

    For what does not divide by std: a model may be exactly certain, for instance an equivariant
    one about the out-of-plane force of a planar molecule.
    """
    array = finite_array(name, values)
    n_bad = int(np.count_nonzero(array < 0.0))
    if n_bad:
        raise InputError(
            f"{name} has {n_bad} of {array.size} values that are negative; expected standard "
            "deviations or absolute errors, zero or more. Check that they are neither logarithms "
            "nor signed errors."
        )
    return array


def same_shape(**arrays: FloatArray) -> None:
    """Raise InputError unless all arrays have one shape (nothing is broadcast)."""
    if len({array.shape for array in arrays.values()}) > 1:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise InputError(
            f"shapes differ: {shapes}; expected one common shape, because nothing is broadcast. "
            "Reshape or repeat the arrays explicitly."
        )


def checked_pair(mean: npt.ArrayLike, target: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Validate predictions and targets."""
    mean, target = finite_array("mean", mean), finite_array("target", target)
    same_shape(mean=mean, target=target)
    return mean, target


def standardised_error(
    mean: npt.ArrayLike, std: npt.ArrayLike, target: npt.ArrayLike
) -> tuple[FloatArray, FloatArray]:
    """Validate a Gaussian prediction and return (z, std) with z = (target - mean) / std."""
    mean, target = checked_pair(mean, target)
    std = positive_array("std", std)
    same_shape(mean=mean, std=std, target=target)
    return (target - mean) / std, std


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


def checked_quantity(
    name: str,
    mean: npt.ArrayLike | None,
    std: npt.ArrayLike | None,
    reference: npt.ArrayLike | None,
    n_dimensions: int,
) -> tuple[FloatArray, FloatArray | None, FloatArray]:
    """Validate predicted energies [S] or vectors [N, 3] with their references."""
    if mean is None or reference is None:
        missing = name if mean is None else f"{name}_ref"
        raise InputError(
            f"{missing} is missing; expected {name} and {name}_ref together. Pass both or neither."
        )
    arrays = {name: finite_array(name, mean)}
    arrays[f"{name}_ref"] = finite_array(f"{name}_ref", reference)
    if std is not None:
        arrays[f"{name}_std"] = positive_array(f"{name}_std", std)
    same_shape(**arrays)
    if arrays[name].ndim != n_dimensions:
        expected = "[S], one per structure" if n_dimensions == 1 else "[N, 3], one row per atom"
        raise InputError(f"{name} has shape {arrays[name].shape}; expected {expected}. Reshape it.")
    return arrays[name], arrays.get(f"{name}_std"), arrays[f"{name}_ref"]


def checked_counts(n_atoms: npt.ArrayLike, n_rows: int | None = None) -> IntArray:
    """Validate numbers of atoms per structure [S], which must add up to ``n_rows`` if given."""
    counts = finite_array("n_atoms", n_atoms)
    if counts.ndim != 1 or np.any(counts < 1) or np.any(counts != np.round(counts)):
        raise InputError(
            "n_atoms must hold one positive whole number per structure, [S]; drop structures "
            "without atoms and pass a flat list."
        )
    if n_rows is not None and int(counts.sum()) != n_rows:
        raise InputError(
            f"n_atoms adds up to {int(counts.sum())} atoms but the forces have {n_rows} rows; "
            "expected one row per atom, structures one after the other. Check their order."
        )
    return counts.astype(np.int64)


def checked_numbers(numbers: npt.ArrayLike, n_atoms: int) -> IntArray:
    """Validate atomic numbers [N] of so many atoms; 0 is a dummy atom."""
    array = finite_array("numbers", numbers)
    whole = np.all(array == np.round(array)) and array.min() >= 0
    if array.shape != (n_atoms,) or not whole or array.max() > HEAVIEST:
        raise InputError(
            f"numbers have shape {array.shape} for {n_atoms} atoms; expected one atomic number "
            f"between 0 and {HEAVIEST} per atom, e.g. atoms.numbers concatenated."
        )
    return array.astype(np.int64)
