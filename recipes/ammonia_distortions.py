"""Random distortions of ammonia, each with one amplitude: stretch, bend, inversion, random.

A distortion is a function a -> positions [4, 3] (N first, at the origin for a = 0). Its shape is
drawn once; the energy grows roughly as a^2, and a = 1 is worth some 20 kcal/mol.
"""

from collections.abc import Callable

import numpy as np

Distortion = Callable[[float], np.ndarray]  # amplitude -> positions [4, 3]


def rotated(vector: np.ndarray, axis: np.ndarray, angle: float) -> np.ndarray:
    """Rotate `vector` about `axis` by `angle` (radian), Rodrigues' formula."""
    axis = axis / np.linalg.norm(axis)
    parallel = axis * (axis @ vector)
    return parallel + np.cos(angle) * (vector - parallel) + np.sin(angle) * np.cross(axis, vector)


def stretch(minimum: np.ndarray, rng: np.random.Generator) -> Distortion:
    """Scale one to three N-H bonds by exp(0.2 a c) with random c in -1..1."""
    factors = rng.uniform(-0.6, 1.0, 3) * (rng.permutation(3) < rng.integers(1, 4))
    factors *= rng.choice([1.0, -1.0], p=[0.75, 0.25])
    factors /= np.abs(factors).max()
    scale = np.concatenate([[0.0], factors])[:, None]
    return lambda a: minimum * np.exp(0.2 * a * scale)


def bend(minimum: np.ndarray, rng: np.random.Generator) -> Distortion:
    """Turn one or two N-H bonds by 0.4 a c about random perpendicular axes, c in -1..1."""
    angles = rng.uniform(0.3, 1.0, 3) * rng.choice([-1, 1], 3)
    angles *= rng.permutation(3) < rng.integers(1, 3)
    axes = np.cross(minimum[1:], rng.standard_normal((3, 3)))

    def path(a: float) -> np.ndarray:
        turned = [
            rotated(bond, axis, 0.4 * a * angle)
            for bond, axis, angle in zip(minimum[1:], axes, angles, strict=True)
        ]
        return np.vstack([minimum[:1], turned])

    return path


def inversion(minimum: np.ndarray, rng: np.random.Generator) -> Distortion:
    """Open the umbrella to near-planar or beyond; scale bonds by exp(0.15 a c), tilt by a."""
    centre = minimum[1:].mean(0)
    height, radius = np.linalg.norm(centre), np.linalg.norm(minimum[1:] - centre, axis=1).mean()
    axis = centre / height
    bond = np.hypot(height, radius)
    start = np.arctan2(height, radius)
    umbrella = start * rng.uniform(-0.6, 0.6)
    outward = (minimum[1:] - centre) / radius
    opened = bond * (np.cos(umbrella) * outward + np.sin(umbrella) * axis)
    factors = rng.uniform(-1, 1, 3)
    tilts = rng.uniform(-0.5, 0.5, 3)
    factors /= np.abs(factors).max()

    def path(a: float) -> np.ndarray:
        bonds = opened * np.exp(0.15 * a * factors)[:, None] + 0.3 * a * tilts[:, None] * axis
        return np.vstack([minimum[:1], bonds])

    return path


def random_displacement(minimum: np.ndarray, rng: np.random.Generator) -> Distortion:
    """Displace all atoms along a random Cartesian direction by 0.4 a in total."""
    direction = rng.standard_normal((4, 3))
    direction /= np.linalg.norm(direction)
    return lambda a: minimum + 0.4 * a * direction


DISTORTIONS = {
    "stretch": stretch,
    "bend": bend,
    "inversion": inversion,
    "random": random_displacement,
}
