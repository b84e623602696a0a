"""Dynamics of five charged particles, many simulations at a time.

    F_i = sum_j q_i q_j (x_i - x_j) / |x_i - x_j|^3, each component clipped to ±100
    v += dt F(x) once; then for step = 1, 2, ...:  x += dt v;  save every 100th;  v += dt F(x)

| symbol | here |
|---|---|
| x, v | `x`, `v` [3, 5, B]: component, particle, simulation of a block |
| q | `charges` [B, 5] |
| dt | `TIME_STEP` |

Frame k is step 100 (k + 1). Operations follow the order of rounding of the original generator:
squared distances from the Gram matrix, a power of 3/2, sums over j in ascending order.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

PARTICLES = 5
TIME_STEP = 0.001
LARGEST_FORCE = 100.0
STEPS_PER_FRAME = 100

_BLOCK = 500  # simulations integrated together: their work arrays stay in the processor's cache


def integrate(
    positions: np.ndarray,
    velocities: np.ndarray,
    charges: np.ndarray,
    frames: tuple[int, ...],
    threads: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Integrate S independent simulations and keep the given frames.

    Args:
        positions: initial positions [S, 3, 5].
        velocities: initial velocities [S, 3, 5].
        charges: charges [S, 5].
        frames: numbers of the frames to keep, ascending; T of them.
        threads: blocks of simulations integrated at the same time.
        progress: called as progress(done, total) after each block.

    Returns:
        Positions and velocities, each [S, T, 5, 3].
    """
    total = len(charges)
    found = np.empty((2, total, len(frames), PARTICLES, 3))

    def run(start: int) -> int:
        block = slice(start, start + _BLOCK)
        found[:, block] = _integrate_block(
            positions[block], velocities[block], charges[block], frames
        )
        return min(start + _BLOCK, total)

    with ThreadPoolExecutor(threads) as pool:
        for done in pool.map(run, range(0, total, _BLOCK)):
            if progress is not None:
                progress(done, total)
    return found[0], found[1]


def _integrate_block(
    positions: np.ndarray, velocities: np.ndarray, charges: np.ndarray, frames: tuple[int, ...]
) -> np.ndarray:
    """Integrate a block of B simulations; return positions and velocities [2, B, T, 5, 3]."""
    x = np.ascontiguousarray(positions.transpose(1, 2, 0))  # [3, 5, B]
    v = np.ascontiguousarray(velocities.transpose(1, 2, 0))  # [3, 5, B]
    force = _Force(charges)
    change = np.empty_like(x)
    saved_steps = [STEPS_PER_FRAME * (frame + 1) for frame in frames]
    saved = []
    v += np.multiply(force(x), TIME_STEP, out=change)
    for step in range(1, saved_steps[-1] + 1):
        x += np.multiply(v, TIME_STEP, out=change)
        if step in saved_steps:
            saved.append(np.stack([x, v]))  # [2, 3, 5, B]
        v += np.multiply(force(x), TIME_STEP, out=change)
    return np.stack(saved).transpose(1, 4, 0, 3, 2)


class _Force:
    """Forces on blocks of simulations, with work arrays that are allocated once.

    The ten pairs (i, j > i) stand in the order 01 02 03 04 12 13 14 23 24 34.
    """

    def __init__(self, charges: np.ndarray) -> None:
        block = len(charges)
        first, second = np.triu_indices(PARTICLES, 1)
        self.charge_products = np.ascontiguousarray((charges[:, first] * charges[:, second]).T)
        self.starts = [(i, 4 * i - i * (i - 1) // 2, 4 - i) for i in range(PARTICLES - 1)]
        self.rows = np.empty((block, 3, PARTICLES))
        self.columns = np.empty((block, PARTICLES, 3))
        self.gram = np.empty((block, PARTICLES, PARTICLES))
        self.squares = np.empty((3, PARTICLES, block))
        self.pairs = np.empty((3, 10, block))
        self.distances = np.empty((10, block))
        self.force = np.empty((3, PARTICLES, block))

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Compute clipped forces [3, 5, B] at positions [3, 5, B], in a reused buffer."""
        strength = self._strengths(x)  # [10, B]
        pairs, force = self.pairs, self.force
        for i, start, count in self.starts:
            np.subtract(x[:, i : i + 1], x[:, i + 1 :], out=pairs[:, start : start + count])
        pairs *= strength
        force.fill(0.0)
        for i, start, count in self.starts:
            for pair in range(start, start + count):
                force[:, i] += pairs[:, pair]
            force[:, i + 1 :] -= pairs[:, start : start + count]
        return np.clip(force, -LARGEST_FORCE, LARGEST_FORCE, out=force)

    def _strengths(self, x: np.ndarray) -> np.ndarray:
        """Compute q_i q_j / |x_i - x_j|^3 [10, B], distances from |x_i|^2 + |x_j|^2 - 2 x_i.x_j."""
        np.copyto(self.rows, x.transpose(2, 0, 1))
        np.copyto(self.columns, x.transpose(2, 1, 0))
        np.matmul(self.columns, self.rows, out=self.gram)  # BLAS: fused multiply-add, as original
        self.gram *= 2.0
        np.multiply(x, x, out=self.squares)
        norms = self.squares[0]  # [5, B]
        norms += self.squares[1]
        norms += self.squares[2]
        distances = self.distances
        for i, start, count in self.starts:
            rows = distances[start : start + count]
            np.add(norms[i], norms[i + 1 :], out=rows)
            rows -= self.gram[:, i, i + 1 :].T
        np.power(distances, 1.5, out=distances)
        return np.divide(self.charge_products, distances, out=distances)
