"""What the checks share: a comparison that fails with a readable message, and a rotation."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def assert_close(actual: Tensor, expected: Tensor, atol: float, what: str) -> None:
    """Raise AssertionError unless |actual - expected| <= atol * max(1, |expected|) everywhere."""
    if actual.shape != expected.shape:
        raise AssertionError(
            f"{what}: shape {tuple(actual.shape)} where {tuple(expected.shape)} was expected"
        )
    if actual.numel() == 0:
        return
    deviation = float((actual - expected).detach().abs().max())
    allowed = atol * max(1.0, float(expected.detach().abs().max()))
    if not deviation <= allowed:  # also true of NaN
        raise AssertionError(f"{what}: deviates by {deviation:.3g}, allowed are {allowed:.3g}")


def assert_all_close(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], atol: float, what: str
) -> None:
    """Apply `assert_close` to every expected quantity, by name."""
    for name, value in expected.items():
        assert_close(actual[name], value, atol, f"{what} ({name})")


def rotation_matrix(seed: int = 0) -> np.ndarray:
    """Draw a random proper rotation Q, [3, 3]; row vectors turn as r @ Q.T."""
    orthogonal, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))
    return orthogonal * np.sign(np.linalg.det(orthogonal))


def gradient(value: Tensor, inputs: Tensor) -> Tensor:
    """Compute d(value)/d(inputs), itself differentiable."""
    (result,) = torch.autograd.grad(value, inputs, create_graph=True)
    return result
